"""Deferred metrics end up as ``put_scalar`` leaves them, and copy nothing to the host before."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from detectron2.utils.events import EventStorage
from torch.overrides import TorchFunctionMode

from d2_static_sampler.engine.op_counter import count_data_dependent_ops
from d2_static_sampler.static_step import deferred
from d2_static_sampler.static_step.deferred import DeferredMetrics, deferred_metrics

READS = {
    *("tolist", "item", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__"),
    *("__array__", "nonzero", "is_nonzero", "__contains__"),
}


class count_reads(TorchFunctionMode):
    """Counts what copies a tensor to the host; on a CPU torch's dispatcher never hears of it."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in READS:
            self.reads.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def storage():
    with EventStorage() as storage:
        yield storage


def written(storage: EventStorage) -> dict[str, list]:
    return {name: list(history.values()) for name, history in storage.histories().items()}


def everything(storage: EventStorage) -> tuple:
    return written(storage), storage.latest(), storage.smoothing_hints(), storage.iter


def test_one_for_each_storage_by_default_the_current(storage):
    assert deferred_metrics() is deferred_metrics(storage) is deferred_metrics()
    with EventStorage() as inner:
        assert deferred_metrics() is deferred_metrics(inner) is not deferred_metrics(storage)


def test_without_a_storage():
    with pytest.raises(AssertionError, match="EventStorage"):
        deferred_metrics()


VALUES = [
    torch.tensor(0.1),
    torch.tensor(0.1, dtype=torch.float64),
    torch.tensor(0.1, dtype=torch.bfloat16),
    torch.tensor(0.1, dtype=torch.float16),
    torch.tensor(2**40 + 1),
    torch.tensor(7, dtype=torch.uint8),
    torch.tensor(True),
    torch.tensor([[0.25]]),
    torch.tensor(float("inf")),
    3,
    0.7,
    True,
]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_the_value_is_that_of_put_scalar(storage, value):
    storage.put_scalar("stock", value)
    deferred_metrics().put("ours", value)
    deferred_metrics().flush()
    assert written(storage)["ours"] == written(storage)["stock"]
    assert type(storage.latest()["ours"][0]) is float


def run_both(use) -> tuple[EventStorage, EventStorage]:
    """Ten iterations with ``put_scalar`` and with ``put``."""
    storages = []
    for is_ours in (False, True):
        torch.manual_seed(0)
        with EventStorage(5) as storage:
            for _ in range(10):
                use(storage, deferred_metrics().put if is_ours else storage.put_scalar)
                storage.step()
            deferred_metrics().flush()
        storages.append(storage)
    return storages[0], storages[1]


def test_iterations_scopes_and_hints_are_those_of_put_scalar():
    def use(storage, put):
        put("b", torch.rand(()))
        with storage.name_scope("roi"):
            put("b", torch.rand(()))
            with storage.name_scope("inner"):
                put("raw", torch.rand(()), smoothing_hint=False)
        if storage.iter % 3 == 0:
            put("a", torch.rand(()))
            put("a", 0.5)

    stock, ours = run_both(use)
    assert everything(ours) == everything(stock)
    assert list(ours.histories()) == list(stock.histories())


def test_a_flush_within_a_scope_does_not_move_what_is_pending(storage):
    deferred_metrics().put("x", 1)
    with storage.name_scope("roi"):
        deferred_metrics().flush()
        storage.put_scalar("y", 2)
    assert list(storage.latest()) == ["x", "roi/y"]


@pytest.mark.parametrize("as_tensor", [float, torch.tensor])
def test_a_divisor(storage, as_tensor):
    for iteration, divisor in enumerate([0, 3, 0, 7]):
        storage.iter = iteration
        deferred_metrics().put("x", torch.tensor(2), as_tensor(divisor))
    deferred_metrics().flush()
    assert written(storage) == {"x": [(2 / 3, 1), (2 / 7, 3)]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_value_is_that_of_the_moment(storage, dtype):
    value = torch.tensor(1.0, dtype=dtype)
    deferred_metrics().put("x", value)
    value.fill_(2)
    deferred_metrics().flush()
    assert storage.latest()["x"] == (1.0, 0)


def test_several_elements_are_refused(storage):
    with pytest.raises(RuntimeError):
        deferred_metrics().put("x", torch.ones(2))


def test_it_flushes_by_itself_just_before_detectron2_writes(storage):
    metrics, lengths = deferred_metrics(), []
    metrics.period = 5
    for storage.iter in range(3, 17):
        metrics.put("x", storage.iter)
        metrics.put("y", storage.iter)
        lengths.append(len(written(storage).get("x", [])))
    # In iterations 4, 9 and 14: what came before.
    assert lengths == [0] + [1] * 5 + [6] * 5 + [11] * 2 + [11]
    metrics.flush()
    assert written(storage)["x"] == written(storage)["y"] == [(i, i) for i in range(3, 17)]


def test_it_flushes_by_itself_after_a_pause(storage):
    metrics = deferred_metrics()
    for storage.iter in (3, 1000):
        metrics.put("x", 0)
    assert written(storage) == {"x": [(0, 3)]}


def test_no_period_no_flush(storage):
    metrics = deferred_metrics()
    metrics.period = None
    for storage.iter in range(100):
        metrics.put("x", 0)
    assert len(metrics.pending) == 100


def test_memory_is_bounded_where_the_iteration_stands_still(storage, monkeypatch):
    monkeypatch.setattr(deferred, "MOST_PENDING", 50)
    for i in range(120):
        deferred_metrics().put("x", torch.tensor(i))
        assert len(deferred_metrics().pending) <= 50
    deferred_metrics().flush()
    assert [value for value, _ in written(storage)["x"]] == list(range(120))


def put_some(metrics: DeferredMetrics, device: str = "cpu") -> None:
    metrics.put("loss", torch.rand((), device=device, requires_grad=True) * 2)
    metrics.put("accuracy", torch.ones((), dtype=torch.int64, device=device), 3)
    metrics.put("fraction", 1, torch.ones((), dtype=torch.int64, device=device))
    metrics.check(torch.ones((), dtype=torch.bool, device=device), ValueError, "never")


def test_one_copy_a_flush_and_none_between(storage):
    metrics = deferred_metrics()
    with count_reads() as count, count_data_dependent_ops() as ops:
        for storage.iter in range(10):
            put_some(metrics)
        assert count.reads == []
        metrics.flush()
    assert count.reads == ["tolist"]
    assert ops.data_dependent == []
    assert len(written(storage)["fraction"]) == 10


def test_the_count_sees_a_copy(storage):
    with count_reads() as count:
        storage.put_scalar("x", torch.ones(()))
    assert count.reads == ["__float__"]


def test_nothing_is_read_before_a_flush(storage):
    # Tensors without values: reading one is an error.
    put_some(deferred_metrics(), device="meta")
    with pytest.raises((RuntimeError, NotImplementedError)):
        deferred_metrics().flush()


def test_no_copy_for_numbers(storage):
    deferred_metrics().put("x", 1)
    with count_reads() as count:
        deferred_metrics().flush()
        deferred_metrics().flush()
    assert count.reads == []
    assert written(storage) == {"x": [(1, 0)]}


class DivergedError(RuntimeError):
    pass


def test_the_first_failed_check_stops_where_detectron2_stops(storage):
    metrics = deferred_metrics()
    for storage.iter in range(6):
        metrics.put("before", storage.iter)
        metrics.check(torch.tensor(storage.iter < 3), DivergedError, "Diverged!")
        metrics.check(storage.iter < 2 or storage.iter > 3, FloatingPointError, "NaN")
        metrics.put("behind", storage.iter)
    with pytest.raises(FloatingPointError, match=r"^NaN \(iteration 2\)$"):
        metrics.flush()
    assert written(storage) == {
        "before": [(0, 0), (1, 1), (2, 2)],
        "behind": [(0, 0), (1, 1)],
    }
    assert storage.iter == 5
    metrics.flush()  # neither raised nor written twice
    metrics.put("behind", 6)
    metrics.flush()
    assert written(storage)["behind"][2:] == [(6, 5)]


def test_a_check_takes_whatever_makes_an_exception(storage):
    deferred_metrics().check(torch.tensor([False]), lambda text: KeyError(text, 1), "Lost")
    with pytest.raises(KeyError) as caught:
        deferred_metrics().flush()
    assert caught.value.args == ("Lost (iteration 0)", 1)


def test_a_check_fails_without_any_flush_of_the_user(storage):
    deferred_metrics().check(torch.tensor(False), AssertionError, "Bad boxes")
    for storage.iter in range(1, 19):
        deferred_metrics().put("x", 1)
    storage.iter = 19
    with pytest.raises(AssertionError, match=r"Bad boxes \(iteration 0\)"):
        deferred_metrics().put("x", 1)


def test_an_interrupted_write_goes_on_with_the_next(storage, monkeypatch):
    for storage.iter in range(4):
        deferred_metrics().put("x", torch.tensor(storage.iter))
    put_scalar = storage.put_scalar

    def interrupt(name, value, **hints):
        put_scalar(name, value, **hints)
        if value == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(storage, "put_scalar", interrupt)
        with pytest.raises(KeyboardInterrupt):
            deferred_metrics().flush()
    assert storage.iter == 3
    deferred_metrics().flush()
    assert written(storage) == {"x": [(i, i) for i in range(4)]}


def test_a_finished_storage_is_freed_with_what_was_pending():
    with EventStorage() as storage:
        metrics = deferred_metrics()
        metrics.put("x", torch.ones(()))
    gone, metrics = weakref.ref(storage), weakref.ref(metrics)
    gc.disable()
    try:
        del storage
        assert gone() is None
        assert metrics() is None
    finally:
        gc.enable()


class Saved:
    """What a graph keeps in place of a tensor, to be seen when the graph goes."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_neither_graph_nor_large_tensor_is_kept(storage):
    saved = []

    def save(tensor: torch.Tensor) -> Saved:
        kept = Saved(tensor)
        saved.append(weakref.ref(kept))
        return kept

    with torch.autograd.graph.saved_tensors_hooks(save, lambda kept: kept.tensor):
        squares = torch.rand(1000, requires_grad=True) ** 2
    deferred_metrics().put("x", squares.sum())
    deferred_metrics().put("y", squares[0])
    deferred_metrics().check(squares.sum() > 0, ValueError, "")
    assert saved[0]() is not None
    del squares
    assert saved[0]() is None
    kept = [value for item in deferred_metrics().pending for value in item.values]
    sizes = [value.untyped_storage().nbytes() for value in kept if isinstance(value, torch.Tensor)]
    assert sizes == [8, 8, 8]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_no_synchronisation_and_one_copy_a_device(storage):
    metrics = deferred_metrics()
    put_some(metrics, "cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for storage.iter in range(10):
            put_some(metrics, "cuda")
            put_some(metrics, "cpu")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with count_reads() as count:
        metrics.flush()
    assert count.reads == ["tolist"] * 2
    assert len(written(storage)["loss"]) == 21

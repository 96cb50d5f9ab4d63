"""Deferred metrics end up as ``put_scalar`` leaves them, and copy nothing to the host before."""

from __future__ import annotations

import pytest
import torch
from detectron2.utils.events import EventStorage

from d2_static_sampler.modeling import deferred
from d2_static_sampler.modeling.deferred import deferred_metrics
from tests.modeling.deferred_helpers import written


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

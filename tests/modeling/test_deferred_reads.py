"""Deferred metrics and checks copy nothing to the host before a flush, and keep nothing alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from detectron2.utils.events import EventStorage

from d2_static_sampler.modeling.deferred import deferred_metrics
from d2_static_sampler.profiling.op_counter import count_data_dependent_ops
from tests.modeling.deferred_helpers import count_reads, put_some, written


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

"""A trainer with deferred losses logs what Detectron2's logs, and stops at what stops Detectron2.

Each training here is one of Detectron2's trainer, once as it is and once with deferred losses.
"""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from detectron2.engine import SimpleTrainer
from detectron2.engine.hooks import CallbackHook
from detectron2.utils.events import EventStorage

from d2_static_sampler.engine.deferred_losses import DeferredLosses
from d2_static_sampler.modeling.deferred import deferred_metrics
from tests.engine.deferred_trainings import (
    Model,
    figures,
    lines_of,
    make_trainer,
    state,
    train,
)
from tests.modeling.deferred_helpers import count_reads, written

IS_RELEASE = not hasattr(SimpleTrainer, "after_backward")


only_main = pytest.mark.skipif(IS_RELEASE, reason="release 0.6 has no such option")


@pytest.mark.parametrize("periods", [(1,), (5,), (20,), (5, 7, 0)], ids=str)
@pytest.mark.parametrize("start", [0, 7])
def test_storage_and_metrics_json_are_those_of_detectron2(tmp_path, periods, start):
    stock, _ = train(Model(False), start=start, json_file=tmp_path / "stock")
    ours, hook = train(Model(True), periods, start=start, json_file=tmp_path / "ours")
    assert figures(ours.storage) == figures(stock.storage)
    assert set(ours.storage.latest()) == set(stock.storage.latest())
    assert len(figures(ours.storage)["total_loss"]) == 23 - start
    assert all(torch.equal(*pair) for pair in zip(*map(state, (ours, stock)), strict=True))
    due = [i for i in range(start, 23) if any(p and (i + 1) % p == 0 for p in periods)]
    assert hook.flushed_at == sorted({start, *due, 22})
    if periods in ((1,), (5,)):  # those that the writer's is a multiple of
        assert lines_of(tmp_path / "ours") == lines_of(tmp_path / "stock")


def test_one_loss_has_one_name():
    stock, _ = train(Model(False, failure="one loss"))
    ours, _ = train(Model(True, failure="one loss"))
    assert figures(ours.storage) == figures(stock.storage)


def test_a_prefix():
    histories = []
    for is_ours in (False, True):
        trainer = make_trainer(Model(is_ours))
        losses = DeferredLosses(trainer, 3)
        assert not is_ours or losses.install()
        torch.manual_seed(0)
        with EventStorage() as storage:
            for storage.iter in range(7):
                trainer.iter = storage.iter
                for prefix in ("d_", "g_"):
                    trainer._write_metrics({"a": torch.rand(())}, 0.0, prefix)
            losses.flush()
        histories.append(written(storage))
    assert histories[1] == histories[0]
    assert len(histories[0]["g_total_loss"]) == 7


def test_one_copy_a_period():
    with count_reads() as count:
        train(Model(True), (5,), stop=20)
    assert count.reads == ["tolist"] * 5  # the fifth is that of the first iteration
    with count_reads() as count:
        train(Model(False), stop=20)
    assert len(count.reads) >= 60


def test_what_is_pending_is_bounded_by_the_longest_gap():
    _, hook = train(Model(True), (100,), stop=50)
    assert hook.flushed_at == [0, 49]
    _, hook = train(Model(True), (7,), stop=50)
    assert hook.flushed_at == [0, 6, 13, 20, 27, 34, 41, 48, 49]


def test_flush_before_a_checkpoint_and_twice():
    trainer = make_trainer(Model(True))
    losses, seen = DeferredLosses(trainer, 20), []
    losses.flush()

    def save(trainer) -> None:
        if trainer.iter == 7:
            losses.flush()
            seen.append(figures(trainer.storage))
            losses.flush()
            losses.flush_alone()
            seen.append(figures(trainer.storage))

    trainer.register_hooks([CallbackHook(before_train=lambda _: losses.install(), after_step=save)])
    trainer.train(0, 10)
    losses.remove()
    losses.remove()
    assert seen[0] == seen[1]
    assert [at for _, at in seen[0]["total_loss"]] == list(range(8))
    assert figures(trainer.storage) == figures(train(Model(False), stop=10)[0].storage)


def test_remove_gives_everything_back():
    trainer = make_trainer(Model(True))
    before = dict(vars(trainer))
    losses = DeferredLosses(trainer, 20)
    with EventStorage() as storage:
        losses.install()
        trainer.run_step()
        assert deferred_metrics().period is None
        losses.remove()
        assert deferred_metrics().period == 20
    assert {k: v for k, v in vars(trainer).items() if "_iter" not in k} == {
        k: v for k, v in before.items() if "_iter" not in k
    }
    assert len(written(storage)["total_loss"]) == 1


def test_the_trainer_is_freed_without_the_garbage_collector():
    trainer, _ = train(Model(True))
    gone = weakref.ref(trainer.storage)
    gc.disable()
    try:
        del trainer.storage
        assert gone() is None
    finally:
        gc.enable()


def test_the_trainer_within_a_default_trainer():
    inner = make_trainer(Model(True))
    outer = SimpleNamespace(_trainer=inner, max_iter=3)
    losses = DeferredLosses(outer, 20)
    assert losses.install()
    with EventStorage() as storage:
        for storage.iter in range(3):
            inner.iter = storage.iter
            inner.run_step()
    assert len(written(storage)["total_loss"]) == 3


class OwnTrainer(SimpleTrainer):
    def _write_metrics(self, *args, **kwargs) -> None:
        pass


def test_a_users_own_way_to_write_wins(warnings_of_detectron2):
    trainer = make_trainer(Model(True))
    trainer.__class__ = OwnTrainer
    assert not DeferredLosses(trainer).install()
    assert not DeferredLosses(SimpleNamespace()).install()
    trainer.__class__ = SimpleTrainer
    first, second = DeferredLosses(trainer), DeferredLosses(trainer)
    assert first.install()
    assert not second.install()
    second.remove()
    assert "_write_metrics" in vars(trainer)
    assert len(warnings_of_detectron2) == 3


def test_no_period_is_refused():
    with pytest.raises(ValueError, match="above 0"):
        DeferredLosses(SimpleNamespace(), 0)


@only_main
@pytest.mark.parametrize("options", [{"gather_metric_period": 3}, {"async_write_metrics": True}])
def test_options_of_the_newest_detectron2(options):
    stock, _ = train(Model(False), **options)
    stock.concurrent_executor.shutdown(wait=True)
    ours, _ = train(Model(True), **options)
    assert figures(ours.storage) == figures(stock.storage)
    assert ours.async_write_metrics == stock.async_write_metrics

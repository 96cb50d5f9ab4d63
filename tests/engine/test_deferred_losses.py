"""A trainer with deferred losses logs what Detectron2's logs, and stops at what stops Detectron2.

Each training here is one of Detectron2's trainer, once as it is and once with deferred losses.
"""

from __future__ import annotations

import gc
import json
import weakref
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from detectron2.engine import SimpleTrainer
from detectron2.engine.hooks import CallbackHook, PeriodicWriter
from detectron2.utils import comm
from detectron2.utils.events import EventStorage, JSONWriter, get_event_storage
from torch import multiprocessing, nn

from d2_static_sampler.engine.deferred_losses import DeferredLosses
from d2_static_sampler.static_step.deferred import deferred_metrics
from tests.static_step.test_deferred import count_reads, written

IS_RELEASE = not hasattr(SimpleTrainer, "after_backward")
only_main = pytest.mark.skipif(IS_RELEASE, reason="release 0.6 has no such option")


class Model(nn.Module):
    """Two losses and a figure; at ``fails_at`` it does what ``failure`` says."""

    def __init__(self, is_ours: bool, fails_at: int = -1, failure: str = "nan") -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.is_ours, self.fails_at, self.failure = is_ours, fails_at, failure

    def forward(self, data: torch.Tensor) -> dict[str, torch.Tensor] | torch.Tensor:
        a, b = self.layer(data).square().mean(0)
        fails = get_event_storage().iter == self.fails_at
        put = deferred_metrics().put if self.is_ours else get_event_storage().put_scalar
        with get_event_storage().name_scope("roi"):
            put("accuracy", (a / b).detach())
        if fails and self.failure == "raise":
            raise ValueError("broken image")
        if self.failure == "check":
            if self.is_ours:
                deferred_metrics().check(a.new_tensor(not fails), AssertionError, "bad boxes")
            elif fails:
                raise AssertionError("bad boxes")
        if self.failure == "one loss":
            return a
        return {"loss_b": b * float("nan") if fails and self.failure == "nan" else b, "loss_a": a}


class DeferHook(CallbackHook):
    """What SamplerHook does with deferred losses."""

    def __init__(self, periods: tuple[int, ...]) -> None:
        super().__init__()
        self.periods = periods
        self.flushed_at: list[tuple[int, int]] = []

    def before_train(self) -> None:
        self.losses = DeferredLosses(self.trainer, *self.periods)
        assert self.losses.install()

    def after_step(self) -> None:
        self.most_pending = len(deferred_metrics().pending)
        if not self.most_pending:
            self.flushed_at.append(self.trainer.iter)

    def after_train(self) -> None:
        self.losses.remove()


def make_trainer(model: Model, **options) -> SimpleTrainer:
    """Detectron2's trainer; equal for equal ranks."""
    generator = torch.Generator().manual_seed(comm.get_rank())
    data = [torch.rand(4, 3, generator=generator) for _ in range(50)]
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    return SimpleTrainer(model, data, optimizer, **options)


def train(
    model: Model, periods=(5,), start=0, stop=23, json_file=None, **options
) -> tuple[SimpleTrainer, DeferHook | None]:
    trainer = make_trainer(model, **options)
    hook = DeferHook(periods) if model.is_ours else None
    writer = json_file and PeriodicWriter([JSONWriter(str(json_file))], period=10)
    trainer.register_hooks([hook, writer])
    trainer.train(start, stop)
    return trainer, hook


def figures(storage: EventStorage) -> dict[str, list]:
    """All histories; of times, which no two runs share, the iterations alone."""
    return {
        name: [(None if "time" in name else value, at) for value, at in history]
        for name, history in written(storage).items()
    }


def lines_of(path: Path) -> list[dict]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.endswith("time")} for line in lines]


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
    assert hook.flushed_at == sorted({*due, 22})
    if periods in ((1,), (5,)):  # those that the writer's is a multiple of
        assert lines_of(tmp_path / "ours") == lines_of(tmp_path / "stock")


def state(trainer: SimpleTrainer) -> list[torch.Tensor]:
    return list(trainer.model.state_dict().values())


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
    assert count.reads == ["tolist"] * 4
    with count_reads() as count:
        train(Model(False), stop=20)
    assert len(count.reads) >= 60


def test_what_is_pending_is_bounded_by_the_longest_gap():
    _, hook = train(Model(True), (100,), stop=50)
    assert hook.flushed_at == [49]
    _, hook = train(Model(True), (7,), stop=50)
    assert hook.flushed_at == [6, 13, 20, 27, 34, 41, 48, 49]


@pytest.mark.parametrize("failure", ["nan", "check", "raise"])
@pytest.mark.parametrize("fails_at", [0, 9, 11, 22])
def test_a_failure_leaves_the_storage_of_detectron2(failure, fails_at):
    results = []
    for is_ours in (False, True):
        trainer = make_trainer(Model(is_ours, fails_at, failure))
        trainer.register_hooks([DeferHook((5,))] if is_ours else [])
        with pytest.raises((FloatingPointError, AssertionError, ValueError)) as caught:
            trainer.train(0, 23)
        text = str(caught.value).replace(f" (iteration {fails_at})", "")
        results.append((type(caught.value), text, figures(trainer.storage)))
        if is_ours and failure != "raise":
            assert trainer.iter == min(fails_at // 5 * 5 + 4, 22)  # at the flush, not behind
    assert results[1] == results[0]


def test_an_error_behind_a_nan_loss_hides_it_in_the_log_alone(warnings_of_detectron2):
    trainer = make_trainer(Model(True, 6, "nan"))
    trainer.register_hooks([DeferHook((5,)), CallbackHook(after_step=stop_at_7)])
    with pytest.raises(KeyError, match="stop"):
        trainer.train(0, 23)
    assert "FloatingPointError: Loss became infinite or NaN at iteration=6" in "".join(
        warnings_of_detectron2
    )
    assert figures(trainer.storage)["total_loss"][-1][1] == 5


def stop_at_7(trainer) -> None:
    if trainer.iter == 7:
        raise KeyError("stop")


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


def train_in_two_processes(rank: int, folder: str) -> None:
    """Both ways, then a NaN loss in process 1 alone, then an error in process 0 alone."""
    meet = f"file://{folder}/meet"
    # The time after which waiting for a process that never comes is an error.
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", meet, limit, world_size=2, rank=rank)
    stock, _ = train(Model(False))
    ours, _ = train(Model(True), (5, 7))
    caught = []
    for is_ours in (False, True):
        trainer = make_trainer(Model(is_ours, 6 if rank else -1, "nan"))
        trainer.register_hooks([DeferHook((5,))] if is_ours else [])
        try:
            # Process 0 stops in the last iteration, so that no other waits for it.
            trainer.train(0, 7)
        except FloatingPointError as error:
            caught.append(str(error))
    # Process 1 has ended its training at iteration 5, and does not come to gather once more.
    trainer = make_trainer(Model(True, 7, "raise"))
    trainer.register_hooks([DeferHook((5,))])
    if rank == 0:
        with pytest.raises(ValueError, match="broken image"):
            trainer.train(0, 10)
    else:
        trainer.train(0, 5)
    alone = figures(trainer.storage)
    result = (figures(ours.storage), figures(stock.storage), caught, alone)
    torch.save(result, Path(folder) / f"rank{rank}")
    comm.synchronize()


def test_two_processes(tmp_path):
    # A fork has imported all already; CUDA does not survive one.
    method = "spawn" if torch.cuda.is_available() else "fork"
    multiprocessing.start_processes(
        train_in_two_processes, (str(tmp_path),), nprocs=2, start_method=method
    )
    results = [torch.load(tmp_path / f"rank{rank}", weights_only=False) for rank in range(2)]
    for ours, stock, _, _ in results:
        assert ours == stock
    assert len(results[0][0]["total_loss"]) == 23
    assert "total_loss" not in results[1][0]
    one_process = figures(train(Model(False))[0].storage)
    assert results[0][0]["total_loss"] != one_process["total_loss"]
    assert results[1][2] == []
    assert results[0][2][0] == results[0][2][1]
    assert "iteration=6!" in results[0][2][0]
    _, _, _, alone = results[0]
    assert alone["total_loss"][:5] == results[0][0]["total_loss"][:5]
    # Behind the last gather process 0 has its own losses alone.
    assert [at for _, at in alone["total_loss"]] == list(range(7))

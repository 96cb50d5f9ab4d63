"""What stops Detectron2's trainer stops one with deferred losses, in one process or two."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from detectron2.engine import HookBase
from detectron2.engine.hooks import CallbackHook
from detectron2.utils import comm
from torch import multiprocessing

from d2_static_sampler.modeling.deferred import deferred_metrics
from tests.engine.deferred_trainings import (
    DeferHook,
    Model,
    figures,
    make_trainer,
    train,
)
from tests.processes import forked_groups


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
            # At the flush, not behind; the first iteration has one of its own.
            assert trainer.iter == (min(fails_at // 5 * 5 + 4, 22) if fails_at else 0)
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


class FailingCheck(HookBase):
    """Puts a check in every iteration; that of the third fails in one process."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def before_step(self) -> None:
        is_right = not (self.fails and self.trainer.iter == 2)
        metrics = deferred_metrics(self.trainer.storage)
        metrics.check(torch.tensor(is_right), AssertionError, "bad box")


def train_in_two_processes(rank: int, folder: str) -> None:
    """Both ways; then a NaN loss in process 1, an error in 0, a failed check in 1, each alone."""
    meet = f"file://{folder}/meet"
    # Who waits in vain fails, so much later than any process comes on a busy machine.
    limit = timedelta(minutes=10)
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
    trainer = make_trainer(Model(True))
    trainer.register_hooks([DeferHook((5,)), FailingCheck(rank == 1)])
    with pytest.raises(AssertionError, match=r"bad box \(iteration 2\)"):
        trainer.train(0, 10)
    assert trainer.iter == 4
    result = (figures(ours.storage), figures(stock.storage), caught, alone)
    torch.save(result, Path(folder) / f"rank{rank}")
    comm.synchronize()


def test_two_processes(tmp_path):
    with forked_groups():
        multiprocessing.spawn(train_in_two_processes, (str(tmp_path),), nprocs=2)
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

"""Two real processes that train together: one without objects, one slow, one that fails."""

from __future__ import annotations

import datetime
import math
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from detectron2.engine import SimpleTrainer, defaults
from detectron2.utils import comm
from torch.multiprocessing import ProcessRaisedException

from d2_static_sampler import SamplerHook, install_sampler
from d2_static_sampler.engine import launch, read_steps, summarize_steps
from tests.helpers import make_batch, small_config, small_model
from tests.processes import forked_groups

IMPLS = ("naive", "static", "compiled")
ITERATIONS = 7
SLOW = {2: 1, 3: 0}  # the rank that is slow, by iteration
DELAY_MS = 1000
# Who waits in vain fails, so much later than any process comes on a busy machine.
TIMEOUT = datetime.timedelta(minutes=10)


class Trainer(SimpleTrainer):
    """Fails on ``failing_rank`` at the end of iteration 3, where the others exchange their rows."""

    failing_rank: int | None = None
    mark: Path

    def run_step(self):
        super().run_step()
        if self.iter == 3 and comm.get_rank() == self.failing_rank:
            self.mark.touch()
            raise ZeroDivisionError("a fault of one process")


def batches(folder: Path | None = None):
    """Objects in the images of process 0 alone; with a ``folder`` each process is slow once.

    It waits until the other is in the backward, however long that takes, and then for the delay.
    """
    rank = comm.get_rank()
    for i in range(ITERATIONS):
        if folder and SLOW.get(i) == rank:
            while not (folder / f"backward{i}").exists():
                time.sleep(0.01)
            time.sleep(DELAY_MS / 1000)
        yield make_batch((0,) if rank else (2,), size=64)


def make_trainer(folder: Path, impl: str, loader) -> Trainer:
    torch.set_num_threads(1)
    cfg = small_config(
        *("OUTPUT_DIR", str(folder), "SOLVER.CHECKPOINT_PERIOD", 5),
        *("MODEL.SAMPLER.LOG_PERIOD", 2, "MODEL.SAMPLER.WARMUP_ITERS", 1),
    )
    model = defaults.create_ddp_model(
        install_sampler(small_model(), impl, seed=1), broadcast_buffers=False
    )
    trainer = Trainer(model, loader, torch.optim.SGD(model.parameters(), lr=1e-3))
    trainer.register_hooks([SamplerHook(cfg)])
    return trainer


def train_each(folder: str) -> None:
    for impl in IMPLS:
        path = Path(folder, impl)
        path.mkdir(exist_ok=True)
        trainer = make_trainer(path, impl, batches(path if impl == "static" else None))
        mark_backwards(trainer, path)
        trainer.train(0, ITERATIONS)
        torch.save(dict(trainer.model.module.named_parameters()), path / f"rank{comm.get_rank()}")
        if comm.is_main_process():
            histories = trainer.storage.histories()
            slowest = {k: x.values() for k, x in histories.items() if "slowest" in k}
            torch.save(slowest, path / "storage")


def mark_backwards(trainer: Trainer, folder: Path) -> None:
    """The first gradient of an iteration that another process is slow in leaves a file."""

    def mark(gradient):
        if SLOW.get(trainer.iter, comm.get_rank()) != comm.get_rank():
            (folder / f"backward{trainer.iter}").touch()

    trainer.model.module.proposal_generator.rpn_head.anchor_deltas.bias.register_hook(mark)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    with forked_groups():
        launch(train_each, 2, dist_url="auto", args=(str(folder),), timeout=TIMEOUT)
    return folder


@pytest.mark.parametrize("impl", IMPLS)
def test_a_process_without_objects_trains_along(trained, impl):
    first, second = (torch.load(trained / impl / f"rank{rank}") for rank in range(2))
    begin = dict(small_model().named_parameters())
    moved = [name for name in begin if not torch.equal(first[name], begin[name])]
    assert any(name.startswith("roi_heads.box_predictor") for name in moved)
    for name, parameter in first.items():
        assert torch.equal(parameter, second[name])
        assert parameter.isfinite().all()


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_tell_who_was_slowest(trained, impl):
    rows = read_steps(trained / impl / "step_times.jsonl")
    assert [row["iteration"] for row in rows] == list(range(ITERATIONS))
    for row in rows:
        times = [key for key in row if key.endswith("_ms")]
        assert list(row["slowest"]) == ["rank", "warmup", *times]
        if row["slowest"]["rank"] == 0:
            assert all(row["slowest"][key] == row[key] for key in ("warmup", *times))
        until_backward = [each["data_ms"] + each["forward_ms"] for each in (row["slowest"], row)]
        assert until_backward[0] >= until_backward[1]


def test_a_slow_process_shows(trained):
    rows = read_steps(trained / "static" / "step_times.jsonl")
    for iteration, rank in SLOW.items():
        assert rows[iteration]["slowest"]["rank"] == rank
        assert rows[iteration]["slowest"]["data_ms"] >= DELAY_MS
    # What process 0 says of itself stays its own: it waits for the other one in backward.
    assert rows[2]["data_ms"] < rows[2]["slowest"]["data_ms"]
    assert rows[2]["backward_ms"] >= DELAY_MS
    assert rows[2]["slowest"]["backward_ms"] < rows[2]["backward_ms"]


def test_the_slowest_is_in_storage_and_summary(trained):
    rows = read_steps(trained / "static" / "step_times.jsonl")
    stored = torch.load(trained / "static" / "storage")
    for key in ("rank", "data_ms", "rpn_sample_ms"):
        values = [(row["slowest"][key], row["iteration"]) for row in rows]
        assert stored[f"step_times/slowest_{key}"] == values
    table = summarize_steps(rows)
    assert f"static, slowest: median of {ITERATIONS - 1}" in table
    assert f"Slowest of {ITERATIONS - 1} iterations: " in table
    for row in rows:
        del row["slowest"]
    assert "lowest" not in summarize_steps(rows)


def fail_in(folder: str, rank: int) -> None:
    trainer = make_trainer(Path(folder), "static", batches())
    trainer.failing_rank, trainer.mark = rank, Path(folder, "failed")
    try:
        trainer.train(0, ITERATIONS)
    except ZeroDivisionError:
        if rank == 0:
            raise
        # Gone without an error code: whatever ends process 0 then comes from the run itself.
        dist.destroy_process_group()


@pytest.mark.parametrize(("rank", "alone"), [(0, [2]), (1, [2, 3])])
def test_after_an_error_nobody_waits(tmp_path, rank, alone):
    with pytest.raises(ProcessRaisedException), forked_groups():
        launch(fail_in, 2, dist_url="auto", args=(str(tmp_path), rank), timeout=TIMEOUT)
    assert time.time() - (tmp_path / "failed").stat().st_mtime < TIMEOUT.total_seconds()
    rows = read_steps(tmp_path / "step_times.jsonl")
    assert [row["iteration"] for row in rows if "slowest" in row] == [0, 1]
    assert [row["iteration"] for row in rows if "slowest" not in row] == alone
    assert all(math.isfinite(row["total_ms"]) for row in rows)

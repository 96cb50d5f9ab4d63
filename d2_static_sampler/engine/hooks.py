"""The one hook that a training script registers: step times, deferred losses, samplers' state."""

from __future__ import annotations

import logging
import os
from collections import deque
from typing import Any

from detectron2.config import CfgNode
from detectron2.engine import HookBase
from detectron2.utils import comm

from ..config import check_sampler_config, integer_choices, is_integer, shown
from ..modeling import HeadSampler, has_static_step, installed_samplers, static_graphs
from ..modeling.deferred import PERIOD, deferred_metrics
from .deferred_losses import DeferredLosses
from .row_exchange import RowExchange
from .step_log import Row, StepLog, read_steps, summarize_steps
from .step_timer import StepTimer, StepTimes

logger = logging.getLogger(f"detectron2.{__name__}")
STEP_LOG = "step_times.jsonl"
MOST_ROWS = 20  # that a process keeps for itself, however long LOG_PERIOD is


class SamplerHook(HookBase):
    """Logs the time of every iteration, and keeps the samplers' call counts in checkpoints.

    Register it anywhere among the hooks that ``build_hooks`` returns: a hook that is registered
    after ``resume_or_load`` is not restored. With ``MODEL.SAMPLER.TIMING`` off it measures
    nothing and only keeps the state.

    A row of ``OUTPUT_DIR/step_times.jsonl`` has iteration, impl, images, device, warmup and, in
    milliseconds, data, forward, backward, optimizer and other, which add up to total, and
    rpn_label, rpn_sample, roi_label and roi_sample, which lie inside forward. The same figures
    are in the event storage as ``step_times/<name>_ms``. Process 0 writes, of itself; where there
    are others, "slowest" holds the times of the one that the rest waited for. The processes meet
    for it every LOG_PERIOD iterations, before a checkpoint of SOLVER.CHECKPOINT_PERIOD and in the
    last iteration, never after an error: the rows since then are written without it.

    With MODEL.SAMPLER.STATIC_STEP losses and logged figures reach the host, and are checked, in the
    first iteration, every LOG_PERIOD iterations and no later than in each 20th, before checkpoints
    and evaluations, and in the last iteration; see
    :class:`~d2_static_sampler.engine.DeferredLosses`.

    Args:
        cfg: the complete config.
        writer_period: that of the trainer's ``PeriodicWriter``.

    Raises:
        TypeError: ``cfg`` is no config.
        ValueError: a wrong value in its ``MODEL.SAMPLER``, or a wrong ``writer_period``.
    """

    def __init__(self, cfg: CfgNode, *, writer_period: int = PERIOD) -> None:
        check_sampler_config(cfg)
        if not is_integer(writer_period, 1):
            raise ValueError(f"writer_period is {shown(writer_period)}; {integer_choices(1)}")
        self._options = cfg.MODEL.SAMPLER
        self._path = os.path.join(cfg.OUTPUT_DIR, STEP_LOG)
        self._periods = (self._options.LOG_PERIOD, cfg.SOLVER.CHECKPOINT_PERIOD, MOST_ROWS)
        self._flush_periods = (
            *(writer_period, min(self._options.LOG_PERIOD, PERIOD)),
            *(cfg.SOLVER.CHECKPOINT_PERIOD, cfg.TEST.EVAL_PERIOD),
        )
        self._losses: DeferredLosses | None = None
        self._timer: StepTimer | None = None
        self._log: StepLog | None = None
        self._exchange: RowExchange | None = None
        # Rows whose times the device has still to tell, and those that are complete.
        self._waiting: deque[tuple[Row, StepTimes]] = deque()
        self._rows: list[Row] = []

    def before_train(self) -> None:
        """Defer losses where the step is static; open the log and wrap ``run_step``."""
        for head in self._heads():
            # A checkpoint without their count, as one of IMPL naive is: a call an iteration.
            head.calls = head.calls or self.trainer.start_iter
        if has_static_step(self.trainer.model):
            self._start_deferring()
        if not self._options.TIMING:
            return
        if "run_step" in vars(self.trainer):
            logger.warning("run_step is wrapped already, by another SamplerHook say: not timed")
            return
        if comm.is_main_process():
            self._log = StepLog(self._path, self.trainer.start_iter)
        self._exchange = RowExchange() if comm.get_world_size() > 1 else None
        self._timer = StepTimer(self.trainer.model, self.trainer.optimizer)
        self._run_step = self.trainer.run_step
        # Around run_step itself, so that the order of the hooks does not matter.
        self.trainer.run_step = self._timed_run_step

    def after_train(self) -> None:
        """Write what is left, print the summary and unwrap ``run_step``; also after an error."""
        self._stop_deferring()
        if self._timer is None:
            return
        del self.trainer.run_step
        self._timer = None
        # No exchange: after an error the other processes may be gone, or never come.
        self._write_all()
        self._waiting.clear()
        self._rows.clear()
        if self._log is not None:
            self._log.close()
            self._log = None
            logger.info("Step times:\n" + summarize_steps(read_steps(self._path)))

    def state_dict(self) -> dict[str, Any]:
        """The calls of every head; and no checkpoint without the rows of its iterations.

        Raises:
            FloatingPointError, Exception: of an iteration until then whose losses were not finite,
                or a check failed; with many processes at the next common flush instead.
        """
        self._flush_losses()
        self._write_all()
        calls = [head.calls for head in self._heads()]
        return {"calls": calls} if calls else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting where a checkpoint stopped."""
        heads, calls = self._heads(), state["calls"]
        if heads and len(heads) != len(calls):
            logger.warning(
                f"The checkpoint counts calls of {len(calls)} samplers, not {len(heads)}"
            )
            return
        for head, count in zip(heads, calls, strict=False):
            head.calls = count

    def _heads(self) -> list[HeadSampler]:
        return list(installed_samplers(self.trainer.model).values())

    def _start_deferring(self) -> None:
        losses = DeferredLosses(self.trainer, *self._flush_periods)
        if losses.install():
            self._losses = losses
            # After an error hooks that write, and stand before this one, should have all there is.
            self.trainer.after_train = self._after_train

    def _after_train(self) -> None:
        self._stop_deferring()
        self.trainer.after_train()

    def _stop_deferring(self) -> None:
        if self._losses is not None:
            del self.trainer.after_train
            self._losses.remove()
            self._losses = None

    def _flush_losses(self) -> None:
        storage = getattr(self.trainer, "storage", None)
        if storage is None:
            return
        # Where there are others they are not here: process 0 alone saves checkpoints.
        if comm.get_world_size() == 1:
            deferred_metrics(storage).flush()

    def _timed_run_step(self) -> None:
        assert self._timer is not None
        graphs = self._num_graphs()
        with self._timer.step() as times:
            self._run_step()
        iteration = self.trainer.iter
        first = iteration - self.trainer.start_iter < self._options.WARMUP_ITERS
        row = {
            "iteration": iteration,
            "impl": self._impl(),
            "images": times.images,
            "device": str(next(self.trainer.model.parameters()).device),
            "warmup": first or self._num_graphs() > graphs,
        }
        self._waiting.append((row, times))
        if self._exchange is None:
            self._read_rows(wait=False)
            self._write_rows()
        elif self._is_exchange_due(iteration + 1):
            # Every process brings the same iterations, whatever its device still has to do.
            self._read_rows(wait=True)
            self._rows = self._exchange.gather(self._rows)
            self._write_rows()

    def _impl(self) -> str:
        heads, model = self._heads(), self.trainer.model
        impl = heads[0].impl if heads else "naive"
        if not has_static_step(model):
            return impl
        is_eager = any(graphs.is_eager for graphs in static_graphs(model))
        return f"{impl}+step (eager)" if is_eager else f"{impl}+step"

    def _num_graphs(self) -> int:
        graphs = [head.sampler for head in self._heads()] + static_graphs(self.trainer.model)
        return sum(getattr(each, "num_graphs", 0) for each in graphs)

    def _is_exchange_due(self, done: int) -> bool:
        """Whether the processes meet after ``done`` iterations; the same answer in each."""
        periods = (period for period in self._periods if period > 0)
        return done == self.trainer.max_iter or any(done % period == 0 for period in periods)

    def _write_all(self) -> None:
        if self._log is not None:
            self._read_rows(wait=True)
            self._write_rows()

    def _read_rows(self, *, wait: bool) -> None:
        """Complete the rows whose moments are past; with ``wait``, all."""
        while self._waiting:
            row, times = self._waiting[0]
            if not times.clock.is_past(times.end, wait=wait):
                return
            self._waiting.popleft()
            self._rows.append(row | times.milliseconds())

    def _write_rows(self) -> None:
        """Write the complete rows to the log, the event storage and now and then the console."""
        while self._rows and self._log is not None:
            row = self._rows.pop(0)
            self._log.append(row)
            self._publish(row)
            if (row["iteration"] + 1) % self._options.LOG_PERIOD == 0:
                logger.info(f"ms at iter {row['iteration']} ({row['impl']}):  {_line(row)}")

    def _publish(self, row: Row) -> None:
        """Put the row's times into the event storage, at the row's own iteration."""
        storage = self.trainer.storage
        now, storage.iter = storage.iter, row["iteration"]
        storage.put_scalars(**{f"step_times/{key}": value for key, value in _times(row).items()})
        if "slowest" in row:
            slowest = {"rank": row["slowest"]["rank"], **_times(row["slowest"])}
            storage.put_scalars(**{f"step_times/slowest_{key}": x for key, x in slowest.items()})
        storage.iter = now


def _times(row: Row) -> Row:
    return {key: value for key, value in row.items() if key.endswith("_ms")}


def _line(row: Row) -> str:
    figures = "  ".join(f"{key[:-3]}: {value:.1f}" for key, value in _times(row).items())
    if slowest := row.get("slowest"):
        figures += f"  slowest: rank {slowest['rank']}, {_line(slowest)}"
    return figures

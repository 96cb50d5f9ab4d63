"""The one hook that a training script registers: step times, and the samplers' state."""

from __future__ import annotations

import logging
import os
from collections import deque
from typing import Any

from detectron2.config import CfgNode
from detectron2.engine import HookBase
from detectron2.utils import comm

from ..modeling import HeadSampler, installed_samplers
from .step_log import StepLog, read_steps, summarize_steps
from .step_timer import StepTimer, StepTimes

logger = logging.getLogger(f"detectron2.{__name__}")
STEP_LOG = "step_times.jsonl"


class SamplerHook(HookBase):
    """Logs the time of every iteration, and keeps the samplers' call counts in checkpoints.

    Register it anywhere among the hooks that ``build_hooks`` returns: a hook that is registered
    after ``resume_or_load`` is not restored. With ``MODEL.SAMPLER.TIMING`` off it measures
    nothing and only keeps the state.

    A row of ``OUTPUT_DIR/step_times.jsonl`` has iteration, impl, images, device, warmup and, in
    milliseconds, data, forward, backward, optimizer and other, which add up to total, and
    rpn_label, rpn_sample, roi_label and roi_sample, which lie inside forward. The same figures
    are in the event storage as ``step_times/<name>_ms``. Process 0 writes for itself.
    """

    def __init__(self, cfg: CfgNode) -> None:
        self._options = cfg.MODEL.SAMPLER
        self._path = os.path.join(cfg.OUTPUT_DIR, STEP_LOG)
        self._log: StepLog | None = None
        self._waiting: deque[tuple[dict[str, Any], StepTimes]] = deque()

    def before_train(self) -> None:
        """Open the log and wrap the trainer's ``run_step``."""
        if not (self._options.TIMING and comm.is_main_process()):
            return
        if "run_step" in vars(self.trainer):
            logger.warning("run_step is wrapped already, by another SamplerHook say: not timed")
            return
        self._log = StepLog(self._path, self.trainer.start_iter)
        self._timer = StepTimer(self.trainer.model, self.trainer.optimizer)
        self._run_step = self.trainer.run_step
        # Around run_step itself, so that the order of the hooks does not matter.
        self.trainer.run_step = self._timed_run_step

    def after_train(self) -> None:
        """Write what is left, print the summary and unwrap ``run_step``; also after an error."""
        if self._log is None:
            return
        del self.trainer.run_step
        self._write_rows(wait=True)
        self._log.close()
        self._log = None
        logger.info("Step times:\n" + summarize_steps(read_steps(self._path)))

    def state_dict(self) -> dict[str, Any]:
        """The calls of every head; and no checkpoint without the rows of its iterations."""
        self._write_rows(wait=True)
        calls = [head.calls for head in self._heads()]
        return {"calls": calls} if calls else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting where a checkpoint stopped."""
        heads, calls = self._heads(), state["calls"]
        if len(heads) != len(calls):
            logger.warning(
                f"The checkpoint counts calls of {len(calls)} samplers, not {len(heads)}"
            )
            return
        for head, count in zip(heads, calls, strict=True):
            head.calls = count

    def _heads(self) -> list[HeadSampler]:
        return list(installed_samplers(self.trainer.model).values())

    def _timed_run_step(self) -> None:
        graphs = self._num_graphs()
        with self._timer.step() as times:
            self._run_step()
        iteration = self.trainer.iter
        heads = self._heads()
        first = iteration - self.trainer.start_iter < self._options.WARMUP_ITERS
        row = {
            "iteration": iteration,
            "impl": heads[0].impl if heads else "naive",
            "images": times.images,
            "device": str(next(self.trainer.model.parameters()).device),
            "warmup": first or self._num_graphs() > graphs,
        }
        self._waiting.append((row, times))
        self._write_rows(wait=False)

    def _num_graphs(self) -> int:
        return sum(getattr(head.sampler, "num_graphs", 0) for head in self._heads())

    def _write_rows(self, *, wait: bool) -> None:
        """Write the rows whose moments are past; with ``wait``, all."""
        while self._waiting and self._log is not None:
            row, times = self._waiting[0]
            if not times.clock.is_past(times.end, wait=wait):
                return
            self._waiting.popleft()
            row |= times.milliseconds()
            self._log.append(row)
            self._publish(row)

    def _publish(self, row: dict[str, Any]) -> None:
        """Put the row's times into the event storage, and now and then on the console."""
        storage = self.trainer.storage
        now, storage.iter = storage.iter, row["iteration"]
        times = {key: value for key, value in row.items() if key.endswith("_ms")}
        storage.put_scalars(**{f"step_times/{key}": value for key, value in times.items()})
        storage.iter = now
        if (row["iteration"] + 1) % self._options.LOG_PERIOD == 0:
            figures = "  ".join(f"{key[:-3]}: {value:.1f}" for key, value in times.items())
            logger.info(f"ms at iter {row['iteration']} ({row['impl']}):  {figures}")

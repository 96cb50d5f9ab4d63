"""The losses of Detectron2's trainers, written every few iterations instead of every one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from detectron2.engine import SimpleTrainer, TrainerBase
from detectron2.utils import comm
from detectron2.utils.events import EventStorage, get_event_storage
from torch import Tensor

from ..modeling.deferred import PERIOD, Deferred, DeferredMetrics, deferred_metrics

logger = logging.getLogger(f"detectron2.{__name__}")


class DeferredLosses:
    """Keeps a trainer's losses on the device, and writes them together with the deferred metrics.

    What ends up in the event storage is what Detectron2 writes: the same names, values and
    iterations, averaged over the processes. It gets there in the ``_write_metrics`` of every
    iteration i where i + 1 is a multiple of one of the periods, of the first, so that every name is
    there from then on, and of the last: so before the hooks' ``after_step``, with one copy to the
    host and one exchange between the processes.
    A loss that is not finite, or a check that failed, stops the training there.

    ::

        losses = DeferredLosses(trainer, 20, cfg.SOLVER.CHECKPOINT_PERIOD)
        losses.install()
        ...
        losses.remove()

    Args:
        trainer: that whose ``train`` runs: a ``SimpleTrainer``, an ``AMPTrainer``, or one that
            has such a one in ``_trainer``, as ``DefaultTrainer``. A weak reference will do.
        periods: equal in all processes; those of 0 and less do not count.

    Raises:
        ValueError: no period above 0.
    """

    def __init__(self, trainer: TrainerBase, *periods: int) -> None:
        self._periods = [period for period in periods or (PERIOD,) if period > 0]
        if not self._periods:
            raise ValueError(f"periods must hold one above 0, not {periods}")
        self._outer = trainer
        self._trainer = getattr(trainer, "_trainer", trainer)
        self._metrics: DeferredMetrics | None = None
        self._metrics_period: int | None = None
        self._is_async = False
        self._num_written = 0
        self._first: int | None = None  # iteration whose losses were written

    def install(self) -> bool:
        """Replace ``_write_metrics`` of the trainer.

        Returns:
            False, with a warning, where it is not Detectron2's own any more.
        """
        trainer = self._trainer
        own = getattr(trainer.__class__, "_write_metrics", None)
        if own is not SimpleTrainer._write_metrics or "_write_metrics" in vars(trainer):
            logger.warning("_write_metrics is not Detectron2's own: losses are written by it")
            return False
        # Nothing waits any more: no need for the thread, which swallows exceptions.
        self._is_async = getattr(trainer, "async_write_metrics", False)
        if self._is_async:
            trainer.async_write_metrics = False
        trainer._write_metrics = self._write_metrics
        # What the very first iteration puts is to be written even if it fails.
        storage = getattr(self._outer, "storage", None)
        if storage is not None:
            self._take_charge_of(deferred_metrics(storage))
        return True

    def remove(self) -> None:
        """Write what is left, in this process alone, and give ``_write_metrics`` back.

        For the end of a training, also after an error: see :meth:`flush_alone`.
        """
        if vars(self._trainer).get("_write_metrics") != self._write_metrics:
            return
        del self._trainer._write_metrics
        if self._is_async:
            self._trainer.async_write_metrics = True
        self.flush_alone()
        self._take_charge_of(None)

    def flush(self) -> None:
        """Write all that is pending; every process calls it at the same place.

        Raises:
            FloatingPointError: in process 0, the first sum of losses that was not finite.
            Exception: that of a check that failed before; in process 0 in any process.
        """
        if self._metrics is None:
            return
        self._metrics.read()
        own = [item for item in self._metrics.pending if isinstance(item, _Losses)]
        # Always, since another process may have more to tell; before anything can be raised.
        rows = {item.number: item.row() for item in own}
        ranks = comm.gather((rows, self._metrics.failure()))
        for item in own:
            item.ranks = [rank[item.number] for rank, _ in ranks if item.number in rank]
        self._metrics.flush()
        # A check may fail in another process alone, and this one is about to write a checkpoint.
        for _, failure in ranks:
            if failure is not None:
                raise failure

    def flush_alone(self) -> None:
        """Write what this process has: after an error others may be gone, or never come.

        Process 0 writes its own losses instead of averages. A loss that is not finite and a check
        that failed are logged, not raised: another exception may be under way.
        """
        try:
            if self._metrics is not None:
                self._metrics.flush()
        except Exception as error:
            logger.error(f"Found after the end of the training: {type(error).__name__}: {error}")

    def _write_metrics(
        self,
        loss_dict: Mapping[str, Tensor],
        data_time: float,
        prefix: str = "",
        iter: int | None = None,
    ) -> None:
        """What the trainer calls; ``iter`` would come from a thread, is the storage's without."""
        storage = get_event_storage()
        metrics = deferred_metrics(storage)
        self._take_charge_of(metrics)
        done = storage.iter + 1
        # Release 0.6 has no such period, and no data time of each process.
        gather_period = getattr(self._trainer, "gather_metric_period", None)
        if done % (gather_period or 1) == 0:
            number, self._num_written = self._num_written, self._num_written + 1
            metrics.add(_Losses(loss_dict, data_time, prefix, number, gather_period is not None))
            self._first = storage.iter if self._first is None else self._first
        if self._is_due(done) or storage.iter == self._first:
            self.flush()

    def _take_charge_of(self, metrics: DeferredMetrics | None) -> None:
        """Flush ``metrics`` from now on, which do not flush themselves meanwhile."""
        if metrics is self._metrics:
            return
        if self._metrics is not None:
            self._metrics.period = self._metrics_period
        if metrics is not None:
            self._metrics_period, metrics.period = metrics.period, None
        self._metrics = metrics

    def _is_due(self, done: int) -> bool:
        """Whether to flush after ``done`` iterations; the same answer in each process."""
        is_last = done == getattr(self._outer, "max_iter", None)
        return is_last or any(done % period == 0 for period in self._periods)


class _Losses(Deferred):
    """The losses of one iteration; ``ranks`` has those of all processes in process 0."""

    is_shared = True

    def __init__(
        self,
        losses: Mapping[str, Tensor],
        data_time: float,
        prefix: str,
        number: int,
        keeps_rank_time: bool,
    ) -> None:
        super().__init__(*losses.values())
        self.names, self.data_time, self.prefix = list(losses), data_time, prefix
        self.number, self.keeps_rank_time = number, keeps_rank_time
        self.ranks: list[dict[str, Any]] | None = None

    def row(self) -> dict[str, Any]:
        return {**dict(zip(self.names, self.values, strict=True)), "data_time": self.data_time}

    def write(self, storage: EventStorage) -> None:
        if self.keeps_rank_time:
            storage.put_scalar("rank_data_time", self.data_time)
        if not comm.is_main_process():
            return
        ranks = self.ranks or [self.row()]
        # The processes wait for the slowest of them.
        storage.put_scalar("data_time", max(rank["data_time"] for rank in ranks))
        losses = {name: np.mean([rank[name] for rank in ranks]) for name in self.names}
        total = sum(losses.values())
        if not np.isfinite(total):
            raise FloatingPointError(
                f"Loss became infinite or NaN at iteration={self.iteration}!\nloss_dict = {losses}"
            )
        storage.put_scalar(f"{self.prefix}total_loss", total)
        if len(losses) > 1:
            storage.put_scalars(**losses)

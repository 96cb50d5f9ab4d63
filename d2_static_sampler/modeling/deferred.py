"""Figures and checks of a training step that reach the host in one copy, every few iterations.

``EventStorage.put_scalar(name, tensor)`` and ``assert tensor`` make the host wait for the device.
Here both stay on the device until :meth:`DeferredMetrics.flush`, which copies all of them at once
and then does what Detectron2 would have done at each one's own iteration, in the same order.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from detectron2.utils import comm
from detectron2.utils.events import EventStorage, get_event_storage
from torch import Tensor

PERIOD = 20  # that of Detectron2's writers
# Bounds the memory where a storage's iteration number stands still.
MOST_PENDING = 5000
_OF_STORAGE: weakref.WeakKeyDictionary[EventStorage, DeferredMetrics] = weakref.WeakKeyDictionary()


def deferred_metrics(storage: EventStorage | None = None) -> DeferredMetrics:
    """The deferred metrics of a storage, always the same; of the current one by default.

    Raises:
        AssertionError: Detectron2's, where there is no current storage.
    """
    storage = get_event_storage() if storage is None else storage
    if storage not in _OF_STORAGE:
        _OF_STORAGE[storage] = DeferredMetrics(storage)
    return _OF_STORAGE[storage]


def flush_metrics(storage: EventStorage | None = None) -> None:
    """Write all figures of a static step that are still on the device, and make its checks.

    For a training loop of one's own: behind its last iteration, and wherever the newest figures
    are wanted. What is written stands in the storage as Detectron2 would have put it, each figure
    at its own iteration. Talks to no other process: where several train, the losses of
    Detectron2's trainers, which are averaged over them, wait for the next time that all meet.

    Args:
        storage: that of the training; by default the current one.

    Raises:
        TypeError: ``storage`` is no EventStorage.
        ValueError: there is no current storage, and none was given.
        Exception: what Detectron2 would have raised, of the first check that failed. What was put
            before it is written.
    """
    if storage is None and (storage := _current()) is None:
        raise ValueError(
            "there is no current EventStorage: call it inside `with EventStorage()`, or with "
            "the storage of the training, flush_metrics(storage)"
        )
    if not isinstance(storage, EventStorage):
        raise TypeError(f"expected an EventStorage, not {type(storage).__name__}")
    deferred_metrics(storage).flush_own()


def flush_current() -> None:
    """:func:`flush_metrics` of the current storage; where there is none, of all that there are."""
    storage = _current()
    for each in list(_OF_STORAGE.values()) if storage is None else [deferred_metrics(storage)]:
        each.flush_own()


def _current() -> EventStorage | None:
    try:
        return get_event_storage()
    except AssertionError:  # how Detectron2 says that there is none
        return None


class Deferred:
    """Something to be written to a storage once its values are on the host.

    Attributes:
        values: each a () tensor on its device until it is read, then a number.
        iteration: of the storage, when this was added to its metrics.
        scope: the storage's ``name_scope`` at that moment, as a prefix.
        is_shared: whether values of all processes belong into what is written.
    """

    iteration = 0
    scope = ""
    is_shared = False

    def __init__(self, *values: Tensor | float) -> None:
        self.values: list[Tensor | float] = [_keep(value) for value in values]

    def write(self, storage: EventStorage) -> None:
        """Do it; ``storage`` stands at ``iteration`` and ``scope`` meanwhile.

        Raises:
            Exception: what Detectron2 would have raised at that iteration.
        """
        raise NotImplementedError


class DeferredMetrics:
    """The figures and checks that wait for one copy to the host; see :func:`deferred_metrics`.

    Attributes:
        period: what is pending is flushed as soon as something is put in an iteration i with
            (i + 1) % period == 0 or behind one, so before Detectron2's writers of that period
            run. None: never, somebody else calls :meth:`flush`.
        pending: what was put since the last flush, in order.
    """

    def __init__(self, storage: EventStorage) -> None:
        self.period: int | None = PERIOD
        self.pending: deque[Deferred] = deque()
        # Weak: this is a value of _OF_STORAGE, whose key must be able to go.
        self._storage = weakref.ref(storage)

    def put(
        self,
        name: str,
        value: Tensor | float,
        divisor: Tensor | float = 1,
        *,
        smoothing_hint: bool = True,
    ) -> None:
        """Write ``value / divisor`` later, as ``put_scalar`` would now; nothing if divisor is 0.

        Args:
            name: within the current ``name_scope``.
            value: a number or a tensor of one element, of any real type; copied on its device.
            divisor: likewise.
            smoothing_hint: as in ``put_scalar``.

        Raises:
            RuntimeError: a tensor of more elements.
            Exception: that of a check that failed, where a flush is due.
        """
        self.add(_Scalar(name, value, divisor, smoothing_hint))

    def check(self, ok: Tensor | bool, error: Callable[[str], Exception], message: str) -> None:
        """Raise ``error(message)`` later, with the iteration's number behind, if ``ok`` is False.

        Args:
            ok: a bool or a tensor of one element.
            error: an exception class, or what makes an exception of a text.
            message: Detectron2's text, say.

        Raises:
            RuntimeError, Exception: as :meth:`put`.
        """
        self.add(_Check(ok, error, message))

    def add(self, deferred: Deferred) -> None:
        """Append to ``pending``; first flush what is there if that is due."""
        storage = self._storage()
        if storage is None:
            raise ReferenceError("The EventStorage of these metrics is gone")
        deferred.iteration = storage.iter
        # put_scalar reads it too; there is no public way.
        deferred.scope = storage._current_prefix
        if self._is_due(storage.iter):
            self.flush()
        self.pending.append(deferred)

    def read(self) -> None:
        """Make numbers of all pending values, with one copy to the host a device."""
        pending: dict[torch.device, list[tuple[Tensor, list[Tensor | float], int]]] = {}
        for deferred in self.pending:
            for i, value in enumerate(deferred.values):
                if isinstance(value, Tensor):
                    pending.setdefault(value.device, []).append((value, deferred.values, i))
        for on_device in pending.values():
            numbers = torch.stack([value for value, _, _ in on_device]).tolist()
            for (_, values, i), number in zip(on_device, numbers, strict=True):
                values[i] = number

    def failure(self) -> Exception | None:
        """What the first check raises that failed, of those that :meth:`read` has read."""
        checks = (item for item in self.pending if isinstance(item, _Check))
        return next((check.failure() for check in checks if not check.values[0]), None)

    def flush(self) -> None:
        """Read and write all that is pending, each at its own iteration, in order.

        Raises:
            Exception: that of the first check that failed. What was put before it is written.
                What was put behind it is dropped: Detectron2 would not have come so far.
        """
        self.read()
        storage = self._storage()
        while self.pending and storage is not None:
            deferred = self.pending.popleft()
            try:
                with _as_of(deferred, storage):
                    deferred.write(storage)
            except Exception:
                self.pending.clear()
                raise

    def flush_own(self) -> None:
        """:meth:`flush`, but for what is shared by several processes, which stays pending.

        Raises:
            Exception: as :meth:`flush`.
        """
        shared = [item for item in self.pending if item.is_shared]
        if not shared or comm.get_world_size() == 1:
            self.flush()
            return
        self.pending = deque(item for item in self.pending if not item.is_shared)
        try:
            self.flush()
        finally:
            self.pending.extendleft(reversed(shared))

    def _is_due(self, iteration: int) -> bool:
        if self.period is None or not self.pending:
            return False
        oldest = self.pending[0].iteration
        passed = (iteration + 1) // self.period > (oldest + 1) // self.period
        return passed or len(self.pending) >= MOST_PENDING


class _Scalar(Deferred):
    def __init__(
        self, name: str, value: Tensor | float, divisor: Tensor | float, smoothing_hint: bool
    ) -> None:
        super().__init__(value, divisor)
        self.name, self.smoothing_hint = name, smoothing_hint

    def write(self, storage: EventStorage) -> None:
        value, divisor = self.values
        if divisor:
            storage.put_scalar(self.name, value / divisor, smoothing_hint=self.smoothing_hint)


class _Check(Deferred):
    def __init__(self, ok: Tensor | bool, error: Callable[[str], Exception], message: str) -> None:
        super().__init__(ok)
        self.error, self.message = error, message

    def failure(self) -> Exception:
        return self.error(f"{self.message} (iteration {self.iteration})")

    def write(self, storage: EventStorage) -> None:
        if not self.values[0]:
            raise self.failure()


def _keep(value: Tensor | float) -> Tensor | float:
    """A copy without graph: the caller may change the tensor, or hold it within a large one."""
    if not isinstance(value, Tensor):
        return float(value)
    # float64 holds every float32 and every count; Apple's GPUs have none.
    dtype = torch.float32 if value.device.type == "mps" else torch.float64
    return value.detach().reshape(()).to(dtype, copy=True)


@contextmanager
def _as_of(deferred: Deferred, storage: EventStorage) -> Iterator[None]:
    """The storage as it stood when ``deferred`` was put; release 0.6 has no ``cur_iter``."""
    now = storage.iter, storage._current_prefix
    storage.iter, storage._current_prefix = deferred.iteration, deferred.scope
    try:
        yield
    finally:
        storage.iter, storage._current_prefix = now

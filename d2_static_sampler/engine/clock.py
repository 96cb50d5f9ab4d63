"""Moments of a step, on the host's clock or on a CUDA stream."""

from __future__ import annotations

import time
from typing import Any

import torch


class HostClock:
    """Moments are host times; for devices that compute while the host waits."""

    def mark(self) -> Any:
        """The present moment."""
        return time.perf_counter()

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Milliseconds from ``start`` to ``end``."""
        return (end - start) * 1e3

    def is_past(self, moment: Any, *, wait: bool) -> bool:
        """Whether ``moment`` can be read; always, on the host."""
        return True


class CudaClock(HostClock):
    """Moments are events in the current stream, read when they have passed.

    Marking never waits for the device. A phase's time is the device's: what the host does
    while the device is busy takes none.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Any:
        """An event recorded now in the device's current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Milliseconds from ``start`` to ``end``, both past."""
        return start.elapsed_time(end)

    def is_past(self, moment: Any, *, wait: bool) -> bool:
        """Whether the device has reached ``moment``; with ``wait``, the host waits until then."""
        if wait:
            moment.synchronize()
        return moment.query()


def clock_for(device: torch.device) -> HostClock:
    """The clock that tells the time on ``device``."""
    return CudaClock(device) if device.type == "cuda" else HostClock()

"""How much memory a call takes at most, beyond what there was before it: counted, not sampled."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(function: Callable[[], Any], device: str = "cpu") -> int:
    """The most bytes that live at once of what ``function()`` allocates.

    On a CPU ``function`` runs twice: what NumPy and Python allocate and what torch allocates are
    added up. On CUDA it runs once, and what its allocator handed out is counted.
    """
    if torch.device(device).type == "cuda":
        return _of_cuda(function, torch.device(device))
    return _of_numpy(function) + _of_torch(function)


def _of_cuda(function: Callable[[], Any], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    function()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _of_numpy(function: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _of_torch(function: Callable[[], Any]) -> int:
    """In a thread of its own, where nothing is kept from earlier calls."""
    peak = 0

    def run() -> None:
        nonlocal peak
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            function()
        events = prof.profiler.kineto_results.events()
        changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
        live = 0
        for _, size in sorted(changes, key=lambda change: change[0]):
            live += size
            peak = max(peak, live)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return peak

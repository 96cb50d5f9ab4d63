"""How many slots of a batch are worth computing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

_looks = True  # whether a CPU looks at counts


def most(counts: Tensor, limit: int) -> int:
    """How many slots a batch needs.

    The one place of the static step, besides kernels, that may look at data: on a CPU, where nobody
    waits for a device, slots that no image fills are left out.

    Args:
        counts: (B,) int64, those of its images.
        limit: that of every image.

    Returns:
        On a CPU the largest count, at least 1 and at most ``limit``; elsewhere ``limit``.
    """
    if not _looks or type(counts) is not Tensor or counts.device.type != "cpu":
        return limit
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return limit
    return min(limit, max(1, int(counts.max())))


@contextlib.contextmanager
def every_slot() -> Iterator[None]:
    """In here a CPU computes every slot, as any other device does."""
    global _looks
    before, _looks = _looks, False
    try:
        yield
    finally:
        _looks = before

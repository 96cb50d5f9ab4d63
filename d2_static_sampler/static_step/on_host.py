"""What a CPU may do, where nobody waits for a device: NumPy, and looking into the data."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


def most(counts: Tensor, limit: int) -> int:
    """How many slots a batch needs.

    Args:
        counts: (B,) int64, those of its images.
        limit: that of every image.

    Returns:
        On a CPU the largest count, at least 1 and at most ``limit``; elsewhere ``limit``, since the
        host would wait.
    """
    if torch.compiler.is_compiling() or not is_numpy_for(counts):
        return limit
    return min(limit, max(1, int(counts.max())))


def is_numpy_for(*tensors: Tensor) -> bool:
    """Whether these can be handed to NumPy: a CPU's plain memory, with nobody counting.

    Who transforms, fakes or counts operations wants those of every other device. In a graph a
    CPU's part is one operation, whose body runs in NumPy.
    """
    return (
        all(t.device.type == "cpu" for t in tensors)
        and not torch.jit.is_tracing()
        and not torch._C._are_functorch_transforms_active()
        and (torch.compiler.is_compiling() or not is_in_torch_dispatch_mode())
    )

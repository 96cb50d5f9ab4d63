"""Whether a CPU's part may be done in NumPy."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


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

"""Copies from the host to a device that the host does not wait for."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(value: Tensor, device: torch.device) -> Tensor:
    """``value`` on ``device``; from the host to CUDA by way of pinned memory."""
    if device.type == "cuda" and value.device.type == "cpu":
        return value.pin_memory().to(device, non_blocking=True)
    return value.to(device)

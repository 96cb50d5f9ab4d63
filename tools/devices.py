"""Where a command computes, and whether there is room: in words for whoever asked."""

from __future__ import annotations

import os

import torch


def check_device(option: str, name: str) -> None:
    """ValueError where this torch has no device of that ``name``, cpu or cuda."""
    try:
        device = torch.device(name)
    except RuntimeError:  # "cpu:x", say
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{option} is {name!r}; cpu or cuda")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"{option} is {name!r}: this torch finds no CUDA device")
        if (device.index or 0) >= torch.cuda.device_count():
            count = torch.cuda.device_count()
            raise ValueError(f"{option} is {name!r}: this machine has {count} CUDA devices")


def check_memory(what: str, needed: int) -> None:
    """ValueError where ``needed`` bytes are more than this machine has."""
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > most:
        raise ValueError(
            f"{what}: out of memory: that takes {needed / 1e9:,.0f} GB or more, and this machine "
            f"has {most / 1e9:,.0f} GB"
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is that of an allocator; torch's on a CPU has no type of its own."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    words = "can't allocate memory", "not enough memory", "Storage size calculation overflowed"
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)

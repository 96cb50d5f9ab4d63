"""What is read on the host, and written to a storage."""

from __future__ import annotations

import torch
from detectron2.utils.events import EventStorage
from torch.overrides import TorchFunctionMode

from d2_static_sampler.modeling.deferred import DeferredMetrics

READS = {
    *("tolist", "item", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__"),
    *("__array__", "nonzero", "is_nonzero", "__contains__"),
}


class count_reads(TorchFunctionMode):
    """Counts what copies a tensor to the host; on a CPU torch's dispatcher never hears of it."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in READS:
            self.reads.append(name)
        return func(*args, **(kwargs or {}))


def written(storage: EventStorage) -> dict[str, list]:
    return {name: list(history.values()) for name, history in storage.histories().items()}


def put_some(metrics: DeferredMetrics, device: str = "cpu") -> None:
    metrics.put("loss", torch.rand((), device=device, requires_grad=True) * 2)
    metrics.put("accuracy", torch.ones((), dtype=torch.int64, device=device), 3)
    metrics.put("fraction", 1, torch.ones((), dtype=torch.int64, device=device))
    metrics.check(torch.ones((), dtype=torch.bool, device=device), ValueError, "never")

"""What the sampler's benchmarks sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Work:
    """What is sampled: K of N candidates a row, in B rows."""

    name: str
    batch: int
    candidates: int
    num_samples: int
    fraction: float
    background: int
    dtype: torch.dtype
    positives: int
    ignored: int

    def labels(self, device: str) -> Tensor:
        """(B, N) labels, in random order."""
        labels = torch.full((self.batch, self.candidates), self.background, dtype=self.dtype)
        for row in labels:
            order = torch.randperm(self.candidates)
            row[order[: self.positives]] = 1
            row[order[self.positives : self.positives + self.ignored]] = -1
        return labels.to(device)

    @property
    def request(self) -> dict[str, Any]:
        """What a sampler is asked for."""
        return {
            "num_samples": self.num_samples,
            "positive_fraction": self.fraction,
            "bg_label": self.background,
        }


def rpn(batch: int) -> Work:
    return Work("RPN", batch, 268_569, 256, 0.5, 0, torch.int8, 60, 3000)


def roi(batch: int) -> Work:
    return Work("ROI", batch, 2000, 512, 0.25, 80, torch.int64, 300, 0)


def study(batch: int, candidates: int) -> Work:
    """K = N / 10 of two classes of one size."""
    k = candidates // 10
    return Work("study", batch, candidates, k, 0.5, 0, torch.int64, candidates // 2, 0)


WORKS: dict[str, Callable[[], Iterator[Work]]] = {
    "rpn": lambda: (rpn(batch) for batch in (1, 2, 4, 8, 16)),
    "roi": lambda: (roi(batch) for batch in (1, 2, 8, 16)),
    "study": lambda: (
        study(batch, n)
        for n in (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
        for batch in (1, 32)
        if batch * n < 100_000_000  # what 8 GB of memory are enough for
    ),
    "forms": lambda: (
        Work("forms", batch, n, k, 0.5, 0, torch.int8, n // 4, n // 10)
        for batch in (1, 8)
        for k in (64, 512)
        for n in (k, 4 * k, 8 * k, 16 * k, 64 * k)
    ),
}

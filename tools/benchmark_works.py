"""What the sampler's benchmarks sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FEATURES = 16  # D, where inputs are sampled too


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
    balanced: bool = False

    def labels(self, device: str) -> Tensor:
        """(B, N) labels, in random order."""
        labels = torch.full((self.batch, self.candidates), self.background, dtype=self.dtype)
        for row in labels:
            order = torch.randperm(self.candidates)
            row[order[: self.positives]] = 1
            row[order[self.positives : self.positives + self.ignored]] = -1
        return labels.to(device)

    def inputs(self, device: str) -> Tensor:
        """(B, N, 16) float32: the first feature is the candidate's number."""
        inputs = torch.rand(self.batch, self.candidates, FEATURES, device=device)
        inputs[:, :, 0] = torch.arange(self.candidates, device=device)
        return inputs

    @property
    def request(self) -> dict[str, Any]:
        """What a label sampler is asked for."""
        return {
            "num_samples": self.num_samples,
            "positive_fraction": self.fraction,
            "bg_label": self.background,
        }

    @property
    def counts(self) -> tuple[int, int]:
        """How many positives and negatives each row gets."""
        negatives = self.candidates - self.positives - self.ignored
        num_pos = min(self.positives, int(self.num_samples * self.fraction))
        return num_pos, min(negatives, self.num_samples - num_pos)


def rpn(batch: int) -> Work:
    return Work("RPN", batch, 268_569, 256, 0.5, 0, torch.int8, 60, 3000)


def roi(batch: int) -> Work:
    return Work("ROI", batch, 2000, 512, 0.25, 80, torch.int64, 300, 0)


def half(name: str, batch: int, candidates: int, num_samples: int) -> Work:
    """Half of K from each of two classes of one size."""
    is_balanced = name == "balanced"
    return Work(
        name, batch, candidates, num_samples, 0.5, 0, torch.int64, candidates // 2, 0, is_balanced
    )


def _studies(name: str, most: int) -> Iterator[Work]:
    """K = N / 10, one row and 32."""
    for n in (1_000, 10_000, 100_000, 1_000_000, 10_000_000):
        for batch in (1, 32):
            if batch * n <= most:
                yield half(name, batch, n, n // 10)


# By name; what 24 GB of memory are enough for.
WORKS: dict[str, Callable[[], Iterator[Work]]] = {
    "rpn": lambda: (rpn(batch) for batch in (1, 2, 4, 8, 16, 32)),
    "roi": lambda: (roi(batch) for batch in (1, 2, 4, 8, 16, 32)),
    "study": lambda: _studies("study", 32_000_000),
    "balanced": lambda: _studies("balanced", 10_000_000),
    "forms": lambda: (
        Work("forms", batch, n, k, 0.5, 0, torch.int8, n // 4, n // 10)
        for batch in (1, 8)
        for k in (64, 512)
        for n in (k, 4 * k, 16 * k, 32 * k, 64 * k, 128 * k)
    ),
    "small": lambda: iter((rpn(1), rpn(4), roi(1), roi(4), half("balanced", 4, 10_000, 1_000))),
}

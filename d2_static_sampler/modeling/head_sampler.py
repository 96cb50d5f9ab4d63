"""What a head of a model calls: its sampler, and the count that its random words come from."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ..samplers import LabelSample, LabelSampler, seeded_words


class HeadSampler:
    """A sampler in its place in a model.

    Attributes:
        sampler: the sampler itself, which several heads may share.
        head: number of the head in its model.
        seed: at least 0 for samples that depend on (seed, rank, head, calls) alone; -1 leaves
            the random words to the sampler.
        calls: how often this head has sampled.
    """

    def __init__(self, sampler: LabelSampler, *, impl: str, head: int, seed: int = -1) -> None:
        self.sampler = sampler
        self._name = impl
        self.head = head
        self.seed = seed
        self.calls = 0

    @property
    def impl(self) -> str:
        """The sampler's name in logs; says so where a compiled one could not compile."""
        return f"{self._name} (eager)" if getattr(self.sampler, "is_eager", False) else self._name

    @torch.no_grad()
    def __call__(
        self, labels: Tensor, *, num_samples: int, positive_fraction: float, bg_label: int
    ) -> LabelSample:
        """Sample (N,) or (B, N) labels; see :class:`~d2_static_sampler.samplers.LabelSampler`."""
        words = None
        if self.seed >= 0:
            words = seeded_words(
                self._words_shape(labels, num_samples),
                device=labels.device,
                seed=self.seed,
                rank=dist.get_rank() if dist.is_available() and dist.is_initialized() else 0,
                head=self.head,
                call=self.calls,
            )
        self.calls += 1
        return self.sampler(
            labels,
            num_samples=num_samples,
            positive_fraction=positive_fraction,
            bg_label=bg_label,
            words=words,
        )

    def _words_shape(self, labels: Tensor, num_samples: int) -> tuple[int, ...]:
        if hasattr(self.sampler, "words_shape"):
            return tuple(self.sampler.words_shape(labels, num_samples))
        return (2, *labels.shape[:-1], num_samples)

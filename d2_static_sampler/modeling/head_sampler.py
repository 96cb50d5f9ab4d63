"""What a head of a model calls: its sampler, and the count that its random words come from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.sampling import SampleRequest
from ..samplers import CompiledSampler, Drawing, LabelSample, LabelSampler, seeded_words


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
            words = self._seeded_words(self._words_shape(labels, num_samples), labels.device)
        self.calls += 1
        return self.sampler(
            labels,
            num_samples=num_samples,
            positive_fraction=positive_fraction,
            bg_label=bg_label,
            words=words,
        )

    def drawing(self, labels: Tensor, request: SampleRequest) -> tuple[Drawing, Tensor]:
        """This call's sampling in two parts, for a graph of the caller's: function and words.

        Only for a sampler that :meth:`can_be_in_graph`.

        Args:
            labels: (B, N), or anything of that shape on their device.
            request: how many of each class to draw.
        """
        assert isinstance(self.sampler, CompiledSampler)
        shape = self.sampler.words_shape(labels, request.num_samples)
        if self.seed >= 0:
            words = self._seeded_words(shape, labels.device)
        else:
            words = self.sampler.draw_words(shape, device=labels.device)
        self.calls += 1
        return self.sampler.drawing(labels, request), words

    @property
    def can_be_in_graph(self) -> bool:
        """Whether the sampler is one that is compiled, of ours."""
        return isinstance(self.sampler, CompiledSampler)

    def _seeded_words(self, shape: Sequence[int], device: torch.device) -> Tensor:
        return seeded_words(
            shape,
            device=device,
            seed=self.seed,
            rank=dist.get_rank() if dist.is_available() and dist.is_initialized() else 0,
            head=self.head,
            call=self.calls,
        )

    def _words_shape(self, labels: Tensor, num_samples: int) -> tuple[int, ...]:
        if hasattr(self.sampler, "words_shape"):
            return tuple(self.sampler.words_shape(labels, num_samples))
        return (2, *labels.shape[:-1], num_samples)

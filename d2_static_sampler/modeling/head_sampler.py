"""What a head of a model calls: its sampler, and the count that its random words come from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..samplers import (
    CompiledSampler,
    LabelSample,
    LabelSampler,
    StaticSampler,
    Taker,
    seeded_words,
)
from ..samplers.request import SampleRequest
from ..samplers.selection import Form


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
        self._forms: dict[SampleRequest, Form] = {}

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

    def taker(
        self, shape: Sequence[int], request: SampleRequest, device: torch.device
    ) -> tuple[Taker, Tensor]:
        """This call's sampling in two parts, for a graph of the caller's: function and words.

        Only for a sampler that :meth:`can_be_in_graph`.

        Args:
            shape: (B, N), of the labels.
            request: how many of each class to draw.
            device: of the labels.
        """
        assert isinstance(self.sampler, StaticSampler)
        form = self.sampler.form(shape[1], request.num_samples)
        form = self._forms.setdefault(request, form)
        words_shape = form.words_shape(tuple(shape[:1]), shape[1], request.num_samples)
        if self.seed >= 0:
            words = self._seeded_words(words_shape, device)
        else:
            words = form.draw_words(words_shape, device=device, generator=None)
        self.calls += 1
        return Taker(self.sampler, form, request), words

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

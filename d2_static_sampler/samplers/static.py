"""The static sampler: the whole batch at once, every shape known before the data is."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import sample_by_rank
from ..ops.sampling import SampleRequest
from .registry import LABEL_SAMPLER_REGISTRY
from .request import check_request, check_words
from .sample import LabelSample
from .topk import draw_keys, sample_by_keys
from .words import draw_words

SELECTIONS = ("auto", "rank", "topk")


class StaticSampler:
    """Fixed shapes: no data-dependent operation, no copy to the host.

    With selection by rank the sample is a pure function of (labels, words): the same on any
    device and in any batch.

    Args:
        select: "rank", "topk" (random keys; its words are one for each candidate) or "auto", which
            is "rank": exact, the same for equal words on every device, many times as fast as top-k
            for an RPN's rows, and two graphs serve all sizes.
    """

    def __init__(self, select: str = "auto") -> None:
        if select not in SELECTIONS:
            raise ValueError(f"select is {select!r}; choose one of: {', '.join(SELECTIONS)}")
        self.select = select

    def __call__(
        self,
        labels: Tensor,
        *,
        num_samples: int,
        positive_fraction: float,
        bg_label: int,
        generator: torch.Generator | None = None,
        words: Tensor | None = None,
    ) -> LabelSample:
        """Sample each row; see :class:`~.registry.LabelSampler`."""
        request = check_request(labels, num_samples, positive_fraction, bg_label)
        return self.draw(labels, request, generator, words)

    def draw(
        self,
        labels: Tensor,
        request: SampleRequest,
        generator: torch.Generator | None = None,
        words: Tensor | None = None,
    ) -> LabelSample:
        """Sample each row of (N,) or (B, N) labels as ``request`` says."""
        shape = self.words_shape(labels, request.num_samples)
        if words is None:
            words = self.draw_words(shape, device=labels.device, generator=generator)
        else:
            check_words(words, shape, labels.device)
        if labels.dim() == 2:
            return self._sample(labels, words, request)
        words = words.unsqueeze(0 if self.select == "topk" else 1)
        return self._sample(labels[None], words, request).row(0)

    def words_shape(self, labels: Tensor, num_samples: int) -> tuple[int, ...]:
        """The shape of the words for (N,) or (B, N) labels."""
        if self.select == "topk":
            return tuple(labels.shape)
        return (2, *labels.shape[:-1], num_samples)

    def draw_words(
        self,
        shape: tuple[int, ...],
        *,
        device: torch.device,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draw words, or keys, of :meth:`words_shape`."""
        draw = draw_keys if self.select == "topk" else draw_words
        return draw(shape, device=device, generator=generator)

    def _sample(self, labels: Tensor, words: Tensor, request: SampleRequest) -> LabelSample:
        """Sample (B, N) labels."""
        sample = sample_by_keys if self.select == "topk" else sample_by_rank
        return LabelSample(*sample(labels, words, *request))


def subsample_labels(
    labels: Tensor, num_samples: int, positive_fraction: float, bg_label: int
) -> tuple[Tensor, Tensor]:
    """Sample one row, with the signature and the result of Detectron2's function of this name.

    Args:
        labels: (N,) integer or bool; -1 = ignore.
        num_samples: the most candidates to return.
        positive_fraction: the most positives, as a share of ``num_samples``.
        bg_label: the label of a negative.

    Returns:
        The indices of the positives and of the negatives, int64. Their lengths depend on the
        data, so that the host waits for the device here.
    """
    sample = StaticSampler()(
        labels, num_samples=num_samples, positive_fraction=positive_fraction, bg_label=bg_label
    )
    if torch.jit.is_tracing():  # the numbers of the example would stay in the trace
        return sample.index[sample.is_pos], sample.index[sample.is_neg]
    num_pos, num_neg = torch.stack([sample.num_pos, sample.num_neg]).tolist()
    return sample.index[:num_pos], sample.index[num_pos : num_pos + num_neg]


@LABEL_SAMPLER_REGISTRY.register()
def static(select: str = "auto") -> StaticSampler:
    """``IMPL: static``."""
    return StaticSampler(select)

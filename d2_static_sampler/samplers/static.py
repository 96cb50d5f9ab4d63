"""The static sampler: the whole batch at once, every shape known before the data is."""

from __future__ import annotations

import torch
from torch import Tensor

from .registry import LABEL_SAMPLER_REGISTRY
from .request import SampleRequest, check_request, check_words
from .sample import LabelSample, empty_sample
from .selection import Members, choose_members, pick_ranks
from .words import draw_words


class StaticSampler:
    """Rank selection: K random words a row and class, no data-dependent shape, no host copy.

    The sample is a pure function of (labels, words): the same on any device and in any batch.
    """

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
        if words is None:
            shape = (2, *labels.shape[:-1], num_samples)
            words = draw_words(shape, device=labels.device, generator=generator)
        else:
            check_words(words, labels, num_samples)
        if labels.dim() == 1:
            return self._sample(labels[None], words[:, None], request).row(0)
        return self._sample(labels, words, request)

    def _sample(self, labels: Tensor, words: Tensor, request: SampleRequest) -> LabelSample:
        """Sample (B, N) labels with (2, B, K) words."""
        if labels.numel() == 0 or request.num_samples == 0:
            return empty_sample(labels, request.num_samples)
        # Without autograd's bookkeeping the many small operations take a sixth less time.
        with torch.inference_mode():
            form = choose_members(labels.shape[1], request.num_samples)
            index, *counts = take(form.of(labels, request.background), words, request.quota)
        # Copies made out here are ordinary tensors, which autograd may save.
        return LabelSample(index.clone(), *torch.cat(counts, 1).unbind(1))


def take(members: Members, words: Tensor, quota: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw at most ``quota`` positives of each row, and negatives for what is left of K slots.

    Args:
        members: of B rows.
        words: (2, B, K) int64.
        quota: at most K.

    Returns:
        (B, K) int64 candidates, (B, 1) int64 number of positives, (B, 1) int64 number of
        negatives.
    """
    positives, total = members.positives, members.total
    num_pos = positives.clamp(max=quota)
    num_neg = torch.minimum(total - positives, words.shape[-1] - num_pos)
    ranks = pick_ranks(words, positives, total, num_pos)
    index = members.find(ranks).masked_fill_(ranks >= total, 0)
    return index, num_pos, num_neg


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
    num_pos, num_neg = torch.stack([sample.num_pos, sample.num_neg]).tolist()
    return sample.index[:num_pos], sample.index[num_pos : num_pos + num_neg]


@LABEL_SAMPLER_REGISTRY.register()
def static() -> StaticSampler:
    """``IMPL: static``."""
    return StaticSampler()

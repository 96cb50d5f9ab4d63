"""The naive sampler: row by row, with shapes that depend on the data.

The rule that the static sampler is measured against and tested with. A model never gets it:
``IMPL: naive`` leaves the model's own code in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.sampling import IGNORE, SampleRequest, no_sample
from .registry import LABEL_SAMPLER_REGISTRY
from .request import check_request, check_words
from .sample import LabelSample


class NaiveSampler:
    """``nonzero`` and ``randperm`` a row and class; with words, a sequential shuffle."""

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
        if words is not None:
            check_words(words, (2, *labels.shape[:-1], num_samples), labels.device)
        if labels.dim() == 1:
            return _sample_row(labels, request, generator, words)
        if len(labels) == 0:
            return LabelSample(*no_sample(labels, num_samples))
        rows = [
            _sample_row(row, request, generator, None if words is None else words[:, i])
            for i, row in enumerate(labels)
        ]
        return LabelSample(
            torch.stack([row.index for row in rows]),
            torch.stack([row.num_pos for row in rows]),
            torch.stack([row.num_neg for row in rows]),
        )


def _sample_row(
    labels: Tensor,
    request: SampleRequest,
    generator: torch.Generator | None,
    words: Tensor | None,
) -> LabelSample:
    """Sample (N,) labels with (2, K) words."""
    is_neg = torch.zeros_like(labels, dtype=torch.bool)
    if request.background is not None:
        is_neg = labels == request.background
    positive = ((labels != IGNORE) & ~is_neg).nonzero().squeeze(1)
    negative = is_neg.nonzero().squeeze(1)
    num_pos = min(len(positive), request.quota)
    num_neg = min(len(negative), request.num_samples - num_pos)
    picks = torch.cat(
        [
            positive[_draw(len(positive), num_pos, labels.device, generator, words, 0)],
            negative[_draw(len(negative), num_neg, labels.device, generator, words, 1)],
        ]
    )
    index = picks.new_zeros(request.num_samples)
    index[: len(picks)] = picks
    return LabelSample(index, picks.new_tensor(num_pos), picks.new_tensor(num_neg))


def _draw(
    n: int,
    m: int,
    device: torch.device,
    generator: torch.Generator | None,
    words: Tensor | None,
    row: int,
) -> Tensor:
    """An ordered draw of m from 0 .. n-1 without replacement."""
    if words is None:
        return torch.randperm(n, device=device, generator=generator)[:m]
    moved: dict[int, int] = {}
    picks = []
    for step, word in enumerate(words[row, :m].tolist()):
        place = step + word % (n - step)
        picks.append(moved.get(place, place))
        moved[place] = moved.get(step, step)
    return torch.tensor(picks, dtype=torch.int64, device=device)


@LABEL_SAMPLER_REGISTRY.register()
def naive() -> NaiveSampler:
    """``IMPL: naive``."""
    return NaiveSampler()

"""A balanced batch of inputs and labels, in random order: K items of each row.

B rows, N candidates, K slots, D features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import pick_ranks
from ..ops.sampling import IGNORE, SampleRequest
from .compiled import CompiledSampler
from .request import check_request, check_words
from .static import StaticSampler
from .words import draw_words

# One for all calls, so that the compiled one compiles once.
_SAMPLERS = {"static": StaticSampler("rank"), "compiled": CompiledSampler("rank")}


def sample_balanced(
    inputs: Tensor,
    labels: Tensor,
    num_samples: int,
    *,
    positive_fraction: float = 0.5,
    bg_label: int = 0,
    impl: str = "static",
    generator: torch.Generator | None = None,
    words: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample K items of each row: a share of positives, the rest negatives, in random order.

    Where one class is too small for its share, the other fills the gap; only where both together
    are short are the last slots padding. Without replacement, every ordered sample equally likely.

    Args:
        inputs: (N, ...) or (B, N, ...), (B, N, D) for instance; may require a gradient.
        labels: (N,) or (B, N) integer or bool; -1 = ignore, ``bg_label`` = negative, any other
            = positive. Never changed.
        num_samples: K.
        positive_fraction: in [0, 1], the share of positives where both classes have enough.
        bg_label: the label of a negative.
        impl: "static" or "compiled".
        generator: draws the words; None is the device's global generator.
        words: (3, B, K) int64 on [0, 2**62), or (3, K) for (N,) labels: the random input itself;
            for the positives, for the negatives, and for their order.

    Returns:
        (B, K, ...) sampled inputs, 0 in padding slots; (B, K) sampled labels, there -1 (0 where
        the type has no -1); (B, K) bool, which slots are not padding. Without B for (N,) labels.

    Raises:
        TypeError: labels that are not integers.
        ValueError: any other argument out of its range.
    """
    if impl not in tuple(_SAMPLERS):
        raise ValueError(f"impl is {impl!r}; choose one of: {', '.join(_SAMPLERS)}")
    request = check_request(labels, num_samples, positive_fraction, bg_label)
    request = request._replace(fill=True)
    if inputs.shape[: labels.dim()] != labels.shape:
        raise ValueError(
            f"inputs of shape {tuple(inputs.shape)} do not begin with the labels' "
            f"shape {tuple(labels.shape)}"
        )
    shape = (3, *labels.shape[:-1], num_samples)
    if words is None:
        words = draw_words(shape, device=labels.device, generator=generator)
    else:
        check_words(words, shape, labels.device)
    if labels.dim() == 1:
        batch = _sample(inputs[None], labels[None], request, _SAMPLERS[impl], words[:, None])
        return batch[0][0], batch[1][0], batch[2][0]
    return _sample(inputs, labels, request, _SAMPLERS[impl], words)


def _sample(
    inputs: Tensor, labels: Tensor, request: SampleRequest, sampler: StaticSampler, words: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    sample = sampler.draw(labels, request, words=words[:2])
    num_valid = (sample.num_pos + sample.num_neg)[:, None]
    # A shuffle of the valid slots, as if they were positives; padding stays where it is.
    order = pick_ranks(words[2:].expand(2, -1, -1), num_valid, num_valid, num_valid)
    return _gather(inputs, labels, sample.index.gather(1, order), sample.is_valid)


def _gather(
    inputs: Tensor, labels: Tensor, index: Tensor, is_valid: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Take the (B, K) candidates and blank the padding."""
    if labels.shape[1] == 0:
        # Nothing can be gathered: one candidate more, which is padding.
        one = inputs.new_zeros((inputs.shape[0], 1, *inputs.shape[2:]))
        inputs, labels = torch.cat([inputs, one], 1), labels.new_zeros((labels.shape[0], 1))
    features = (1,) * (inputs.dim() - 2)
    wide = index.view(*index.shape, *features).expand(*index.shape, *inputs.shape[2:])
    is_padding = ~is_valid
    blank = IGNORE if labels.dtype.is_signed else 0
    # masked_fill knows no unsigned type of more than a byte.
    picked = labels.gather(1, index).long().masked_fill(is_padding, blank)
    return (
        inputs.gather(1, wide).masked_fill(is_padding.view(*index.shape, *features), 0),
        picked.to(labels.dtype),
        is_valid,
    )

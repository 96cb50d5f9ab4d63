"""From the RPN's predictions to proposals, with fixed shapes up to the suppression of overlaps.

B images, N anchors of all levels, P candidates of an image, T proposals of an image.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_LOW_32_BITS = (1 << 32) - 1


def top_candidates(scores: Sequence[Tensor], limit: int) -> tuple[Tensor, Tensor]:
    """The highest scores of each level, in the order of a stable sort on every device.

    Args:
        scores: (B, Nl) floating point, for each level.
        limit: the most candidates of a level.

    Returns:
        (B, P) int64, the anchors of the candidates among those of all levels, level by level;
        (P,) int64, the levels. What is not a number counts as the highest score.
    """
    keys = _unique_keys(torch.cat(list(scores), dim=1))
    sizes = [level.shape[1] for level in scores]
    counts = [min(size, limit) for size in sizes]
    top = [
        part.topk(count, dim=1).values
        for part, count in zip(keys.split(sizes, dim=1), counts, strict=True)
    ]
    index = _LOW_32_BITS - (torch.cat(top, dim=1) & _LOW_32_BITS)
    levels = [keys.new_full((count,), level) for level, count in enumerate(counts)]
    return index, torch.cat(levels)


def _unique_keys(scores: Tensor) -> Tensor:
    """(B, N) int64 that rise with the score and, among equal ones, fall with the index."""
    # 0 is added for -0, which is not below 0. The bits of a float rise with it, but where the
    # sign is set.
    bits = (scores.float() + 0).view(torch.int32)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).masked_fill_(scores.isnan(), 0x7FFFFFFF)
    place = torch.arange(scores.shape[1], device=scores.device)
    return (order.long() << 32).bitwise_or_(_LOW_32_BITS - place)


def clip_boxes(boxes: Tensor, limits: Tensor) -> Tensor:
    """(B, P, 4) boxes within their images; limits: (B, 4), width, height, width, height."""
    return torch.minimum(boxes.clamp(min=0), limits[:, None].to(boxes.dtype))


def are_larger(boxes: Tensor, size: float) -> Tensor:
    """(B, P) bool: whether both sides of a (B, P, 4) box are longer than ``size``."""
    return ((boxes[..., 2:] - boxes[..., :2]) > size).all(dim=-1)

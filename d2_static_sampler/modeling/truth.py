"""The ground truth of a batch in tensors of a fixed shape.

B images, G slots for the ground truth of an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .transfers import to_device


@dataclass(frozen=True)
class Truth:
    """What is to be found in each image.

    Attributes:
        boxes: (B, G, 4) float; beyond the count anything.
        classes: (B, G) int64, likewise.
        count: (B,) int64.
    """

    boxes: Tensor
    classes: Tensor
    count: Tensor


def batch_truth(boxes: Sequence[Tensor], classes: Sequence[Tensor]) -> Truth:
    """Put the (Gi, 4) boxes and the (Gi,) classes of B images side by side, with G >= 2."""
    index, count = _rows([len(part) for part in boxes], boxes[0].device)
    return Truth(_take(boxes, index), _take(classes, index), count)


def batch_boxes(boxes: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(B, G, 4) of B times (Gi, 4) boxes, G >= 2, and how many each image has, (B,) int64."""
    index, count = _rows([len(part) for part in boxes], boxes[0].device)
    return _take(boxes, index), count


def _rows(sizes: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """(B, G) int64, places in all rows one after the other; (B,) int64 sizes.

    Lengths are shapes, which the host knows: the index is made there.
    """
    # With a single slot a compiled function would be another graph.
    slots = torch.arange(max(2, *sizes))
    count = torch.tensor(sizes)
    first = count.cumsum(0) - count
    # Beyond its rows an image repeats its last one, or has any.
    index = torch.minimum(slots, (count - 1).clamp(min=0)[:, None]) + first[:, None]
    index.clamp_(max=max(0, sum(sizes) - 1))
    return to_device(index, device), to_device(count, device)


def _take(parts: Sequence[Tensor], index: Tensor) -> Tensor:
    rows = torch.cat(list(parts))
    if len(rows) == 0:
        return rows.new_zeros((*index.shape, *rows.shape[1:]))
    return rows[index]

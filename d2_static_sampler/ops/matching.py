"""Matching boxes with the ground truth of a whole batch, with fixed shapes.

The rules are those of Detectron2's ``Matcher`` on the overlaps of its ``pairwise_iou``, ties
included. The matrix of overlaps never exists as a whole.

B images, N boxes, G slots for the ground truth of an image, W boxes of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .operator import operator

# Of one temporary (B, G, W) matrix; a handful of them is alive at a time.
_BLOCK_ELEMENTS = {"cpu": 1 << 19}
_BLOCK_ELEMENTS_ELSEWHERE = 1 << 23


@dataclass(frozen=True)
class MatchRule:
    """What overlap makes which label.

    Attributes:
        thresholds: ascending; between two of them lies one label.
        labels: one more than there are thresholds, each -1 (ignore), 0 or 1.
        low_quality: whether the boxes that overlap a ground truth most are labelled 1, too.
    """

    thresholds: tuple[float, ...]
    labels: tuple[int, ...]
    low_quality: bool = False


def match_boxes(
    truth: Tensor, num_truth: Tensor, boxes: Tensor, rule: MatchRule
) -> tuple[Tensor, Tensor, Tensor]:
    """Match every box with the ground truth that it overlaps most.

    Args:
        truth: (B, G, 4) float, the ground truth of each image, then anything finite; G >= 1.
        num_truth: (B,) int64, how much of it counts.
        boxes: (B, N, 4) float, or (N, 4) for the same boxes in every image.
        rule: from overlap to label.

    Returns:
        (B, N) int64, the ground truth of each box, the first of equals, 0 where there is none;
        (B, N) int8, its label; () bool, False where an overlap is not a number, which
        Detectron2 refuses.
    """
    return match_op(
        truth, num_truth, boxes, list(rule.thresholds), list(rule.labels), rule.low_quality
    )


def match_in_torch(
    truth: Tensor,
    num_truth: Tensor,
    boxes: Tensor,
    thresholds: Sequence[float],
    labels: Sequence[int],
    low_quality: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The body of :func:`match_boxes`: a block of boxes after the other."""
    if boxes.shape[-2] == 0:
        empty = truth.new_empty((len(truth), 0))
        return empty.long(), empty.to(torch.int8), truth.new_ones((), dtype=torch.bool)
    is_truth = torch.arange(truth.shape[1], device=truth.device) < num_truth[:, None]
    blocks = _Blocks(truth, is_truth, boxes)
    found, best_boxes, is_right = [], [], []
    for overlaps in blocks:
        found.append(overlaps.max(dim=1))
        best_boxes.append(overlaps.amax(dim=2))
        is_right.append((overlaps == overlaps).all())
    quality, matches = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
    label = torch.full_like(matches, labels[0], dtype=torch.int8)
    for threshold, value in zip(thresholds, labels[1:], strict=True):
        label.masked_fill_(quality >= threshold, value)
    if low_quality:
        # Where there is no ground truth, 2 equals no overlap.
        best = torch.stack(best_boxes).amax(0).masked_fill(~is_truth, 2)
        is_best = [(overlaps == best[..., None]).any(dim=1) for overlaps in blocks]
        label.masked_fill_(torch.cat(is_best, dim=1), 1)
    return matches, label, torch.stack(is_right).all()


match_op = operator(
    "match_boxes",
    match_in_torch,
    "(Tensor truth, Tensor num_truth, Tensor boxes, float[] thresholds, int[] labels, "
    "bool low_quality) -> (Tensor, Tensor, Tensor)",
)


@match_op.register_fake
def _(truth: Tensor, num_truth: Tensor, boxes: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    shape = truth.shape[0], boxes.shape[-2]
    return (
        truth.new_empty(shape, dtype=torch.int64),
        truth.new_empty(shape, dtype=torch.int8),
        truth.new_empty((), dtype=torch.bool),
    )


class _Blocks:
    """The (B, G, W) overlaps, block after block; -1 where there is no ground truth.

    Computed anew each time, unless there is a single block: equal bits, for equal operations.
    """

    def __init__(self, truth: Tensor, is_truth: Tensor, boxes: Tensor) -> None:
        self._truth = truth[..., None].unbind(2)
        self._truth_area = _area(self._truth)
        self._is_padding = ~is_truth[..., None]
        boxes = boxes if boxes.dim() == 3 else boxes[None]
        # Rows of coordinates: one after the other in memory.
        self._boxes = boxes.mT.contiguous()[:, :, None].unbind(1)
        self._box_area = _area(self._boxes)
        limit = _BLOCK_ELEMENTS.get(truth.device.type, _BLOCK_ELEMENTS_ELSEWHERE)
        self._width = max(1, limit // max(1, is_truth.numel()))
        if torch.compiler.is_compiling():
            # One block: the graph computes overlaps where it reads them, and stores none.
            self._width = self._box_area.shape[-1]
        self._kept: list[Tensor] = []

    def __iter__(self) -> Iterator[Tensor]:
        num_boxes = self._box_area.shape[-1]
        if self._kept:
            yield from self._kept
        elif num_boxes <= self._width:
            self._kept = [self._overlaps(slice(None))]
            yield from self._kept
        else:
            for start in range(0, num_boxes, self._width):
                yield self._overlaps(slice(start, start + self._width))

    def _overlaps(self, block: slice) -> Tensor:
        x1, y1, x2, y2 = (row[..., block] for row in self._boxes)
        left, top, right, bottom = self._truth
        width = (torch.min(right, x2) - torch.max(left, x1)).clamp_(min=0)
        height = (torch.min(bottom, y2) - torch.max(top, y1)).clamp_(min=0)
        common = width.mul_(height)
        union = self._truth_area + self._box_area[..., block] - common
        # What is not a number stays so, but only where boxes meet.
        overlaps = common / union
        return overlaps.masked_fill_(~(common > 0), 0).masked_fill_(self._is_padding, -1)


def _area(rows: tuple[Tensor, ...]) -> Tensor:
    x1, y1, x2, y2 = rows
    return (x2 - x1) * (y2 - y1)

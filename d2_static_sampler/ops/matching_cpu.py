"""Matching on a CPU, in NumPy: only boxes that may meet are compared.

A CPU waits for nothing, so shapes may depend on the data here. Boxes that follow each other
mostly lie close together, anchors above all: a block of them that a ground truth does not touch
is passed over as a whole.

N boxes, W boxes of a block, P pairs of a block and a ground truth, M pairs of boxes that meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .matching import match_op

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]

# 128 anchors are a strip of 43 cells: narrow enough to be passed over often.
_WIDTH = 128
# Pairs of a block and a ground truth at a time: 4 MB of coordinates.
_PAIRS = 2048


@match_op.register_kernel("cpu")
def _(
    truth: Tensor,
    num_truth: Tensor,
    boxes: Tensor,
    thresholds: Sequence[float],
    labels: Sequence[int],
    low_quality: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    matches, label, is_right = _match(
        truth.numpy(), num_truth.tolist(), boxes.numpy(), thresholds, labels, low_quality
    )
    return torch.from_numpy(matches), torch.from_numpy(label), torch.tensor(is_right)


def _match(
    truth: Floats,
    num_truth: Sequence[int],
    boxes: Floats,
    thresholds: Sequence[float],
    labels: Sequence[int],
    low_quality: bool,
) -> tuple[Ints, NDArray[np.int8], bool]:
    """:func:`.matching.match_boxes` of arrays."""
    shape = len(truth), boxes.shape[-2]
    matches = np.zeros(shape, np.int64)
    label = np.full(shape, labels[0], np.int8)
    is_right = True
    blocks = BoxBlocks(boxes) if boxes.ndim == 2 else None
    with np.errstate(all="ignore"):
        for i, count in enumerate(num_truth):
            if count:
                image = blocks or BoxBlocks(boxes[i])
                quality, best = image.match(truth[i, :count], matches[i])
                is_right &= not np.isnan(quality).any()
                _label(label[i], quality, thresholds, labels[1:])
                if low_quality:
                    label[i, best] = 1
    return matches, label, is_right


class BoxBlocks:
    """(N, 4) boxes in blocks of W, as rows of coordinates."""

    def __init__(self, boxes: Floats) -> None:
        self._num_boxes = len(boxes)
        num_blocks = -(-len(boxes) // _WIDTH)
        # The last block is filled up with boxes that meet none.
        rows = np.empty((4, num_blocks * _WIDTH), boxes.dtype)
        rows[:2, len(boxes) :], rows[2:, len(boxes) :] = np.inf, -np.inf
        rows[:, : len(boxes)] = boxes.T
        self._rows = rows.reshape(4, num_blocks, _WIDTH)
        # fmin and fmax pass over what is not a number.
        self._starts = np.fmin.reduce(self._rows[:2], axis=2)
        self._ends = np.fmax.reduce(self._rows[2:], axis=2)

    def match(self, truth: Floats, matches: Ints) -> tuple[Floats, Ints | slice]:
        """Write the match of each box to ``matches``.

        Returns:
            (N,) the overlap of each box with its match; which boxes overlap a ground truth most.
        """
        quality = np.zeros(self._num_boxes, self._rows.dtype)
        best: list[Ints] = []
        is_met = 0
        for g, box, overlap in self._meetings(truth):
            better = (overlap > quality[box]) | np.isnan(overlap)
            quality[box[better]], matches[box[better]] = overlap[better], g
            most = overlap.max()
            is_met += most > 0
            best.append(box[overlap == most])
        # A ground truth that meets no box has all of them as its best: their overlap is 0.
        return quality, np.concatenate(best) if is_met == len(truth) else slice(None)

    def _meetings(self, truth: Floats) -> Iterator[tuple[int, Ints, Floats]]:
        """For each ground truth that meets any: its number, the boxes, the overlaps."""
        blocks = self._touched(truth)
        counts = np.array([len(numbers) for numbers in blocks])
        first = 0
        while first < len(truth):
            # At least one ground truth at a time, however many blocks it touches.
            last = first + max(1, int((counts[first:].cumsum() <= _PAIRS).sum()))
            yield from self._meet(truth, first, blocks[first:last])
            first = last

    def _touched(self, truth: Floats) -> list[Ints]:
        """The blocks that may meet each ground truth."""
        starts, ends = self._starts, self._ends
        return [
            np.flatnonzero((starts[0] < x2) & (ends[0] > x1) & (starts[1] < y2) & (ends[1] > y1))
            for x1, y1, x2, y2 in truth
        ]

    def _meet(
        self, truth: Floats, first: int, blocks: list[Ints]
    ) -> Iterator[tuple[int, Ints, Floats]]:
        block = np.concatenate(blocks)
        number = first + np.repeat(np.arange(len(blocks)), [len(part) for part in blocks])
        rows = self._rows[:, block].reshape(4, len(block), _WIDTH)
        x1, y1, x2, y2 = truth[number].T[:, :, None]
        meets = (rows[0] < x2) & (rows[2] > x1) & (rows[1] < y2) & (rows[3] > y1)
        place = np.flatnonzero(meets)
        pair = place // _WIDTH
        box = block[pair] * _WIDTH + place % _WIDTH
        overlap = _overlap(truth[number[pair]].T, rows.reshape(4, -1)[:, place])
        ends = np.searchsorted(number[pair], np.arange(first, first + len(blocks) + 1))
        for g, (start, end) in enumerate(pairwise(ends), first):
            if end > start:
                yield g, box[start:end], overlap[start:end]


def _overlap(truth: Floats, boxes: Floats) -> Floats:
    """(M,) overlaps of (4, M) boxes; the operations of the other devices, in their order."""
    width = np.minimum(truth[2], boxes[2]) - np.maximum(truth[0], boxes[0])
    height = np.minimum(truth[3], boxes[3]) - np.maximum(truth[1], boxes[1])
    common = np.maximum(width, 0) * np.maximum(height, 0)
    union = _area(truth) + _area(boxes) - common
    return np.where(common > 0, common / union, 0).astype(union.dtype, copy=False)


def _area(rows: Floats) -> Floats:
    return (rows[2] - rows[0]) * (rows[3] - rows[1])


def _label(
    label: NDArray[np.int8], quality: Floats, thresholds: Sequence[float], labels: Sequence[int]
) -> None:
    for threshold, value in zip(thresholds, labels, strict=True):
        # Not a wider comparison: the threshold is rounded to the type of the overlaps.
        label[quality >= quality.dtype.type(threshold)] = value

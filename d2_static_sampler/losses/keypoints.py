"""Keypoint targets and the keypoint loss of Detectron2, over the slots that are valid.

M slots, J keypoints each, S the side of a heatmap. A keypoint is (x, y, visibility).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_IGNORED = -100  # cross_entropy's own mark


@torch.no_grad()
def keypoint_heatmap(keypoints: Tensor, boxes: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """The cell of each keypoint in its box: ``Keypoints.to_heatmap``, the same bits.

    Args:
        keypoints: (M, J, 3) floating.
        boxes: (M, 4) floating.
        side: S, cells a row and rows.

    Returns:
        (M, J) int64, the cell, row by row, 0 where not visible; and (M, J) bool, whether the
        keypoint is visible and inside of the box, the box's far edges included.
    """
    location, visibility = keypoints.split((2, 1), dim=-1)
    low, high = boxes[:, None].chunk(2, dim=-1)
    cell = ((location - low) * (side / (high - low))).floor().long()
    cell = torch.where(location == high, side - 1, cell)
    is_inside = (cell >= 0) & (cell < side)
    is_visible = (is_inside & (visibility > 0)).all(dim=-1)
    column, row = cell.unbind(-1)
    return torch.where(is_visible, row * side + column, 0), is_visible


@torch.no_grad()
def has_visible_keypoint(keypoints: Tensor, boxes: Tensor) -> Tensor:
    """Which boxes ``select_proposals_with_visible_keypoints`` keeps.

    Args:
        keypoints: (M, J, 3) floating.
        boxes: (M, 4) floating.

    Returns:
        (M,) bool: a keypoint of visibility 1 or more lies in the box, edges included.
    """
    location, visibility = keypoints.split((2, 1), dim=-1)
    low, high = boxes[:, None].chunk(2, dim=-1)
    is_good = (location >= low) & (location <= high) & (visibility >= 1)
    return is_good.all(dim=-1).any(dim=1)


def keypoint_loss(
    logits: Tensor,
    index: Tensor,
    is_visible: Tensor,
    is_valid: Tensor,
    normalizer: float | None,
) -> Tensor:
    """Cross entropy over the cells, of the visible keypoints, as ``keypoint_rcnn_loss``.

    Args:
        logits: (M, J, S, S) floating; NaN and inf are harmless where not visible or not valid.
        index: (M, J) int64, as :func:`keypoint_heatmap` gives it.
        is_visible: (M, J) bool, as :func:`keypoint_heatmap` gives it.
        is_valid: (M,) bool.
        normalizer: divides the sum, and is not 0; None for the number of visible keypoints.

    Returns:
        () in the type of ``logits`` (float32 under autocast); 0, connected to the graph, where
        no keypoint is visible.
    """
    counts = is_visible & is_valid[:, None]
    safe = torch.where(counts[..., None, None], logits, 0.0).flatten(0, 1).flatten(1)
    target = torch.where(counts, index, _IGNORED).flatten()
    total = F.cross_entropy(safe, target, ignore_index=_IGNORED, reduction="sum")
    return total / (counts.sum().clamp(min=1) if normalizer is None else normalizer)

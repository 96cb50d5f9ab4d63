"""Mask targets and the mask loss of Detectron2, over the slots that are valid.

G ground-truth masks of H x W pixels, M slots, C classes, S the side of a predicted mask.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import roi_align


class MaskStats(NamedTuple):
    """The counts behind accuracy, false_positive and false_negative, each () int64.

    Attributes:
        num_incorrect: pixels of valid slots that are predicted wrongly.
        num_total: pixels of valid slots.
        num_positive: of these, pixels inside of an object.
        num_false_positive: pixels outside, predicted to be inside.
        num_false_negative: pixels inside, predicted to be outside.
    """

    num_incorrect: Tensor
    num_total: Tensor
    num_positive: Tensor
    num_false_positive: Tensor
    num_false_negative: Tensor


@torch.no_grad()
def crop_masks(masks: Tensor, boxes: Tensor, match: Tensor, side: int) -> Tensor:
    """Crop each box from its mask: ``BitMasks(masks)[match].crop_and_resize``, the same bits.

    The masks are not gathered: M copies of H x W pixels are never made. All are of one image
    (or of images of one size): padding a mask would change what is read at its border.

    Args:
        masks: (G, H, W) bool, or numbers whose zeros are outside.
        boxes: (M, 4) floating, finite in every slot: a box of zero area costs nothing.
        match: (M,) int64 in 0 .. G - 1, the mask of each box.
        side: S.

    Returns:
        (M, S, S) bool; all False where G is 0.
    """
    if masks.shape[0] == 0:
        return masks.new_zeros((boxes.shape[0], side, side), dtype=torch.bool)
    # roi_align does not check what it reads memory by.
    match = match.clamp(0, masks.shape[0] - 1)
    regions = torch.cat((match[:, None].to(torch.float32), boxes.to(torch.float32)), dim=1)
    pixels = masks.to(torch.bool).to(torch.float32)[:, None]
    return roi_align(pixels, regions, (side, side), 1.0, 0, True).squeeze(1) >= 0.5


def pick_class_masks(logits: Tensor, classes: Tensor, is_valid: Tensor) -> Tensor:
    """The mask of each slot's class, with 0 for the slots that are not valid.

    The result stands for ``logits`` in the functions below: whoever calls several picks once.

    Args:
        logits: (M, C, S, S) floating, or (M, 1, S, S) of no class.
        classes: (M,) int64 in 0 .. C - 1; anything where not valid, unused where C is 1.
        is_valid: (M,) bool.

    Returns:
        (M, 1, S, S) in the type of ``logits``.
    """
    if logits.shape[1] > 1:
        slot = torch.arange(logits.shape[0], device=logits.device)
        logits = logits[slot, torch.where(is_valid, classes, 0)][:, None]
    return torch.where(is_valid[:, None, None, None], logits, 0.0)


def mask_loss_mean(logits: Tensor, classes: Tensor, targets: Tensor, is_valid: Tensor) -> Tensor:
    """The mean binary cross entropy over the pixels of valid slots, as ``mask_rcnn_loss``.

    Args:
        logits: as in :func:`pick_class_masks`; NaN and inf are harmless where not valid.
        classes: as in :func:`pick_class_masks`.
        targets: (M, S, S) bool, as :func:`crop_masks` gives them.
        is_valid: (M,) bool.

    Returns:
        () float32, from float64 logits too, as with Detectron2; 0, connected to the graph,
        where nothing is valid.
    """
    picked = pick_class_masks(logits, classes, is_valid).squeeze(1)
    weight = is_valid[:, None, None].to(torch.float32)
    total = F.binary_cross_entropy_with_logits(
        picked, targets.to(torch.float32), weight=weight, reduction="sum"
    )
    return total / _num_pixels(targets, is_valid).clamp(min=1)


@torch.no_grad()
def mask_stats(logits: Tensor, classes: Tensor, targets: Tensor, is_valid: Tensor) -> MaskStats:
    """Count what Detectron2 logs of predicted masks, without copying it to the host.

    Args:
        logits: as in :func:`mask_loss_mean`.
        classes: as in :func:`mask_loss_mean`.
        targets: as in :func:`mask_loss_mean`.
        is_valid: as in :func:`mask_loss_mean`.
    """
    valid = is_valid[:, None, None]
    is_inside = (pick_class_masks(logits, classes, is_valid) > 0).squeeze(1) & valid
    targets = targets & valid
    is_wrong = is_inside != targets
    counted = torch.stack((is_wrong, targets, is_wrong & targets))
    num_incorrect, num_positive, num_false_negative = counted.flatten(1).sum(dim=1).unbind()
    return MaskStats(
        num_incorrect,
        _num_pixels(targets, is_valid),
        num_positive,
        num_incorrect - num_false_negative,
        num_false_negative,
    )


def _num_pixels(targets: Tensor, is_valid: Tensor) -> Tensor:
    return is_valid.sum() * (targets.shape[1] * targets.shape[2])

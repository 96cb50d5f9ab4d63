"""Losses of the mask and keypoint heads over padded slots.

B images, Q first slots of an image, which alone may be foreground, C classes, S the side of a
predicted mask or heatmap, J keypoints.
"""

from __future__ import annotations

from typing import Any

import torch
from detectron2.modeling.roi_heads import keypoint_head
from detectron2.structures import BitMasks, PolygonMasks
from detectron2.utils.events import EventStorage
from torch import Tensor

from ..losses.keypoints import has_visible_keypoint, keypoint_heatmap, keypoint_loss
from ..losses.masks import crop_masks, mask_loss_mean, mask_stats
from ..losses.regions import Regions
from .deferred import Deferred, deferred_metrics
from .padded_regions import PaddedRegions
from .transfers import to_device


def mask_losses(head: Any, pooled: Tensor, regions: PaddedRegions) -> dict[str, Tensor]:
    """``loss_mask`` of a ``BaseMaskRCNNHead``.

    Args:
        head: the mask head.
        pooled: (B * Q, channels, height, width), the features of the first slots.
        regions: of the batch.
    """
    logits, fg = head.layers(pooled), regions.fg
    valid, classes = fg.is_fg.flatten(), fg.classes.flatten()
    targets = mask_targets(regions, logits.shape[-1])
    _report_masks(mask_stats(logits.detach(), classes, targets, valid))
    loss = mask_loss_mean(logits, classes, targets, valid)
    return {"loss_mask": loss * head.loss_weight}


def mask_targets(regions: PaddedRegions, side: int) -> Tensor:
    """(B * Q, S, S) bool: the masks of the matches, cropped to the slots.

    Bit masks are cropped on their device. Polygons are drawn on the host, which waits for their
    boxes: one copy a batch.
    """
    fg = regions.fg
    _expect("gt_masks", regions)
    masks = [image.gt_masks if len(image) else None for image in regions.targets]
    if any(isinstance(of_image, PolygonMasks) for of_image in masks):
        return _draw_polygons(masks, fg, side)
    crops = [
        crop_masks(_bits(of_image, fg.boxes.device), fg.boxes[i], fg.matches[i], side)
        for i, of_image in enumerate(masks)
    ]
    return torch.cat(crops)


def keypoint_losses(head: Any, pooled: Tensor, regions: PaddedRegions) -> dict[str, Tensor]:
    """``loss_keypoint`` of a ``BaseKeypointRCNNHead``; arguments as in :func:`mask_losses`."""
    logits, fg = head.layers(pooled), regions.fg
    boxes, is_fg = fg.boxes.flatten(0, 1), fg.is_fg
    keypoints = _matched_keypoints(regions, logits.shape[1])
    is_valid = is_fg & has_visible_keypoint(keypoints, boxes).view(is_fg.shape)
    deferred_metrics().put("keypoint_head/num_fg_samples", is_valid.sum(), is_fg.any(dim=1).sum())
    index, is_visible = keypoint_heatmap(keypoints, boxes, logits.shape[-1])
    num_visible = (is_visible & is_valid.flatten()[:, None]).sum()
    deferred_metrics().add(_Keypoints(num_visible))
    by_visible = head.loss_normalizer == "visible"
    # 0 where no slot may be foreground: then the sum is 0, too.
    normalizer = None if by_visible else (len(is_fg) * head.loss_normalizer) or 1.0
    loss = keypoint_loss(logits, index, is_visible, is_valid.flatten(), normalizer)
    return {"loss_keypoint": loss * head.loss_weight}


class _Keypoints(Deferred):
    """Counts the batches without a visible keypoint, as ``keypoint_rcnn_loss`` does."""

    def write(self, storage: EventStorage) -> None:
        if not self.values[0]:
            keypoint_head._TOTAL_SKIPPED += 1
            skipped = keypoint_head._TOTAL_SKIPPED
            storage.put_scalar("kpts_num_skipped_batches", skipped, smoothing_hint=False)


def _expect(field: str, regions: PaddedRegions) -> None:
    """Refuse images that have boxes, but not the field, as Detectron2 does: after its checks."""
    without = [image for image in regions.targets if len(image) and not image.has(field)]
    if without:
        deferred_metrics().flush_own()
        getattr(without[0], field)  # says what is missing


def _bits(masks: BitMasks | None, device: torch.device) -> Tensor:
    if masks is None:
        return torch.zeros((0, 1, 1), dtype=torch.bool, device=device)
    return masks.tensor


def _draw_polygons(masks: list[PolygonMasks | None], fg: Regions, side: int) -> Tensor:
    parts = [fg.is_fg[..., None], fg.matches[..., None], fg.boxes.double()]
    on_host = torch.cat(parts, dim=-1).cpu()
    drawn = torch.zeros((*fg.is_fg.shape, side, side), dtype=torch.bool)
    for i, of_image in enumerate(masks):
        rows = on_host[i, :, 0] > 0
        if of_image is not None and rows.any():
            polygons = of_image[on_host[i, rows, 1].long()]
            drawn[i, rows] = polygons.crop_and_resize(on_host[i, rows, 2:].float(), side)
    return to_device(drawn.flatten(0, 1), fg.boxes.device)


def _matched_keypoints(regions: PaddedRegions, num_keypoints: int) -> Tensor:
    """(B * Q, J, 3)."""
    _expect("gt_keypoints", regions)
    truth = regions.truth.boxes
    keypoints = truth.new_zeros((*truth.shape[:2], num_keypoints, 3))
    for i, image in enumerate(regions.targets):
        if len(image):
            keypoints[i, : len(image)] = image.gt_keypoints.tensor
    index = regions.fg.matches[..., None, None].expand(-1, -1, num_keypoints, 3)
    return keypoints.gather(1, index).flatten(0, 1)


def _report_masks(stats: Any) -> None:
    metrics, total, positive = deferred_metrics(), stats.num_total, stats.num_positive
    # Detectron2 writes nothing where there is no mask, and 0 where there is nothing to miss.
    is_any = total > 0
    outside, inside = ((n.clamp(min=1) * is_any) for n in (total - positive, positive))
    metrics.put("mask_rcnn/accuracy", total - stats.num_incorrect, total)
    metrics.put("mask_rcnn/false_positive", stats.num_false_positive, outside)
    metrics.put("mask_rcnn/false_negative", stats.num_false_negative, inside)

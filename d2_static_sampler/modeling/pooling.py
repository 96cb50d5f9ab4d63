"""Detectron2's ROIPooler over padded slots: how the boxes spread over the levels changes no shape.

B images, K boxes an image, R = B * K boxes, L levels, C channels, S the side of an output.
"""

from __future__ import annotations

from typing import Any

import torch
from detectron2.layers import ROIAlign
from detectron2.modeling.poolers import ROIPooler
from detectron2.structures import Boxes
from torch import Tensor

from ..ops.pooling import roi_align_levels


def can_pool(pooler: Any) -> bool:
    """Whether :func:`pool_rois` equals this module.

    It does for Detectron2's own ``ROIPooler`` of a square output whose levels are all the same
    ``ROIAlign``: the pooler types "ROIAlign" and "ROIAlignV2".
    """
    if type(pooler) is not ROIPooler or {type(lv) for lv in pooler.level_poolers} != {ROIAlign}:
        return False
    kinds = {(*lv.output_size, lv.sampling_ratio, lv.aligned) for lv in pooler.level_poolers}
    return len(kinds) == 1 and len(set(pooler.output_size)) == 1


def pool_rois(pooler: ROIPooler, features: list[Tensor], boxes: Tensor) -> Tensor:
    """``pooler(features, [Boxes(b) for b in boxes])``, and nothing waits for a GPU.

    Equal to Detectron2's bit for bit on a CPU, as are the gradients of the features; boxes get
    none. Half-precision features are pooled in float32 and returned in their type, as Detectron2
    does under autocast. With ``torch.use_deterministic_algorithms`` on another device than a CPU,
    Detectron2's own pooler runs, and waits: the kernels behind the operation add in any order.

    Args:
        pooler: one that :func:`can_pool` accepts.
        features: L tensors (B, C, Hi, Wi) of one floating type.
        boxes: (B, K, 4) floating, x0 y0 x1 y1 in the image; used as float32, as in ``Boxes``.

    Returns:
        (R, C, S, S) of the features' type.

    Raises:
        ValueError: the number of features or the shape of the boxes does not fit.
    """
    _check_shapes(pooler, features, boxes)
    if torch.are_deterministic_algorithms_enabled() and boxes.device.type != "cpu":
        return pooler(features, [Boxes(of_image) for of_image in boxes])
    boxes = boxes.to(torch.float32)
    levels = pooler.level_poolers
    if len(levels) == 1:
        return levels[0](features[0], _rois_of(boxes))
    return roi_align_levels(
        features,
        _rois_of(boxes).to(features[0].dtype),
        levels_of_boxes(pooler, boxes),
        [float(level.spatial_scale) for level in levels],
        list(pooler.output_size),
        levels[0].sampling_ratio,
        levels[0].aligned,
    )


def levels_of_boxes(pooler: ROIPooler, boxes: Tensor) -> Tensor:
    """The level that Detectron2 pools each box from.

    Args:
        pooler: it says which levels there are, and for boxes of which size.
        boxes: (B, K, 4) float32.

    Returns:
        (R,) int64, an index of the features; outside of 0 ... L - 1 where the area of a box is
        negative or not a number: no level pools it, its output is 0.
    """
    x0, y0, x1, y1 = boxes.flatten(0, 1).unbind(1)
    # Box sizes of exactly a power of two lie on a border of two levels: the order of these
    # operations is Detectron2's, so that both round to the same side.
    size = ((x1 - x0) * (y1 - y0)).sqrt() / pooler.canonical_box_size
    level = (torch.log2(size + 1e-8) + pooler.canonical_level).floor()
    return level.clamp(pooler.min_level, pooler.max_level).to(torch.int64) - pooler.min_level


def _check_shapes(pooler: ROIPooler, features: list[Tensor], boxes: Tensor) -> None:
    levels, images = len(pooler.level_poolers), features[0].shape[0] if features else 0
    if len(features) != levels:
        raise ValueError(f"features: {len(features)} tensors, but the pooler has {levels} levels")
    if boxes.dim() != 3 or boxes.shape[0] != images or boxes.shape[2] != 4:
        raise ValueError(f"boxes: shape {tuple(boxes.shape)}, not ({images}, K, 4)")


def _rois_of(boxes: Tensor) -> Tensor:
    images = torch.arange(boxes.shape[0], dtype=boxes.dtype, device=boxes.device)
    images = images.view(-1, 1, 1).expand(-1, boxes.shape[1], 1)
    return torch.cat([images, boxes], dim=2).flatten(0, 1)

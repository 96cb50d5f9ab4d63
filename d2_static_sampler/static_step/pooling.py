"""Detectron2's ROIPooler with fixed shapes: how the boxes spread over the levels changes none.

Shapes: B images, K boxes an image, R = B * K boxes, L levels, C channels, S the side of an output,
Hi and Wi the sides of level i.

All levels are one custom operation. On a CPU, where nothing waits, its body picks the rows of each
level. On any other device every level pools all R boxes, those of the other levels moved outside of
the feature map, where ROIAlign reads nothing: no shape depends on data, and the host never waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torchvision  # noqa: F401  It registers roi_align.
from detectron2.layers import ROIAlign
from detectron2.modeling.poolers import ROIPooler
from detectron2.structures import Boxes
from torch import Tensor

from ..samplers.operations import operation

_FAR = -1e30  # outside of a feature map at any scale


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


def pool_in_fixed_shapes(
    features: Sequence[Tensor],
    rois: Tensor,
    level: Tensor,
    scales: Sequence[float],
    output_size: Sequence[int],
    sampling_ratio: int,
    aligned: bool,
) -> Tensor:
    """The body of :func:`roi_align_levels` on a GPU; equal to the one on a CPU bit for bit.

    Args:
        features: L tensors (B, C, Hi, Wi) of one floating type, without a gradient.
        rois: (R, 5) of that type, the index of the image before the box.
        level: (R,) int64.
        scales: L, a pixel of the image in pixels of the level.
        output_size: height and width of an output.
        sampling_ratio: samples along a side of an output's pixel; 0 for one a pixel of the level.
        aligned: whether pixels are shifted by a half, as in "ROIAlignV2".

    Returns:
        (R, C, height, width) of the features' type; 0 for a box on none of the levels.
    """
    pooled = _zeros(features[0], rois, output_size)
    for i, (feature, scale) in enumerate(zip(features, scales, strict=True)):
        is_here = level == i
        here = _align(feature, _only(rois, is_here), scale, output_size, sampling_ratio, aligned)
        # Not a sum: torchvision's CPU kernel gives pixel 0 the weight 0, and 0 * NaN is NaN.
        torch.where(is_here.view(-1, 1, 1, 1), here, pooled, out=pooled)
        del here  # before the next level takes as much again
    return pooled


def _pool_by_rows(
    features: Sequence[Tensor], rois: Tensor, level: Tensor, scales: Sequence[float], *how: Any
) -> Tensor:
    pooled = _zeros(features[0], rois, how[0])
    for i, (feature, scale) in enumerate(zip(features, scales, strict=True)):
        rows = (level == i).nonzero().squeeze(1)
        pooled.index_copy_(0, rows, _align(feature, rois[rows], scale, *how))
    return pooled


def grad_in_fixed_shapes(
    grad: Tensor, rois: Tensor, is_here: Tensor, shape: Sequence[int], *how: Any
) -> Tensor:
    """The body of :func:`roi_align_level_backward` on a GPU.

    Args:
        grad: (R, C, height, width), the gradient of the output.
        rois: (R, 5).
        is_here: (R,) bool, the boxes of this level.
        shape: (B, C, Hi, Wi), the feature's.
        how: the level's scale, sampling_ratio and aligned.

    Returns:
        (B, C, Hi, Wi) of the gradient's type.
    """
    return _align_backward(grad, _only(rois, is_here), shape, *how)


def _grad_by_rows(grad: Tensor, rois: Tensor, is_here: Tensor, *how: Any) -> Tensor:
    rows = is_here.nonzero().squeeze(1)
    return _align_backward(grad[rows], rois[rows], *how)


roi_align_levels = operation(
    "roi_align_levels",
    pool_in_fixed_shapes,
    schema="(Tensor[] features, Tensor rois, Tensor level, float[] scales, SymInt[] output_size, "
    "int sampling_ratio, bool aligned) -> Tensor",
)
roi_align_levels.register_kernel("cpu", _pool_by_rows)

roi_align_level_backward = operation(
    "roi_align_level_backward",
    grad_in_fixed_shapes,
    schema="(Tensor grad, Tensor rois, Tensor is_here, SymInt[] shape, float scale, "
    "int sampling_ratio, bool aligned) -> Tensor",
)
roi_align_level_backward.register_kernel("cpu", _grad_by_rows)


@roi_align_levels.register_fake
def _(features: Sequence[Tensor], rois: Tensor, level: Tensor, scales: Any, *how: Any) -> Tensor:
    return _zeros(features[0], rois, how[0])


@roi_align_level_backward.register_fake
def _(grad: Tensor, rois: Tensor, is_here: Tensor, shape: Sequence[int], *_: Any) -> Tensor:
    return grad.new_empty(shape)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    features, rois, level, ctx.scales, _, *ctx.samples = inputs
    ctx.save_for_backward(rois, level)
    ctx.shapes = [feature.shape for feature in features]


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rois, level = ctx.saved_tensors
    needed = ctx.needs_input_grad[0]
    grads = [
        roi_align_level_backward(grad, rois, level == i, shape, scale, *ctx.samples)
        if needed[i]
        else None
        for i, (shape, scale) in enumerate(zip(ctx.shapes, ctx.scales, strict=True))
    ]
    return grads, *[None] * 6


roi_align_levels.register_autograd(_backward, setup_context=_keep_for_backward)


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


def _only(rois: Tensor, is_here: Tensor) -> Tensor:
    """These boxes; in place of the others an empty one that costs least and reads nothing."""
    moved = _widen(rois).clone()  # float16 does not hold _FAR
    moved[:, 1:].masked_fill_(is_here.logical_not()[:, None], _FAR)
    return moved


def _align(feature: Tensor, rois: Tensor, scale: float, size: Sequence[int], *how: Any) -> Tensor:
    align = torch.ops.torchvision.roi_align
    return align(_widen(feature), _widen(rois), scale, *size, *how).to(feature.dtype)


def _align_backward(
    grad: Tensor, rois: Tensor, shape: Sequence[int], scale: float, *how: Any
) -> Tensor:
    align_backward = torch.ops.torchvision._roi_align_backward
    size = grad.shape[2:]
    return align_backward(_widen(grad), _widen(rois), scale, *size, *shape, *how).to(grad.dtype)


def _widen(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.element_size() < 4 else tensor


def _zeros(feature: Tensor, rois: Tensor, size: Sequence[int]) -> Tensor:
    return feature.new_zeros(rois.shape[0], feature.shape[1], *size)

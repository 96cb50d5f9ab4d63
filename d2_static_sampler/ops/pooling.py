"""ROIAlign over all levels of a feature pyramid at once, in fixed shapes.

Every level pools all boxes, those of the other levels moved outside of the feature map, where
ROIAlign reads nothing: no shape depends on how the boxes spread over the levels. On a CPU, where
nothing waits, each level takes its own rows.

B images, R boxes of all images, L levels, C channels, Hi and Wi the sides of level i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torchvision  # noqa: F401  It registers roi_align.
from torch import Tensor

from .operator import operator

_FAR = -1e30  # outside of a feature map at any scale


def pool_in_fixed_shapes(
    features: Sequence[Tensor],
    rois: Tensor,
    level: Tensor,
    scales: Sequence[float],
    output_size: Sequence[int],
    sampling_ratio: int,
    aligned: bool,
) -> Tensor:
    """The body of :data:`roi_align_levels`.

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
    """The body of :data:`roi_align_level_backward`.

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


roi_align_levels = operator(
    "roi_align_levels",
    pool_in_fixed_shapes,
    "(Tensor[] features, Tensor rois, Tensor level, float[] scales, SymInt[] output_size, "
    "int sampling_ratio, bool aligned) -> Tensor",
)
roi_align_levels.register_kernel("cpu", _pool_by_rows)

roi_align_level_backward = operator(
    "roi_align_level_backward",
    grad_in_fixed_shapes,
    "(Tensor grad, Tensor rois, Tensor is_here, SymInt[] shape, float scale, "
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

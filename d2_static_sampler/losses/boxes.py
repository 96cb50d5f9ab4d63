"""Box regression losses of Detectron2, summed over the slots that are foreground.

... slots of any shape, such as (B, K); a box is (x1, y1, x2, y2), and its last dimension is taken
in two halves: the corner (x1, y1) and the corner (x2, y2).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = tuple[float, float, float, float]

BOX_LOSSES = ("smooth_l1", "giou", "diou", "ciou")
_EPS = 1e-7  # in every denominator of the IoU losses


def box_deltas(src: Tensor, target: Tensor, weights: Weights) -> Tensor:
    """What turns ``src`` into ``target``: ``Box2BoxTransform.get_deltas``, the same bits.

    Args:
        src: (..., 4) floating, such as anchors or proposals.
        target: (..., 4) floating.
        weights: factors of dx, dy, dw and dh.

    Returns:
        (..., 4); inf or NaN where a box is flat or inverted, as with Detectron2.
    """
    src_center, src_size = _center_and_size(src)
    target_center, target_size = _center_and_size(target)
    shift = _scaled(target_center - src_center, weights[:2]) / src_size
    scale = _scaled(torch.log(target_size / src_size), weights[2:])
    return torch.cat((shift, scale), dim=-1)


def apply_box_deltas(deltas: Tensor, boxes: Tensor, weights: Weights, scale_clamp: float) -> Tensor:
    """Move and scale ``boxes``: ``Box2BoxTransform.apply_deltas``, the same bits.

    Args:
        deltas: (..., 4) floating, of one class.
        boxes: (..., 4) floating.
        weights: divisors of dx, dy, dw and dh.
        scale_clamp: the largest dw and dh, after the division.

    Returns:
        (..., 4) float32, whatever the arguments are.
    """
    shift, scale = deltas.float().chunk(2, dim=-1)
    center, size = _center_and_size(boxes.float())
    scale = _divided(scale, weights[2:]).clamp(max=scale_clamp)
    center = _divided(shift, weights[:2]) * size + center
    half = 0.5 * (torch.exp(scale) * size)
    return torch.cat((center - half, center + half), dim=-1)


def box_loss_sum(
    kind: str,
    pred_deltas: Tensor,
    src: Tensor,
    target: Tensor,
    is_fg: Tensor,
    *,
    weights: Weights,
    scale_clamp: float,
    beta: float,
) -> Tensor:
    """The regression loss of the foreground slots, as ``_dense_box_regression_loss`` sums it.

    What stands in the other slots, NaN and inf included, is without effect, and their gradient
    is 0. Where Detectron2 asserts, see :func:`are_valid_sources` and :func:`are_ordered`.

    Args:
        kind: one of ``BOX_LOSSES``.
        pred_deltas: (..., 4) floating.
        src: (..., 4) floating, the boxes that the deltas are relative to.
        target: (..., 4) floating.
        is_fg: (...) bool.
        weights: as in :func:`box_deltas`.
        scale_clamp: as in :func:`apply_box_deltas`; not for smooth_l1.
        beta: where smooth_l1 turns from square to linear; below 1e-5 it is L1.

    Returns:
        () in the type that all three promote to, the IoU losses in that of ``target``; 0,
        connected to the graph, without foreground. A foreground slot with an impossible target
        gives what Detectron2 gives: inf or NaN.

    Raises:
        ValueError: for an unknown ``kind``.
    """
    if kind not in BOX_LOSSES:
        raise ValueError(f"box loss {kind!r} is unknown, choose from {', '.join(BOX_LOSSES)}")
    # Before any division: the gradient of an inf or NaN is NaN, even where it is dropped later.
    is_fg = is_fg[..., None]
    any_box = torch.arange(4, dtype=src.dtype, device=src.device)
    src = torch.where(is_fg, src, any_box)
    target = torch.where(is_fg, target, any_box)
    pred_deltas = torch.where(is_fg, pred_deltas, 0.0)
    if kind == "smooth_l1":  # exactly 0 where all three were replaced
        goal = box_deltas(src, target, weights)
        beta = 0.0 if beta < 1e-5 else beta  # fvcore's rule
        return F.smooth_l1_loss(pred_deltas, goal, reduction="sum", beta=beta)
    pred = apply_box_deltas(pred_deltas, src, weights, scale_clamp).to(target.dtype)
    loss = _giou_loss(pred, target) if kind == "giou" else _distance_loss(kind, pred, target)
    return torch.where(is_fg, loss, 0.0).sum()


def are_valid_sources(src: Tensor, is_fg: Tensor) -> Tensor:
    """What ``get_deltas`` asserts: () bool, whether each foreground source has a width above 0.

    Heights are not looked at, as in Detectron2. Its RPN asserts this of all anchors, its ROI
    heads of the foreground proposals.

    Args:
        src: (..., 4) floating.
        is_fg: (...) bool.
    """
    x1, _, x2, _ = src.unbind(-1)
    return ((x2 - x1 > 0) | ~is_fg).all()


def are_ordered(boxes: Tensor, is_fg: Tensor) -> Tensor:
    """What the IoU losses assert of predictions: () bool, x2 >= x1 and y2 >= y1 in foreground.

    Args:
        boxes: (..., 4) floating, as :func:`apply_box_deltas` gives them; NaN is not ordered.
        is_fg: (...) bool.
    """
    low, high = boxes.chunk(2, dim=-1)
    return ((high >= low) | ~is_fg[..., None]).all()


def _giou_loss(pred: Tensor, target: Tensor) -> Tensor:
    """(..., 1), as fvcore's ``giou_loss``."""
    overlap, union, hull = _overlap_union_hull(pred, target)
    hull_area = _area(hull)
    iou = overlap / (union + _EPS)
    return 1 - (iou - (hull_area - union) / (hull_area + _EPS))


def _distance_loss(kind: str, pred: Tensor, target: Tensor) -> Tensor:
    """(..., 1), as ``diou_loss`` and ``ciou_loss`` of Detectron2 and fvcore."""
    overlap, union, hull = _overlap_union_hull(pred, target)
    iou = overlap / (union + _EPS)
    diagonal = _squared_length(hull) + _EPS
    distance = _squared_length(_corner_sum(pred) / 2 - _corner_sum(target) / 2)
    loss = 1 - iou + distance / diagonal
    if kind == "diou":
        return loss
    shape = (4 / math.pi**2) * (_slope(target) - _slope(pred)) ** 2
    trade_off = (shape / (1 - iou + shape + _EPS)).detach()
    return loss + trade_off * shape


def _overlap_union_hull(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Area of the overlap and of the union, (..., 1), and size of the hull, (..., 2)."""
    a_low, a_high = a.chunk(2, dim=-1)
    b_low, b_high = b.chunk(2, dim=-1)
    size = torch.minimum(a_high, b_high) - torch.maximum(a_low, b_low)
    # Not a clamp: its gradient where edges touch is torch's choice, that of a mask is 0.
    overlap = torch.where((size > 0).all(dim=-1, keepdim=True), _area(size), 0.0)
    union = _area(a_high - a_low) + _area(b_high - b_low) - overlap
    return overlap, union, torch.maximum(a_high, b_high) - torch.minimum(a_low, b_low)


def _area(size: Tensor) -> Tensor:
    width, height = size.chunk(2, dim=-1)
    return width * height


def _slope(boxes: Tensor) -> Tensor:
    low, high = boxes.chunk(2, dim=-1)
    width, height = (high - low).chunk(2, dim=-1)
    return torch.atan(width / height)


def _squared_length(pair: Tensor) -> Tensor:
    return (pair**2).sum(dim=-1, keepdim=True)


def _corner_sum(boxes: Tensor) -> Tensor:
    low, high = boxes.chunk(2, dim=-1)
    return high + low


def _center_and_size(boxes: Tensor) -> tuple[Tensor, Tensor]:
    low, high = boxes.chunk(2, dim=-1)
    size = high - low
    return low + 0.5 * size, size


def _scaled(pair: Tensor, weights: tuple[float, ...]) -> Tensor:
    if weights[0] == weights[1]:  # always so in Detectron2's configs
        return pair * weights[0]
    first, second = pair.chunk(2, dim=-1)
    return torch.cat((first * weights[0], second * weights[1]), dim=-1)


def _divided(pair: Tensor, weights: tuple[float, ...]) -> Tensor:
    if weights[0] == weights[1]:
        return pair / weights[0]
    first, second = pair.chunk(2, dim=-1)
    return torch.cat((first / weights[0], second / weights[1]), dim=-1)

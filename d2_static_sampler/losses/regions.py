"""The ROI heads' labels and box losses over padded slots, with fixed shapes.

B images, N proposals of an image, G slots for its ground truth, K samples, C classes; class C is
the background.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.matching import MatchRule, match_boxes
from ..samplers import LabelSample
from .anchors import BoxLoss, take_boxes
from .boxes import apply_box_deltas, are_ordered, are_valid_sources, box_loss_sum
from .classes import ClassStats, class_loss_mean, class_stats, sigmoid_class_loss

IGNORE = -1


class RegionLabels(NamedTuple):
    """What is known of the proposals before any prediction.

    Attributes:
        matches: (B, N) int64, places in the ground truth.
        classes: (B, N) int64: a class, C = background, -1 = ignored or no proposal.
        is_positive: (B, N) bool, labelled 1, whatever the class.
        is_matched: () bool, False where an overlap is not a number.
    """

    matches: Tensor
    classes: Tensor
    is_positive: Tensor
    is_matched: Tensor


class Regions(NamedTuple):
    """The slots that the heads train on: positives, then negatives, then padding.

    Attributes:
        boxes: (B, K, 4) float.
        matches: (B, K) int64, places in the ground truth.
        classes: (B, K) int64 as in :class:`RegionLabels`; anything where not valid.
        targets: (B, K, 4) float, the box of the match.
        is_valid: (B, K) bool.
        is_fg: (B, K) bool, whether the slot is valid and of a class.
    """

    boxes: Tensor
    matches: Tensor
    classes: Tensor
    targets: Tensor
    is_valid: Tensor
    is_fg: Tensor


class RegionLosses(NamedTuple):
    """Losses of the batch, what is logged of them, and whether Detectron2 would refuse them.

    Attributes:
        classification, box: () float.
        stats: counts.
        are_sources_right: () bool, all foreground boxes are wider than 0, where that is asked.
        are_predictions_right: () bool, no predicted box is inverted, where that is asked.
    """

    classification: Tensor
    box: Tensor
    stats: ClassStats
    are_sources_right: Tensor
    are_predictions_right: Tensor


@dataclass(frozen=True)
class RegionRule:
    """What is constant in the labelling of proposals.

    Attributes:
        rule: from overlap to label.
        num_classes: C.
        ignores: whether a label of -1 takes a box out; the later stages of a cascade train on it
            as on any other that is not background.
    """

    rule: MatchRule
    num_classes: int
    ignores: bool = True


@dataclass(frozen=True)
class OutputLoss:
    """What is constant in the losses of Fast R-CNN's output layers.

    Attributes:
        num_classes: C.
        box: the regression loss.
        num_fg_slots: how many first slots of an image may be foreground.
        is_sigmoid: whether each class has a binary loss of its own.
    """

    num_classes: int
    box: BoxLoss
    num_fg_slots: int
    is_sigmoid: bool


@torch.no_grad()
def label_regions(
    rule: RegionRule,
    truth: Tensor,
    num_truth: Tensor,
    truth_classes: Tensor,
    boxes: Tensor,
    is_box: Tensor,
) -> RegionLabels:
    """Match the proposals of every image with its ground truth.

    Args:
        rule: what is constant.
        truth: (B, G, 4) float, then see :func:`.match_boxes`.
        num_truth: (B,) int64.
        truth_classes: (B, G) int64.
        boxes: (B, N, 4) float.
        is_box: (B, N) bool, False in padding.
    """
    matches, label, is_matched = match_boxes(truth, num_truth, boxes, rule.rule)
    is_background = (label == 0) | (num_truth == 0)[:, None]
    classes = truth_classes.gather(1, matches)
    if rule.ignores:
        classes = classes.masked_fill_(label == IGNORE, IGNORE)
    classes = classes.masked_fill_(is_background, rule.num_classes).masked_fill_(~is_box, IGNORE)
    return RegionLabels(matches, classes, label == 1, is_matched)


@torch.no_grad()
def take_regions(
    sample: LabelSample, labels: RegionLabels, boxes: Tensor, truth: Tensor, num_classes: int
) -> Regions:
    """The slots of a sample of the (B, N) classes."""
    index, is_valid = sample.index, sample.is_valid
    matches, classes = labels.matches.gather(1, index), labels.classes.gather(1, index)
    taken = take_boxes(boxes, index)
    # Refused when the check is read, and until then no box that pooling would never finish.
    taken = taken.masked_fill(taken.isinf(), 0)
    return regions_of(taken, matches, classes, truth, is_valid, num_classes)


def regions_of(
    boxes: Tensor,
    matches: Tensor,
    classes: Tensor,
    truth: Tensor,
    is_valid: Tensor,
    num_classes: int,
) -> Regions:
    """:class:`Regions` of (B, K) slots with these boxes, matches and classes."""
    is_fg = is_valid & (classes >= 0) & (classes < num_classes)
    return Regions(boxes, matches, classes, take_boxes(truth, matches), is_valid, is_fg)


def first_slots(regions: Regions, num_slots: int) -> Regions:
    """The first slots of every image."""
    if num_slots == regions.boxes.shape[1]:
        return regions
    return Regions(*(part[:, :num_slots] for part in regions))


@dataclass(frozen=True)
class RegionStep:
    """What is constant from one training step of ROI heads to the next.

    Attributes:
        rule: of the labelling.
        draw: (labels, words) to sample.
    """

    rule: RegionRule
    draw: Callable[[Tensor, Tensor], LabelSample]


def region_step(
    step: RegionStep,
    truth: Tensor,
    num_truth: Tensor,
    truth_classes: Tensor,
    boxes: Tensor,
    is_box: Tensor,
    words: Tensor,
) -> tuple[Regions, tuple[Tensor, Tensor, Tensor], Tensor]:
    """Labels and sample at once: slots; index and counts of the sample; were overlaps numbers?"""
    labels = label_regions(step.rule, truth, num_truth, truth_classes, boxes, is_box)
    with torch.no_grad():
        sample = step.draw(labels.classes, words)
    regions = take_regions(sample, labels, boxes, truth, step.rule.num_classes)
    return regions, (sample.index, sample.num_pos, sample.num_neg), labels.is_matched


def region_losses(
    loss: OutputLoss,
    scores: Tensor,
    deltas: Tensor,
    boxes: Tensor,
    targets: Tensor,
    classes: Tensor,
    is_valid: Tensor,
    is_fg: Tensor,
) -> RegionLosses:
    """The losses of Fast R-CNN's output layers.

    Args:
        loss: what is constant.
        scores: (B * K, C + 1) floating.
        deltas: (B * K, 4 * C) floating, or (B * K, 4) for all classes.
        boxes, targets, classes, is_valid, is_fg: of :class:`Regions`.
    """
    flat_classes, flat_valid = classes.flatten(), is_valid.flatten()
    class_loss = sigmoid_class_loss if loss.is_sigmoid else class_loss_mean
    slots = slice(loss.num_fg_slots)
    is_fg, sources = is_fg[:, slots], boxes[:, slots]
    deltas = _of_class(deltas.view(*boxes.shape[:2], -1, 4)[:, slots], classes[:, slots], is_fg)
    right = torch.ones((), dtype=torch.bool, device=scores.device)
    if loss.box.kind == "smooth_l1":
        checks = are_valid_sources(sources, is_fg), right
    else:
        weights, clamp = loss.box.weights, loss.box.scale_clamp
        predicted = apply_box_deltas(deltas.detach(), sources, weights, clamp)
        checks = right, are_ordered(predicted, is_fg)
    total = box_loss_sum(
        loss.box.kind,
        deltas,
        sources,
        targets[:, slots],
        is_fg,
        weights=loss.box.weights,
        scale_clamp=loss.box.scale_clamp,
        beta=loss.box.beta,
    )
    return RegionLosses(
        class_loss(scores, flat_classes, flat_valid),
        total / flat_valid.sum().clamp(min=1),
        class_stats(scores, flat_classes, flat_valid),
        *checks,
    )


def _of_class(deltas: Tensor, classes: Tensor, is_fg: Tensor) -> Tensor:
    """(B, Q, 4) of (B, Q, C or 1, 4) deltas."""
    if deltas.shape[2] == 1:
        return deltas[:, :, 0]
    index = torch.where(is_fg, classes, 0)[..., None, None].expand(-1, -1, 1, 4)
    return deltas.gather(2, index)[:, :, 0]

"""The RPN's labels and losses over the anchors that were picked, with fixed shapes.

B images, N anchors of all levels, G slots for the ground truth of an image, K samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.matching import MatchRule, match_boxes
from ..samplers import LabelSample
from .boxes import apply_box_deltas, are_ordered, box_loss_sum
from .classes import objectness_loss_sum

IGNORE = -1


@dataclass(frozen=True)
class BoxLoss:
    """A regression loss: its kind, as in :mod:`.boxes`, and its constants."""

    kind: str
    weights: tuple[float, float, float, float]
    scale_clamp: float
    beta: float


class AnchorLabels(NamedTuple):
    """What is known of the anchors before any prediction.

    Attributes:
        matches: (B, N) int64, places in the ground truth.
        labels: (B, N) int8; 1, 0 or -1.
        is_matched: () bool, False where an overlap is not a number.
    """

    matches: Tensor
    labels: Tensor
    is_matched: Tensor


class AnchorLosses(NamedTuple):
    """Sums over the batch, and whether Detectron2 would have refused them.

    Attributes:
        objectness, box: () float, the losses.
        num_pos, num_neg: () int64, anchors that were picked.
        are_anchors_right: () bool, all are wider than 0.
        are_predictions_right: () bool, no predicted box is inverted, where the loss asks for it.
    """

    objectness: Tensor
    box: Tensor
    num_pos: Tensor
    num_neg: Tensor
    are_anchors_right: Tensor
    are_predictions_right: Tensor


@torch.no_grad()
def label_anchors(
    truth: Tensor,
    num_truth: Tensor,
    anchors: Tensor,
    limits: Tensor,
    rule: MatchRule,
    border: float = -1,
) -> AnchorLabels:
    """Match the anchors of every image with its ground truth.

    Args:
        truth: (B, G, 4) float, then see :func:`.match_boxes`.
        num_truth: (B,) int64.
        anchors: (N, 4) float.
        limits: (B, 4) float, width, height, width, height of each image.
        rule: from overlap to label.
        border: at least 0: anchors that leave the image by more are ignored.
    """
    matches, labels, is_matched = match_boxes(truth, num_truth, anchors, rule)
    if border >= 0:
        inside = (anchors[:, :2] >= -border) & (anchors[:, 2:] < limits[:, None, :2] + border)
        labels = labels.masked_fill(~inside.all(dim=-1), IGNORE)
    return AnchorLabels(matches, labels, is_matched)


def anchor_losses(
    sample: LabelSample,
    matches: Tensor,
    truth: Tensor,
    anchors: Tensor,
    logits: Tensor,
    deltas: Tensor,
    num_positives: int,
    loss: BoxLoss,
) -> AnchorLosses:
    """The losses of the picked anchors.

    Args:
        sample: of the (B, N) labels.
        matches: (B, N) int64, places in the ground truth.
        truth: (B, G, 4) float.
        anchors: (N, 4) float.
        logits: (B, N) floating.
        deltas: (B, N, 4) floating.
        num_positives: the most positives of an image.
        loss: of the boxes.
    """
    index, is_pos = sample.index, sample.is_pos
    # The positives come first.
    first, is_fg = index[:, :num_positives], is_pos[:, :num_positives]
    sources = anchors[first]
    targets = take_boxes(truth, matches.gather(1, first))
    predictions = take_boxes(deltas, first)
    right = torch.ones((), dtype=torch.bool, device=logits.device)
    if loss.kind == "smooth_l1":
        anchors_right, predictions_right = (anchors[:, 2] > anchors[:, 0]).all(), right
    else:
        boxes = apply_box_deltas(predictions.detach(), sources, loss.weights, loss.scale_clamp)
        anchors_right, predictions_right = right, are_ordered(boxes, is_fg)
    return AnchorLosses(
        objectness_loss_sum(logits.gather(1, index), is_pos, sample.is_valid),
        box_loss_sum(
            loss.kind,
            predictions,
            sources,
            targets,
            is_fg,
            weights=loss.weights,
            scale_clamp=loss.scale_clamp,
            beta=loss.beta,
        ),
        sample.num_pos.sum(),
        sample.num_neg.sum(),
        anchors_right,
        predictions_right,
    )


def take_boxes(boxes: Tensor, index: Tensor) -> Tensor:
    """(B, K, 4) of (B, N, 4) boxes, by (B, K) int64 places."""
    return boxes.gather(1, index[..., None].expand(-1, -1, boxes.shape[-1]))


@dataclass(frozen=True)
class AnchorStep:
    """What is constant from one training step of an RPN to the next.

    Attributes:
        rule: from overlap to label.
        border: as in :func:`label_anchors`.
        num_positives: the most positives of an image.
        loss: of the boxes.
        draw: (labels, words) to sample.
    """

    rule: MatchRule
    border: float
    num_positives: int
    loss: BoxLoss
    draw: Callable[[Tensor, Tensor], LabelSample]


def anchor_step(
    step: AnchorStep,
    truth: Tensor,
    num_truth: Tensor,
    anchors: Tensor,
    limits: Tensor,
    logits: Tensor,
    deltas: Tensor,
    words: Tensor,
) -> tuple[AnchorLosses, Tensor]:
    """All at once: the losses, and whether the overlaps were numbers."""
    labels = label_anchors(truth, num_truth, anchors, limits, step.rule, step.border)
    with torch.no_grad():
        sample = step.draw(labels.labels, words)
    losses = anchor_losses(
        sample, labels.matches, truth, anchors, logits, deltas, step.num_positives, step.loss
    )
    return losses, labels.is_matched

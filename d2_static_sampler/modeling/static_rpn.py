"""The RPN's part of a training step without host-device synchronisation.

B images, N anchors of all levels, K samples, P candidates and T proposals of an image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from detectron2.layers import cat
from detectron2.structures import Boxes, Instances
from torch import Tensor

from ..samplers import LabelSample
from ..samplers.request import SampleRequest
from ..static_step.anchors import (
    AnchorLabels,
    AnchorLosses,
    AnchorStep,
    BoxLoss,
    anchor_losses,
    anchor_step,
    label_anchors,
)
from ..static_step.deferred import deferred_metrics
from ..static_step.graphs import Graphs
from ..static_step.matching import MatchRule
from ..static_step.proposals import are_larger, clip_boxes, nms_topk, top_candidates
from ..static_step.transfers import to_device
from ..static_step.truth import batch_boxes
from .padded import PaddedProposals
from .rpn import BACKGROUND, BatchAnchorSampler

DIVERGED = "Predicted boxes or scores contain Inf/NaN. Training has diverged."
NOT_A_NUMBER = "The overlap of a box with the ground truth is not a number"
INVERTED_BOX = "bad box: x1 larger than x2"
INVALID_SOURCES = "Input boxes to Box2BoxTransform are not valid!"


@dataclass
class Anchors:
    """The anchors of a batch between :meth:`StaticRPN.label_and_sample_anchors` and its losses.

    Attributes:
        truth: (B, G, 4), the ground truth.
        count: (B,), how much of it counts.
        boxes: (N, 4).
        limits: (B, 4), of the images.
        labels, sample: None where they are found in one graph with the losses.
    """

    truth: Tensor
    count: Tensor
    boxes: Tensor
    limits: Tensor
    labels: AnchorLabels | None = None
    sample: LabelSample | None = None


class StaticRPN(BatchAnchorSampler):
    """Labels, losses and proposals with fixed shapes; inference stays Detectron2's."""

    _graphs: Graphs | None

    @torch.no_grad()
    def label_and_sample_anchors(
        self, anchors: list[Boxes], gt_instances: list[Instances]
    ) -> tuple[Any, Any]:
        """The batch for :meth:`losses`, labelled and sampled unless that is one graph with them."""
        truth, count = batch_boxes([image.gt_boxes.tensor for image in gt_instances])
        limits = image_limits([image.image_size for image in gt_instances], truth.device)
        batch = Anchors(truth, count, Boxes.cat(anchors).tensor, limits)
        if self._graphs is None:
            rule, border = match_rule(self.anchor_matcher), self.anchor_boundary_thresh
            batch.labels = label_anchors(truth, count, batch.boxes, limits, rule, border)
            batch.sample = self._picked(batch.labels.labels)
        return batch, None

    def losses(
        self,
        anchors: list[Boxes],
        pred_objectness_logits: list[Tensor],
        gt_labels: Any,
        pred_anchor_deltas: list[Tensor],
        gt_boxes: Any,
    ) -> dict[str, Tensor]:
        """Detectron2's losses of the picked anchors; ``gt_labels`` is the batch of them."""
        logits, deltas = cat(pred_objectness_logits, dim=1), cat(pred_anchor_deltas, dim=1)
        sums, is_matched = self._sums(gt_labels, logits, deltas)
        _report(sums, is_matched, len(logits))
        normalizer = self.batch_size_per_image * len(logits)
        losses = {"loss_rpn_cls": sums.objectness, "loss_rpn_loc": sums.box}
        weights = self.loss_weight
        return {k: v / normalizer * weights.get(k, 1.0) for k, v in losses.items()}

    def _sums(self, batch: Anchors, logits: Tensor, deltas: Tensor) -> tuple[AnchorLosses, Tensor]:
        if self._graphs is not None:
            return self.label_sample_and_lose(batch, logits, deltas)
        assert batch.labels is not None
        assert batch.sample is not None
        sums = anchor_losses(
            batch.sample,
            batch.labels.matches,
            batch.truth,
            batch.boxes,
            logits,
            deltas,
            quota(self),
            box_loss(self),
        )
        return sums, batch.labels.is_matched

    def label_sample_and_lose(
        self, batch: Anchors, logits: Tensor, deltas: Tensor
    ) -> tuple[AnchorLosses, Tensor]:
        """Labels, sample and losses in one graph."""
        assert self._graphs is not None
        request = SampleRequest(self.batch_size_per_image, quota(self), BACKGROUND)
        take, words = self._label_sampler.taker(logits.shape, request, logits.device)
        step = AnchorStep(
            match_rule(self.anchor_matcher),
            self.anchor_boundary_thresh,
            quota(self),
            box_loss(self),
            take,
        )
        tensors = batch.truth, batch.count, batch.boxes, batch.limits
        return self._graphs(step, *tensors, logits.float(), deltas.float(), words)

    def predict_proposals(
        self,
        anchors: list[Boxes],
        pred_objectness_logits: list[Tensor],
        pred_anchor_deltas: list[Tensor],
        image_sizes: list[tuple[int, int]],
    ) -> Any:
        """As Detectron2's method; in training the proposals stay padded."""
        if not self.training:
            return super().predict_proposals(
                anchors, pred_objectness_logits, pred_anchor_deltas, image_sizes
            )
        with torch.no_grad():
            return self._propose(anchors, pred_objectness_logits, pred_anchor_deltas, image_sizes)

    def _propose(
        self,
        anchors: list[Boxes],
        scores: list[Tensor],
        deltas: list[Tensor],
        image_sizes: list[tuple[int, int]],
    ) -> PaddedProposals:
        index, levels = top_candidates(scores, self.pre_nms_topk[True])
        # Decoded are the candidates alone, not all anchors.
        boxes = self.box2box_transform.apply_deltas(
            _take_rows(cat(deltas, dim=1), index).flatten(0, 1),
            Boxes.cat(anchors).tensor[index].flatten(0, 1),
        ).view(*index.shape, 4)
        logits = cat(scores, dim=1).gather(1, index)
        is_finite = boxes.isfinite().all(dim=-1) & logits.isfinite()
        deferred_metrics().check(is_finite.all(), FloatingPointError, DIVERGED)
        # The step goes on until the check is read: with boxes that pooling can stand.
        boxes = clip_boxes(boxes.nan_to_num(), image_limits(image_sizes, boxes.device))
        is_valid = is_finite & are_larger(boxes, self.min_box_size)
        kept, count = nms_topk(
            boxes, logits, levels, is_valid, self.nms_thresh, self.post_nms_topk[True]
        )
        return PaddedProposals(_take_rows(boxes, kept), logits.gather(1, kept), count, image_sizes)


def anchor_graphs() -> Graphs:
    """What ``_graphs`` of a compiled static step is."""
    # B of every tensor but the anchors, N, and G of the ground truth.
    dynamic = ((0, 1), (0,), (0,), (0,), (0, 1), (0, 1), (0, 1))
    return Graphs(anchor_step, dynamic)


def image_limits(image_sizes: list[tuple[int, int]], device: torch.device) -> Tensor:
    """(B, 4) float32: width, height, width, height."""
    return to_device(
        torch.tensor([(w, h, w, h) for h, w in image_sizes], dtype=torch.float32), device
    )


def match_rule(matcher: Any) -> MatchRule:
    """What a Detectron2 ``Matcher`` does."""
    # Its first and last thresholds are infinite.
    thresholds = tuple(matcher.thresholds[1:-1])
    return MatchRule(thresholds, tuple(matcher.labels), matcher.allow_low_quality_matches)


def quota(head: Any) -> int:
    """The most positives of an image, as Detectron2's ``subsample_labels`` counts them."""
    return int(head.batch_size_per_image * head.positive_fraction)


def box_loss(head: Any) -> BoxLoss:
    """The regression loss of an RPN or of Fast R-CNN's output layers."""
    transform = head.box2box_transform
    return BoxLoss(
        head.box_reg_loss_type,
        tuple(transform.weights),
        transform.scale_clamp,
        head.smooth_l1_beta,
    )


def _report(sums: AnchorLosses, is_matched: Tensor, num_images: int) -> None:
    metrics = deferred_metrics()
    metrics.check(is_matched, AssertionError, NOT_A_NUMBER)
    metrics.put("rpn/num_pos_anchors", sums.num_pos, num_images)
    metrics.put("rpn/num_neg_anchors", sums.num_neg, num_images)
    metrics.check(sums.are_anchors_right, AssertionError, INVALID_SOURCES)
    metrics.check(sums.are_predictions_right, AssertionError, INVERTED_BOX)


def _take_rows(rows: Tensor, index: Tensor) -> Tensor:
    return rows.gather(1, index[..., None].expand(-1, -1, rows.shape[-1]))

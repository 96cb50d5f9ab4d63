"""The RPN's part of a training step without host-device synchronisation.

B images, N anchors of all levels, K samples, P candidates and T proposals of an image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from detectron2.structures import Boxes, ImageList, Instances
from torch import Tensor

from ..compile import CompiledFunction
from ..losses.anchors import (
    AnchorLabels,
    AnchorLosses,
    AnchorStep,
    BoxLoss,
    anchor_losses,
    anchor_step,
    label_anchors,
)
from ..ops import nms_topk
from ..ops.matching import MatchRule
from ..ops.sampling import SampleRequest
from ..samplers import LabelSample
from .deferred import deferred_metrics
from .padded import PaddedProposals
from .proposals import are_larger, clip_boxes, top_candidates
from .rpn import BACKGROUND, BatchAnchorSampler
from .static_part import part_of, takes_step
from .transfers import to_device
from .truth import batch_boxes

DIVERGED = "Predicted boxes or scores contain Inf/NaN. Training has diverged."
NOT_A_NUMBER = "The overlap of a box with the ground truth is not a number"
INVERTED_BOX = "bad box: x1 larger than x2"
INVALID_SOURCES = "Input boxes to Box2BoxTransform are not valid!"


@dataclass(frozen=True)
class AnchorBatch:
    """The anchors of a batch and what they are matched with.

    Attributes:
        truth: (B, G, 4), the ground truth.
        count: (B,), how much of it counts.
        boxes: (N, 4).
        limits: (B, 4), of the images.
    """

    truth: Tensor
    count: Tensor
    boxes: Tensor
    limits: Tensor


@dataclass(frozen=True)
class AnchorPredictions:
    """What the RPN's head says of the anchors.

    Attributes:
        boxes: (N, 4), the anchors.
        scores: (B, Nl) floating, for each level.
        logits: (B, N), those of all levels.
        deltas: (B, N, 4).
    """

    boxes: Tensor
    scores: list[Tensor]
    logits: Tensor
    deltas: Tensor


class StaticRPN(BatchAnchorSampler):
    """Labels, losses and proposals with fixed shapes; inference stays Detectron2's.

    The methods that others may call, to label anchors say, stay Detectron2's too.
    """

    def forward(
        self,
        images: ImageList,
        features: dict[str, Tensor],
        gt_instances: list[Instances] | None = None,
    ) -> Any:
        """As in Detectron2: for the proposals the host waits once."""
        if not self.training or gt_instances is None or not takes_step(self, gt_instances):
            return super().forward(images, features, gt_instances)
        proposals, losses = self.static_step(images, features, gt_instances)
        return proposals.to_instances(), losses

    def static_step(
        self, images: ImageList, features: dict[str, Tensor], gt_instances: list[Instances]
    ) -> tuple[PaddedProposals, dict[str, Tensor]]:
        """What :meth:`forward` does in training, with proposals that keep their padding."""
        predictions = self._predict([features[f] for f in self.in_features])
        losses = self.static_losses(predictions, gt_instances)
        with torch.no_grad():
            return self.propose(predictions, images.image_sizes), losses

    def _predict(self, levels: list[Tensor]) -> AnchorPredictions:
        boxes = Boxes.cat(self.anchor_generator(levels)).tensor
        logits, deltas = self.rpn_head(levels)
        # The anchors of a cell stand side by side, as the generator has them.
        scores = [level.permute(0, 2, 3, 1).flatten(1) for level in logits]
        shifts = [level.permute(0, 2, 3, 1).reshape(len(level), -1, 4) for level in deltas]
        return AnchorPredictions(boxes, scores, torch.cat(scores, 1), torch.cat(shifts, 1))

    def static_losses(
        self, predictions: AnchorPredictions, gt_instances: list[Instances]
    ) -> dict[str, Tensor]:
        """Detectron2's losses of the anchors that are picked, after labelling them."""
        truth, count = batch_boxes([image.gt_boxes.tensor for image in gt_instances])
        limits = image_limits([image.image_size for image in gt_instances], truth.device)
        batch = AnchorBatch(truth, count, predictions.boxes, limits)
        logits, deltas = predictions.logits, predictions.deltas
        if part_of(self).graphs is not None:
            sums, is_matched = self.label_sample_and_lose(batch, logits, deltas)
        else:
            labels, sample = self.label_and_sample_batch(batch)
            is_matched = labels.is_matched
            matched = labels.matches, batch.truth, batch.boxes
            sums = anchor_losses(sample, *matched, logits, deltas, quota(self), box_loss(self))
        _report(sums, is_matched, len(logits))
        normalizer = self.batch_size_per_image * len(logits)
        losses = {"loss_rpn_cls": sums.objectness, "loss_rpn_loc": sums.box}
        weights = self.loss_weight
        return {k: v / normalizer * weights.get(k, 1.0) for k, v in losses.items()}

    @torch.no_grad()
    def label_and_sample_batch(self, batch: AnchorBatch) -> tuple[AnchorLabels, LabelSample]:
        """The anchors of all images, labelled and sampled."""
        rule, border = match_rule(self.anchor_matcher), self.anchor_boundary_thresh
        labels = label_anchors(batch.truth, batch.count, batch.boxes, batch.limits, rule, border)
        return labels, self._picked(labels.labels)

    def label_sample_and_lose(
        self, batch: AnchorBatch, logits: Tensor, deltas: Tensor
    ) -> tuple[AnchorLosses, Tensor]:
        """Labels, sample and losses in one graph."""
        request = SampleRequest(self.batch_size_per_image, quota(self), BACKGROUND)
        draw, words = self._label_sampler.drawing(logits, request)
        step = AnchorStep(
            match_rule(self.anchor_matcher),
            self.anchor_boundary_thresh,
            quota(self),
            box_loss(self),
            draw,
        )
        tensors = batch.truth, batch.count, batch.boxes, batch.limits
        sums: tuple[AnchorLosses, Tensor] = part_of(self).graphs(
            step, *tensors, logits.float(), deltas.float(), words
        )
        return sums

    def propose(
        self, predictions: AnchorPredictions, image_sizes: list[tuple[int, int]]
    ) -> PaddedProposals:
        """The best boxes of every image."""
        index, levels = top_candidates(predictions.scores, self.pre_nms_topk[True])
        # Decoded are the candidates alone, not all anchors.
        boxes = self.box2box_transform.apply_deltas(
            _take_rows(predictions.deltas, index).flatten(0, 1),
            predictions.boxes[index].flatten(0, 1),
        ).view(*index.shape, 4)
        logits = predictions.logits.gather(1, index)
        is_finite = boxes.isfinite().all(dim=-1) & logits.isfinite()
        deferred_metrics().check(is_finite.all(), FloatingPointError, DIVERGED)
        # The step goes on until the check is read: with boxes that pooling can stand.
        boxes = clip_boxes(boxes.nan_to_num(), image_limits(image_sizes, boxes.device))
        is_valid = is_finite & are_larger(boxes, self.min_box_size)
        kept, count = nms_topk(
            boxes, logits, levels, is_valid, self.nms_thresh, self.post_nms_topk[True]
        )
        return PaddedProposals(_take_rows(boxes, kept), logits.gather(1, kept), count, image_sizes)


def anchor_graphs() -> CompiledFunction:
    """What is compiled of an RPN."""
    return CompiledFunction(anchor_step, name="The static step of the RPN")


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

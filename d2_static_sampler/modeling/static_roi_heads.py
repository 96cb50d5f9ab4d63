"""The ROI heads' part of a training step without host-device synchronisation.

B images, K samples of an image, Q of them at most foreground.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from detectron2.modeling.proposal_generator.proposal_utils import add_ground_truth_to_proposals
from detectron2.modeling.roi_heads import select_foreground_proposals
from detectron2.structures import Instances
from detectron2.utils.events import get_event_storage
from torch import Tensor

from ..compile import CompiledFunction
from ..losses.regions import (
    OutputLoss,
    RegionRule,
    Regions,
    RegionStep,
    first_slots,
    label_regions,
    region_losses,
    region_step,
    take_regions,
)
from ..ops.sampling import SampleRequest
from .coverage import first_fault_of_head
from .deferred import deferred_metrics
from .padded import PaddedProposals
from .padded_regions import Candidates, PaddedRegions, RegionSource, gather_candidates
from .pooling import pool_rois
from .roi_heads import BatchProposalSampler
from .slots import most
from .static_masks import keypoint_losses, mask_losses
from .static_part import part_of, takes_step
from .static_rpn import INVALID_SOURCES, INVERTED_BOX, NOT_A_NUMBER, box_loss, match_rule, quota
from .truth import Truth, batch_truth

if TYPE_CHECKING:
    from detectron2.modeling.roi_heads import Res5ROIHeads, StandardROIHeads
else:
    Res5ROIHeads = StandardROIHeads = object


class RegionGraphs:
    """The compiled parts of ROI heads: label and sample; the losses of the boxes."""

    def __init__(self) -> None:
        self.label_and_sample = CompiledFunction(region_step, name="The labels of the ROI heads")
        self.losses = CompiledFunction(region_losses, name="The losses of the ROI heads")


class StaticHeads(BatchProposalSampler):
    """What the static steps of all ROI heads have in common; inference stays Detectron2's.

    The methods that others may call, to label proposals say, stay Detectron2's too.
    """

    def forward(
        self,
        images: Any,
        features: dict[str, Tensor],
        proposals: Any,
        targets: list[Instances] | None = None,
    ) -> tuple[Any, dict[str, Tensor]]:
        """As in Detectron2: for the sampled proposals that it returns the host waits once."""
        if not self.training or not targets or not takes_step(self, targets, proposals):
            return super().forward(images, features, proposals, targets)
        regions, losses = self.static_step(features, proposals, targets)
        return self._handed_out(regions), losses

    def static_step(
        self, features: dict[str, Tensor], proposals: Any, targets: list[Instances]
    ) -> tuple[PaddedRegions, dict[str, Tensor]]:
        """What :meth:`forward` does in training.

        Args:
            features: as in Detectron2.
            proposals: PaddedProposals, or B Instances.
            targets: B Instances.
        """
        regions = self.label_and_sample_regions(proposals, targets)
        return regions, self._losses_of(features, regions)

    def _losses_of(self, features: dict[str, Tensor], regions: PaddedRegions) -> dict[str, Tensor]:
        raise NotImplementedError

    def _handed_out(self, regions: PaddedRegions) -> list[Instances]:
        return regions.instances

    @torch.no_grad()
    def label_and_sample_regions(self, proposals: Any, targets: list[Instances]) -> PaddedRegions:
        """The regions to train on; logged counts as in Detectron2's method."""
        if not isinstance(proposals, PaddedProposals) and self.proposal_append_gt:
            add_ground_truth_to_proposals(targets, proposals)  # refuses what does not fit
        truth = batch_truth(
            [image.gt_boxes.tensor for image in targets], [image.gt_classes for image in targets]
        )
        candidates = gather_candidates(proposals, truth if self.proposal_append_gt else None)
        regions, (index, num_pos, num_neg), is_matched = self._label_and_sample(truth, candidates)
        metrics = deferred_metrics()
        metrics.check(is_matched, AssertionError, NOT_A_NUMBER)
        metrics.put("roi_head/num_fg_samples", num_pos.sum(), len(targets))
        metrics.put("roi_head/num_bg_samples", num_neg.sum(), len(targets))
        count = num_pos + num_neg
        if part_of(self).graphs is None:  # a graph keeps its shapes
            regions = first_slots(regions, most(count, self.batch_size_per_image))
        source = RegionSource(self, proposals, index, count)
        return PaddedRegions(regions, most(num_pos, quota(self)), truth, targets, source)

    def _label_and_sample(
        self, truth: Truth, candidates: Candidates
    ) -> tuple[Regions, tuple[Tensor, Tensor, Tensor], Tensor]:
        rule = RegionRule(match_rule(self.proposal_matcher), self.num_classes)
        boxes, is_box = candidates
        tensors = truth.boxes, truth.count, truth.classes, boxes, is_box
        if (graphs := part_of(self).graphs) is not None:
            request = SampleRequest(self.batch_size_per_image, quota(self), self.num_classes)
            draw, words = self._label_sampler.drawing(is_box, request)
            result: tuple[Regions, tuple[Tensor, Tensor, Tensor], Tensor]
            result = graphs.label_and_sample(RegionStep(rule, draw), *tensors, words)
            return result
        labels = label_regions(rule, *tensors)
        sample = self._sampled(labels.classes)
        regions = take_regions(sample, labels, boxes, truth.boxes, self.num_classes)
        return regions, (sample.index, sample.num_pos, sample.num_neg), labels.is_matched

    def output_losses(
        self, predictor: Any, predictions: tuple[Tensor, Tensor], regions: Regions, slots: int
    ) -> dict[str, Tensor]:
        """The losses of Fast R-CNN's output layers, of which ``slots`` may be foreground."""
        loss = OutputLoss(
            predictor.num_classes,
            box_loss(predictor),
            slots,
            getattr(predictor, "use_sigmoid_ce", False),
        )
        boxes, _, classes, targets, is_valid, is_fg = regions
        losses, scores, deltas = region_losses, *predictions
        if (graphs := part_of(self).graphs) is not None:
            losses, scores, deltas = graphs.losses, scores.float(), deltas.float()
        result = losses(loss, scores, deltas, boxes, targets, classes, is_valid, is_fg)
        _report(result)
        named = {"loss_cls": result.classification, "loss_box_reg": result.box}
        return {k: v * predictor.loss_weight.get(k, 1.0) for k, v in named.items()}

    def _is_static(self, what: str) -> bool:
        """Whether the "mask" or "keypoint" head is static in this step; says once why not."""
        fault = first_fault_of_head(self, what)
        if fault is not None:
            part_of(self).leave_out(f"its {what} head {fault}")
        elif what == "mask" and shows_masks(self.mask_head):
            return False
        return fault is None


class StaticROIHeads(StaticHeads, StandardROIHeads):
    """Detectron2's ``StandardROIHeads`` over padded slots."""

    def _losses_of(self, features: dict[str, Tensor], regions: PaddedRegions) -> dict[str, Tensor]:
        losses = self._box_losses(features, regions)
        if self.mask_on:
            losses.update(self._mask_losses(features, regions))
        if self.keypoint_on:
            losses.update(self._keypoint_losses(features, regions))
        return losses

    def _box_losses(self, features: dict[str, Tensor], regions: PaddedRegions) -> dict[str, Tensor]:
        levels = [features[f] for f in self.box_in_features]
        pooled = pool_rois(self.box_pooler, levels, regions.regions.boxes)
        predictions = self.box_predictor(self.box_head(pooled))
        return self.output_losses(self.box_predictor, predictions, regions.regions, quota(self))

    def _mask_losses(
        self, features: dict[str, Tensor], regions: PaddedRegions
    ) -> dict[str, Tensor]:
        if not self._is_static("mask"):
            losses: dict[str, Tensor] = self._forward_mask(features, regions.instances)
            return losses
        levels = [features[f] for f in self.mask_in_features]
        pooled = pool_rois(self.mask_pooler, levels, regions.fg.boxes)
        return mask_losses(self.mask_head, pooled, regions)

    def _keypoint_losses(
        self, features: dict[str, Tensor], regions: PaddedRegions
    ) -> dict[str, Tensor]:
        if not self._is_static("keypoint"):
            losses: dict[str, Tensor] = self._forward_keypoint(features, regions.instances)
            return losses
        levels = [features[f] for f in self.keypoint_in_features]
        pooled = pool_rois(self.keypoint_pooler, levels, regions.fg.boxes)
        return keypoint_losses(self.keypoint_head, pooled, regions)


class StaticRes5ROIHeads(StaticHeads, Res5ROIHeads):
    """Detectron2's ``Res5ROIHeads`` over padded slots."""

    def _losses_of(self, features: dict[str, Tensor], regions: PaddedRegions) -> dict[str, Tensor]:
        levels = [features[f] for f in self.in_features]
        pooled = self.res5(pool_rois(self.pooler, levels, regions.regions.boxes))
        predictions = self.box_predictor(pooled.mean(dim=[2, 3]))
        losses = self.output_losses(self.box_predictor, predictions, regions.regions, quota(self))
        if not self.mask_on:
            return losses
        by_image = pooled.unflatten(0, regions.regions.is_valid.shape)
        if not self._is_static("mask"):
            return losses | self._masks_as_ever(by_image, regions)
        first = by_image[:, : regions.num_fg_slots].flatten(0, 1)
        return losses | mask_losses(self.mask_head, first, regions)

    def _masks_as_ever(self, pooled: Tensor, regions: PaddedRegions) -> dict[str, Tensor]:
        fg, is_fg = select_foreground_proposals(regions.instances, self.num_classes)
        rows = [image[: len(mask)][mask] for image, mask in zip(pooled, is_fg, strict=True)]
        losses: dict[str, Tensor] = self.mask_head(torch.cat(rows), fg)
        return losses

    def _handed_out(self, regions: PaddedRegions) -> list[Instances]:
        return []  # as Detectron2's


def shows_masks(mask_head: Any) -> bool:
    """Whether this iteration writes pictures of masks: Detectron2's step does that."""
    period = mask_head.vis_period
    return bool(period > 0 and get_event_storage().iter % period == 0)


def _report(result: Any) -> None:
    metrics, stats = deferred_metrics(), result.stats
    metrics.put("fast_rcnn/cls_accuracy", stats.num_accurate, stats.num_valid)
    metrics.put("fast_rcnn/fg_cls_accuracy", stats.num_fg_accurate, stats.num_fg)
    metrics.put("fast_rcnn/false_negative", stats.num_false_negative, stats.num_fg)
    metrics.check(result.are_sources_right, AssertionError, INVALID_SOURCES)
    metrics.check(result.are_predictions_right, AssertionError, INVERTED_BOX)

"""The cascade's part of a training step without host-device synchronisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from detectron2.modeling.roi_heads.cascade_rcnn import _ScaleGradient
from detectron2.utils.events import get_event_storage
from torch import Tensor

from ..losses.boxes import apply_box_deltas
from ..losses.regions import RegionRule, Regions, label_regions, regions_of
from .deferred import deferred_metrics
from .padded_regions import PaddedRegions
from .pooling import pool_rois
from .proposals import are_larger, clip_boxes
from .static_roi_heads import StaticROIHeads
from .static_rpn import NOT_A_NUMBER, image_limits, match_rule, quota
from .truth import Truth

if TYPE_CHECKING:
    from detectron2.modeling.roi_heads import CascadeROIHeads
else:
    CascadeROIHeads = object

NOT_FINITE = "Box tensor contains infinite or NaN!"


class StaticCascadeROIHeads(StaticROIHeads, CascadeROIHeads):
    """Detectron2's ``CascadeROIHeads`` over padded slots; inference stays Detectron2's."""

    def _box_losses(self, features: dict[str, Tensor], regions: PaddedRegions) -> dict[str, Tensor]:
        levels = [features[f] for f in self.box_in_features]
        current, truth = regions.regions, regions.truth
        limits = image_limits(regions.image_sizes, truth.boxes.device)
        stages: list[tuple[Regions, tuple[Tensor, Tensor]]] = []
        for k in range(self.num_cascade_stages):
            if k:
                current = self.next_regions(k, *stages[-1], truth, limits)
            stages.append((current, self._run_static_stage(levels, current, k)))
        return self._stage_losses(stages)

    def _stage_losses(
        self, stages: list[tuple[Regions, tuple[Tensor, Tensor]]]
    ) -> dict[str, Tensor]:
        losses = {}
        for k, (regions, predictions) in enumerate(stages):
            # Behind the first stage any slot may be foreground.
            slots = self.batch_size_per_image if k else quota(self)
            with get_event_storage().name_scope(f"stage{k}"):
                stage = self.output_losses(self.box_predictor[k], predictions, regions, slots)
            losses.update({f"{name}_stage{k}": loss for name, loss in stage.items()})
        return losses

    def _run_static_stage(
        self, levels: list[Tensor], regions: Regions, k: int
    ) -> tuple[Tensor, Tensor]:
        pooled = pool_rois(self.box_pooler, levels, regions.boxes)
        pooled = _ScaleGradient.apply(pooled, 1.0 / self.num_cascade_stages)
        scores, deltas = self.box_predictor[k](self.box_head[k](pooled))
        return scores, deltas

    @torch.no_grad()
    def next_regions(
        self,
        k: int,
        before: Regions,
        predictions: tuple[Tensor, Tensor],
        truth: Truth,
        limits: Tensor,
    ) -> Regions:
        """The boxes that stage ``k`` starts from, labelled."""
        transform = self.box_predictor[k - 1].box2box_transform
        deltas = predictions[1].view(*before.boxes.shape)
        boxes = apply_box_deltas(deltas, before.boxes, transform.weights, transform.scale_clamp)
        metrics = deferred_metrics()
        is_finite = (boxes.isfinite().all(dim=-1) | ~before.is_valid).all()
        metrics.check(is_finite, AssertionError, NOT_FINITE)
        boxes = clip_boxes(boxes.nan_to_num(), limits)
        is_valid = before.is_valid & are_larger(boxes, 0)
        rule = RegionRule(match_rule(self.proposal_matchers[k]), self.num_classes, ignores=False)
        labels = label_regions(rule, truth.boxes, truth.count, truth.classes, boxes, is_valid)
        metrics.check(labels.is_matched, AssertionError, NOT_A_NUMBER)
        # Detectron2 counts matches here, whatever their class.
        num_fg, num_images = (labels.is_positive & is_valid).sum(), len(boxes)
        scope = f"stage{k}/roi_head"
        metrics.put(f"{scope}/num_fg_samples", num_fg, num_images)
        metrics.put(f"{scope}/num_bg_samples", is_valid.sum() - num_fg, num_images)
        return regions_of(
            boxes, labels.matches, labels.classes, truth.boxes, is_valid, self.num_classes
        )

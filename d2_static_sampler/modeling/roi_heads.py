"""Mixins that put a sampler in front of Detectron2's ROIHeads and RROIHeads.

B images, N proposals of an image, K samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from detectron2.modeling.roi_heads import roi_heads as stock_roi_heads
from detectron2.modeling.roi_heads import rotated_fast_rcnn
from detectron2.structures import Instances
from detectron2.utils.events import get_event_storage
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..samplers import LabelSample
from .stock import Methods
from .subclass import SampledHead

if TYPE_CHECKING:
    from detectron2.modeling.roi_heads.roi_heads import ROIHeads

    from .head_sampler import HeadSampler
else:
    ROIHeads = object

IGNORE = -1
_SAMPLING = ("label_and_sample_proposals", "_sample_proposals")
_OWN = Methods(stock_roi_heads.ROIHeads, "_sample_proposals")


class ProposalSampler(SampledHead, ROIHeads):
    """Samples the proposals of one image: for heads whose owner wrote the loop over the images."""

    _label_sampler: HeadSampler

    @torch.jit.unused
    def _sample_proposals(
        self, matched_idxs: Tensor, matched_labels: Tensor, gt_classes: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Indices and classes of a sample; arguments as in Detectron2's method of this name."""
        if _OWN.differs(self, "_sample_proposals"):  # replaced since the install
            patched: tuple[Tensor, Tensor] = super()._sample_proposals(
                matched_idxs, matched_labels, gt_classes
            )
            return patched
        classes = _classify(matched_idxs, matched_labels, gt_classes, self.num_classes)
        sample = self._sampled(classes)
        index = sample.index[: int(sample.num_pos + sample.num_neg)]
        return index, classes[index]

    @torch.jit.unused
    def _sampled(self, classes: Tensor) -> LabelSample:
        return self._label_sampler(
            classes,
            num_samples=self.batch_size_per_image,
            positive_fraction=self.positive_fraction,
            bg_label=self.num_classes,
        )


class BatchProposalSampler(ProposalSampler):
    """Samples the proposals of all images at once."""

    _own = Methods(stock_roi_heads.ROIHeads, *_SAMPLING)
    # Looked up at each call, as Detectron2 does: somebody may have replaced what is there.
    _functions: ClassVar = stock_roi_heads

    @torch.jit.unused
    @torch.no_grad()
    def label_and_sample_proposals(
        self, proposals: list[Instances], targets: list[Instances]
    ) -> list[Instances]:
        """Label image by image, sample the batch in one call, and take what was picked.

        Same arguments, results and logged counts as the method of this name in Detectron2's
        ``ROIHeads``. For the sampling the host waits once, for the counts that the results'
        lengths need.
        """
        if any(self._own.differs(self, name) for name in _SAMPLING):  # replaced since the install
            listed: list[Instances] = super().label_and_sample_proposals(proposals, targets)
            return listed
        if self.proposal_append_gt:
            proposals = self._functions.add_ground_truth_to_proposals(targets, proposals)
        matches, classes = [], []
        for boxes, truth in zip(proposals, targets, strict=False):
            quality = self._overlaps(truth.gt_boxes, boxes.proposal_boxes)
            matched_idxs, matched_labels = self.proposal_matcher(quality)
            matches.append(matched_idxs)
            classes.append(
                _classify(matched_idxs, matched_labels, truth.gt_classes, self.num_classes)
            )

        if not classes:
            return []
        sample = self._sampled(_pad(classes))
        num_pos, num_neg = torch.stack([sample.num_pos, sample.num_neg]).tolist()
        _log_counts(num_pos, num_neg)
        sampled = []
        for i, (boxes, truth) in enumerate(zip(proposals, targets, strict=False)):
            index = sample.index[i, : num_pos[i] + num_neg[i]]
            taken = boxes[index]
            taken.gt_classes = classes[i][index]
            self._add_targets(taken, truth, matches[i][index])
            sampled.append(taken)
        return sampled

    @torch.jit.unused
    def _overlaps(self, truth: Any, boxes: Any) -> Tensor:
        """(M, N), of the ground truth with the proposals of an image."""
        return self._functions.pairwise_iou(truth, boxes)

    @torch.jit.unused
    def _add_targets(self, taken: Instances, truth: Instances, matched: Tensor) -> None:
        """Give each sampled proposal the ``gt_`` fields of its target; none where there is none."""
        if len(truth) == 0:
            return
        for name, value in truth.get_fields().items():
            if name.startswith("gt_") and not taken.has(name):
                taken.set(name, value[matched])


class BatchRotatedProposalSampler(BatchProposalSampler):
    """The same for rotated boxes, whose heads know no target but the box."""

    _own = Methods(rotated_fast_rcnn.RROIHeads, *_SAMPLING)
    _functions: ClassVar = rotated_fast_rcnn

    @torch.jit.unused
    def _overlaps(self, truth: Any, boxes: Any) -> Tensor:
        return self._functions.pairwise_iou_rotated(truth, boxes)

    @torch.jit.unused
    def _add_targets(self, taken: Instances, truth: Instances, matched: Tensor) -> None:
        if len(truth):
            taken.gt_boxes = truth.gt_boxes[matched]


def _classify(
    matched_idxs: Tensor, matched_labels: Tensor, gt_classes: Tensor, num_classes: int
) -> Tensor:
    """(N,): the class of each proposal's match, ``num_classes`` = background, -1 = ignore."""
    if len(gt_classes) == 0:
        return torch.full_like(matched_idxs, num_classes)
    classes = gt_classes[matched_idxs]
    classes = classes.masked_fill(matched_labels == 0, num_classes)
    return classes.masked_fill(matched_labels == IGNORE, IGNORE)


def _pad(classes: list[Tensor]) -> Tensor:
    """(B, max N) int64; lengths are shapes, which the host knows."""
    return pad_sequence([row.long() for row in classes], batch_first=True, padding_value=IGNORE)


def _log_counts(num_pos: list[int], num_neg: list[int]) -> None:
    storage = get_event_storage()
    storage.put_scalar("roi_head/num_fg_samples", sum(num_pos) / len(num_pos))
    storage.put_scalar("roi_head/num_bg_samples", sum(num_neg) / len(num_neg))

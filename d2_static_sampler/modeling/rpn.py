"""Mixins that put a sampler in front of Detectron2's RPN and RRPN.

B images, N anchors, K samples.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from detectron2.modeling.proposal_generator import rpn as stock_rpn
from torch import Tensor

from ..samplers import LabelSample
from .stock import Methods
from .subclass import SampledHead

if TYPE_CHECKING:
    from detectron2.modeling.proposal_generator.rpn import RPN

    from .head_sampler import HeadSampler
else:
    RPN = object

BACKGROUND = 0
_OWN = Methods(stock_rpn.RPN, "_subsample_labels")
# The head whose batch is being labelled: it leaves the labels for one call afterwards.
_labelling: ContextVar[object] = ContextVar("_labelling", default=None)


class AnchorSampler(SampledHead, RPN):
    """Samples the anchors of one image: for heads whose owner wrote the loop over the images."""

    _label_sampler: HeadSampler

    @torch.jit.unused
    def _subsample_labels(self, label: Tensor) -> Tensor:
        """Set all of the (N,) labels to -1 but a sample's, in place."""
        if _OWN.differs(self, "_subsample_labels"):  # replaced since the install
            patched: Tensor = super()._subsample_labels(label)
            return patched
        return label.copy_(self._sampled(label))

    @torch.jit.unused
    def _sampled(self, labels: Tensor) -> Tensor:
        """(N,) or (B, N) labels with -1 everywhere but in the sample."""
        return _label_vector(self._picked(labels), labels)

    @torch.jit.unused
    def _picked(self, labels: Tensor) -> LabelSample:
        return self._label_sampler(
            labels,
            num_samples=self.batch_size_per_image,
            positive_fraction=self.positive_fraction,
            bg_label=BACKGROUND,
        )


class BatchAnchorSampler(AnchorSampler):
    """Samples the anchors of all images at once."""

    @torch.jit.unused
    @torch.no_grad()
    def label_and_sample_anchors(
        self, anchors: list[Any], gt_instances: list[Any]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Label as Detectron2 does, image by image, then sample the batch in one call.

        Same arguments and results as the method of this name in Detectron2's ``RPN``.
        """
        if _OWN.differs(self, "_subsample_labels"):
            return super().label_and_sample_anchors(anchors, gt_instances)
        token = _labelling.set(self)
        try:
            labels, matched_boxes = super().label_and_sample_anchors(anchors, gt_instances)
        finally:
            _labelling.reset(token)
        if labels:
            labels = list(self._sampled(torch.stack(labels)))
        return labels, matched_boxes

    @torch.jit.unused
    def _subsample_labels(self, label: Tensor) -> Tensor:
        return label if _labelling.get() is self else super()._subsample_labels(label)


def _label_vector(sample: LabelSample, labels: Tensor) -> Tensor:
    """1 at the picked positives, 0 at the picked negatives, -1 elsewhere; shape of ``labels``."""
    n = labels.shape[-1]
    # One column more than there are anchors takes what the padding slots write.
    vector = labels.new_full((*labels.shape[:-1], n + 1), -1)
    place = torch.where(sample.is_valid, sample.index, n)
    vector.scatter_(-1, place, sample.is_pos.to(labels.dtype))
    return vector[..., :n]

"""The sampled proposals of a batch, padded, between the labelling and the heads.

B images, T proposals of an image, N of them with the ground truth behind, K samples.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import torch
from detectron2.modeling.proposal_generator.proposal_utils import add_ground_truth_to_proposals
from detectron2.structures import Instances
from torch import Tensor

from ..losses.anchors import take_boxes
from ..losses.regions import Regions, first_slots
from .padded import PaddedProposals, as_instances
from .truth import Truth, batch_boxes


class Candidates(NamedTuple):
    """What an image's regions are sampled from, at the places that Detectron2 has them at.

    Attributes:
        boxes: (B, N, 4) float32: the proposals of an image, the ground truth right behind them if
            it is appended, then anything.
        is_box: (B, N) bool.
    """

    boxes: Tensor
    is_box: Tensor


def gather_candidates(proposals: Any, truth: Truth | None) -> Candidates:
    """The candidates of B images.

    Args:
        proposals: PaddedProposals, or B Instances.
        truth: to append; None to leave it out.
    """
    if isinstance(proposals, PaddedProposals):
        boxes, count = proposals.boxes, proposals.num_boxes[:, None]
    else:
        boxes, count = batch_boxes([image.proposal_boxes.tensor for image in proposals])
        count = count[:, None]
    if truth is None:
        return Candidates(boxes, torch.arange(boxes.shape[1], device=boxes.device) < count)
    num_proposals = boxes.shape[1]
    boxes = torch.cat([boxes, truth.boxes], dim=1)
    place = torch.arange(boxes.shape[1], device=boxes.device)
    # Past its proposals an image goes on with its ground truth; what runs over is padding.
    source = torch.where(place < count, place, place - count + num_proposals)
    boxes = take_boxes(boxes, source.clamp_(max=boxes.shape[1] - 1))
    return Candidates(boxes, place < count + truth.count[:, None])


class PaddedRegions:
    """The regions that the heads train on.

    Attributes:
        regions: their slots.
        num_fg_slots: Q, how many first slots of an image may be foreground.
        truth: of the batch.
        targets: the ground truth, B Instances.
    """

    def __init__(
        self,
        regions: Regions,
        num_fg_slots: int,
        truth: Truth,
        targets: list[Instances],
        source: RegionSource,
    ) -> None:
        self.regions, self.num_fg_slots = regions, num_fg_slots
        self.truth, self.targets = truth, targets
        self._source = source

    @cached_property
    def fg(self) -> Regions:
        """The (B, Q) first slots."""
        return first_slots(self.regions, self.num_fg_slots)

    @property
    def image_sizes(self) -> list[tuple[int, int]]:
        """Height and width of every image, as its proposals have them."""
        proposals = self._source.proposals
        if isinstance(proposals, PaddedProposals):
            return proposals.image_sizes
        return [image.image_size for image in proposals]

    @cached_property
    def instances(self) -> list[Instances]:
        """With the fields of Detectron2's ``label_and_sample_proposals``; the host waits once."""
        return self._source.make_instances(self)


class RegionSource(NamedTuple):
    """Where sampled regions came from: what their Instances need beyond the slots.

    Attributes:
        heads: the ROI heads.
        proposals: PaddedProposals, or B Instances.
        places: (B, K) int64, the slots' places among the candidates.
        num_valid: (B,) int64, how many slots are valid.
    """

    heads: Any
    proposals: Any
    places: Tensor
    num_valid: Tensor

    def make_instances(self, regions: PaddedRegions) -> list[Instances]:
        """The Instances of ``regions``."""
        originals = as_instances(self.proposals)
        if self.heads.proposal_append_gt:
            originals = add_ground_truth_to_proposals(regions.targets, originals)
        sampled = []
        for i, num_valid in enumerate(self.num_valid.tolist()):
            taken = originals[i][self.places[i, :num_valid]]
            taken.gt_classes = regions.regions.classes[i, :num_valid]
            matches = regions.regions.matches[i, :num_valid]
            self.heads._add_targets(taken, regions.targets[i], matches)
            sampled.append(taken)
        return sampled

"""Boxes of a batch in tensors of one shape, and what others get to see of them.

B images, T slots for the proposals of an image.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from detectron2.structures import Boxes, Instances
from torch import Tensor


class PaddedProposals(NamedTuple):
    """What the RPN proposes.

    Attributes:
        boxes: (B, T, 4) float32; beyond their number anything that lies in the image.
        logits: (B, T) floating.
        num_boxes: (B,) int64.
        image_sizes: B times (height, width).
    """

    boxes: Tensor
    logits: Tensor
    num_boxes: Tensor
    image_sizes: list[tuple[int, int]]

    def to_instances(self) -> list[Instances]:
        """With the fields of Detectron2's ``find_top_rpn_proposals``; the host waits once."""
        return [
            Instances(
                size,
                proposal_boxes=Boxes(self.boxes[i, :count]),
                objectness_logits=self.logits[i, :count],
            )
            for i, (size, count) in enumerate(
                zip(self.image_sizes, self.num_boxes.tolist(), strict=True)
            )
        ]


def as_instances(proposals: Any) -> list[Instances]:
    """Detectron2's list of proposals; of padded ones the host waits for the numbers."""
    is_padded = isinstance(proposals, PaddedProposals)
    listed: list[Instances] = proposals.to_instances() if is_padded else proposals
    return listed

"""Non-maximum suppression (NMS) of a batch, in fixed shapes.

B images, P candidates of an image, T proposals of an image.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.ops.boxes import batched_nms

from .operator import operator


def nms_topk_in_torch(
    boxes: Tensor, scores: Tensor, levels: Tensor, is_valid: Tensor, threshold: float, limit: int
) -> tuple[Tensor, Tensor]:
    """The body of :data:`nms_topk`: the one place where the host may wait for the device."""
    index = scores.new_zeros((len(scores), limit), dtype=torch.int64)
    counts = scores.new_zeros(len(scores), dtype=torch.int64)
    for i, valid in enumerate(is_valid):
        rows = valid.nonzero()[:, 0]
        kept = batched_nms(boxes[i, rows].float(), scores[i, rows], levels[rows], threshold)[:limit]
        index[i, : len(kept)] = rows[kept]
        counts[i] = len(kept)
    return index, counts


# The best boxes of each image of which none overlaps a better one of its level too much.
#
# boxes: (B, P, 4) float.
# scores: (B, P) float.
# levels: (P,) int64.
# is_valid: (B, P) bool, the boxes that take part.
# threshold: the largest overlap of two boxes of a level.
# limit: T, the most boxes of an image.
#
# Returns (B, T) int64, the boxes in the order of Detectron2's batched_nms, then 0; (B,) int64, how
# many there are.
nms_topk = operator(
    "nms_topk",
    nms_topk_in_torch,
    "(Tensor boxes, Tensor scores, Tensor levels, Tensor is_valid, float threshold, int limit) "
    "-> (Tensor, Tensor)",
    waits=True,
)


@nms_topk.register_fake
def _(
    boxes: Tensor, scores: Tensor, levels: Tensor, is_valid: Tensor, threshold: float, limit: int
) -> tuple[Tensor, Tensor]:
    return (
        scores.new_empty((scores.shape[0], limit), dtype=torch.int64),
        scores.new_empty((scores.shape[0],), dtype=torch.int64),
    )

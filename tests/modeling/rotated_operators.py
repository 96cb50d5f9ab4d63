"""Stand-ins for Detectron2's compiled operators of rotated boxes, which leave the angles out."""

from __future__ import annotations

import detectron2.modeling.proposal_generator.rrpn as stock_rrpn
import detectron2.modeling.roi_heads.rotated_fast_rcnn as stock_rotated
import pytest
import torch
from detectron2.layers import ROIAlignRotated, batched_nms
from detectron2.structures import Boxes, RotatedBoxes, pairwise_iou
from torch import Tensor
from torchvision.ops import roi_align


def replace_overlaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the sampling of rotated heads needs."""
    for module in (stock_rrpn, stock_rotated):
        monkeypatch.setattr(module, "pairwise_iou_rotated", upright_overlaps)


def replace_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the training of a whole model needs."""

    def nms(boxes: Tensor, scores: Tensor, levels: Tensor, threshold: float) -> Tensor:
        return batched_nms(_upright(boxes), scores, levels, threshold)

    def align(self: ROIAlignRotated, features: Tensor, rois: Tensor) -> Tensor:
        upright = torch.cat([rois[:, :1], _upright(rois[:, 1:])], dim=1)
        return roi_align(features, upright, self.output_size, self.spatial_scale, 2, True)

    replace_overlaps(monkeypatch)
    monkeypatch.setattr(stock_rrpn, "batched_nms_rotated", nms)
    monkeypatch.setattr(ROIAlignRotated, "forward", align)


def upright_overlaps(a: RotatedBoxes, b: RotatedBoxes) -> Tensor:
    """Enough to tell which boxes belong together."""
    return pairwise_iou(Boxes(_upright(a.tensor)), Boxes(_upright(b.tensor)))


def _upright(boxes: Tensor) -> Tensor:
    center, half = boxes[:, :2], boxes[:, 2:4] / 2
    return torch.cat([center - half, center + half], dim=1)

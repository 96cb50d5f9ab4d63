"""Anchors that are made on their device: newer Detectron2 makes the grid on the host and waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from detectron2.structures import Boxes
from torch import Tensor

from .static_part import takes_step
from .subclass import SampledHead

if TYPE_CHECKING:
    from detectron2.modeling.anchor_generator import DefaultAnchorGenerator
else:
    DefaultAnchorGenerator = object


class StaticAnchors(SampledHead, DefaultAnchorGenerator):
    """Detectron2's ``DefaultAnchorGenerator`` in training; inference stays Detectron2's."""

    def forward(self, features: list[Tensor]) -> list[Boxes]:
        """The anchors of each level, bit for bit those of Detectron2."""
        if not self.training or not takes_step(self):
            anchors: list[Boxes] = super().forward(features)
            return anchors
        return [
            Boxes(self._of_level(feature.shape[-2:], stride, cell))
            for feature, stride, cell in zip(features, self.strides, self.cell_anchors, strict=True)
        ]

    def _of_level(self, size: torch.Size, stride: int, cell: Tensor) -> Tensor:
        start = self.offset * stride
        rows, columns = (
            torch.arange(start, n * stride, step=stride, dtype=torch.float32, device=cell.device)
            for n in size
        )
        # One place (x, y, x, y) a cell of the grid.
        places = torch.cartesian_prod(rows, columns).flip(1).repeat(1, 2)
        return (places[:, None] + cell).flatten(0, 1)

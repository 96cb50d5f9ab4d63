"""Poolers, feature maps and boxes for the tests of pooling, and Detectron2's pooler beside ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from detectron2.modeling.poolers import ROIPooler
from detectron2.structures import Boxes
from torch import Tensor

from d2_static_sampler.modeling.pooling import pool_rois

SIZE, CHANNELS, SIDE = 128, 3, 5
STRIDES = (4, 8, 16, 32)
TYPES = ("ROIAlign", "ROIAlignV2")
NAMES = ("spread", "zero area", "at the border", "outside", "on one level", "none")

of_4_and_1 = pytest.mark.parametrize("strides", [STRIDES, STRIDES[2:3]], ids=["4", "1 level"])
of_samples = pytest.mark.parametrize("samples", [0, 2])
of_types = pytest.mark.parametrize("kind", TYPES)


def make_pooler(
    strides: tuple[int, ...] = STRIDES, samples: int = 0, kind: str = "ROIAlignV2"
) -> ROIPooler:
    """Boxes of 16, 32 and 64 pixels a side are the smallest on the levels 1, 2 and 3."""
    return ROIPooler(SIDE, [1 / stride for stride in strides], samples, kind, canonical_box_size=32)


def make_features(
    strides: tuple[int, ...] = STRIDES, images: int = 2, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    shapes = [(images, CHANNELS, SIZE // stride, SIZE // stride) for stride in strides]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def make_boxes(name: str = "spread", images: int = 2, count: int = 40) -> Tensor:
    """(images, count, 4) boxes, of sides from 1 to 100 pixels where the name says no more."""
    extent = 100 ** torch.rand(images, count, 2)
    corner = torch.rand(images, count, 2) * (SIZE - extent)
    if name == "zero area":
        extent[:, ::2, 0] = 0
        extent[:, ::3] = 0
    elif name == "at the border":
        corner = torch.where(torch.rand(images, count, 2) < 0.5, 0.0, SIZE - extent)
    elif name == "outside":
        corner = corner + torch.tensor([SIZE, -SIZE]) * torch.rand(images, count, 1) * 2
    elif name == "on one level":
        extent = 35 + extent / 10
    boxes = torch.cat([corner, corner + extent], dim=2)
    return boxes[:, :0] if name == "none" else boxes


def boundary_boxes() -> Tensor:
    """(1, 315, 4) boxes as large as the smallest of a level, and a bit more and less."""
    side = torch.tensor([8.0, 16, 32, 64, 112, 224, 448]).repeat_interleave(15)
    side = torch.cat([side, side.nextafter(side * 2), side.nextafter(side * 0)])
    start = torch.arange(len(side)) % 15 * 1.1
    return torch.stack([start, start, start + side, start + side], dim=1)[None]


def stock_pool(pooler: ROIPooler, features: list[Tensor], boxes: Tensor) -> Tensor:
    return pooler(features, [Boxes(of_image) for of_image in boxes])


def with_gradients(
    pool: Any, pooler: ROIPooler, features: list[Tensor], boxes: Tensor, autocast: bool
) -> list[Tensor]:
    """The output, and the gradients that one random gradient of it gives the features."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = pool(pooler, features, boxes)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, features, grad)]


def assert_equals_stock(*case: Any, autocast: bool = False, pool: Any = pool_rois) -> Tensor:
    """The output, once it and the gradients of the features have the bits of stock's."""
    ours = with_gradients(pool, *case, autocast=autocast)
    stock = with_gradients(stock_pool, *case, autocast=autocast)
    for i, (a, b) in enumerate(zip(ours, stock, strict=True)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        as_integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
        assert torch.equal(a.view(as_integers), b.view(as_integers)), f"output or gradient {i}"
    return ours[0]

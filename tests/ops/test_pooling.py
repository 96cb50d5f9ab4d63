"""The pooler with fixed shapes against Detectron2's: the same bits, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from detectron2.modeling.poolers import assign_boxes_to_levels
from detectron2.structures import Boxes
from torch.utils._python_dispatch import TorchDispatchMode

from d2_static_sampler.modeling.pooling import levels_of_boxes, pool_rois
from tests.ops.pooling_cases import (
    NAMES,
    STRIDES,
    assert_equals_stock,
    boundary_boxes,
    make_boxes,
    make_features,
    make_pooler,
    of_4_and_1,
    of_samples,
    of_types,
)


@of_4_and_1
@of_samples
@of_types
@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_equal_to_stock(
    body: str, kind: str, samples: int, strides: tuple[int, ...], name: str, images: int
) -> None:
    pooler = make_pooler(strides, samples, kind)
    assert_equals_stock(pooler, make_features(strides, images), make_boxes(name, images))


@of_4_and_1
@of_samples
@of_types
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_equal_to_stock_under_autocast(
    body: str, dtype: torch.dtype, kind: str, samples: int, strides: tuple[int, ...]
) -> None:
    case = make_pooler(strides, samples, kind), make_features(strides, dtype=dtype), make_boxes()
    assert assert_equals_stock(*case, autocast=True).dtype == dtype


@of_4_and_1
@of_samples
def test_equal_to_stock_in_float64(body: str, samples: int, strides: tuple[int, ...]) -> None:
    boxes = make_boxes().double() + 1e-9  # Boxes rounds them to float32
    assert_equals_stock(
        make_pooler(strides, samples), make_features(strides, 2, boxes.dtype), boxes
    )


@of_types
def test_boxes_on_no_level_give_zero_as_in_stock(body: str, kind: str) -> None:
    boxes = make_boxes()
    boxes[0, ::4, 3] = float("nan")
    boxes[1, ::4] = boxes[1, ::4][:, [2, 1, 0, 3]]  # a negative area
    output = assert_equals_stock(make_pooler(kind=kind), make_features(), boxes)
    assert not output.view(2, 40, -1)[:, ::4].any()


@pytest.mark.parametrize("canonical_size", [32, 224])
@pytest.mark.parametrize("strides", [STRIDES, STRIDES[1:3]], ids=["4 levels", "2 levels"])
def test_levels_at_their_borders(strides: tuple[int, ...], canonical_size: int) -> None:
    boxes = torch.cat([boundary_boxes(), make_boxes("spread", 1, 3000)], dim=1)
    pooler = make_pooler(strides)
    pooler.canonical_box_size = canonical_size
    bounds = pooler.min_level, pooler.max_level
    stock = assign_boxes_to_levels([Boxes(boxes[0])], *bounds, canonical_size, 4)
    assert torch.equal(levels_of_boxes(pooler, boxes), stock)
    assert stock.unique().tolist() == list(range(len(strides)))


@of_samples
@of_types
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_values_stay_on_their_level(
    body: str, kind: str, samples: int, value: float
) -> None:
    pooler, features, boxes = make_pooler(STRIDES, samples, kind), make_features(), make_boxes()
    with torch.no_grad():
        features[1].fill_(value)
    output, is_broken = pool_rois(pooler, features, boxes), levels_of_boxes(pooler, boxes) == 1
    assert output[~is_broken].isfinite().all()
    assert not output[is_broken].isfinite().any()
    grad = torch.where(is_broken.view(-1, 1, 1, 1), value, torch.ones_like(output))
    grads = torch.autograd.grad(output, features, grad)
    assert [bool(grad.isfinite().all()) for grad in grads] == [True, False, True, True]


def test_gradients_of_what_needs_them_alone(body: str) -> None:
    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
            names.append(function.name())
            return function(*args, **(kwargs or {}))

    names: list[str] = []
    features, boxes = make_features(), make_boxes().requires_grad_()
    for feature in features[1:3]:
        feature.requires_grad_(False)
    with Names():
        pool_rois(make_pooler(), features, boxes).sum().backward()
    assert names.count("d2_static_sampler::roi_align_level_backward") == 2
    assert [feature.grad is None for feature in features] == [False, True, True, False]
    assert boxes.grad is None

"""Keypoint targets and losses over slots against Detectron2's on the valid rows alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from detectron2.modeling.roi_heads.keypoint_head import keypoint_rcnn_loss
from detectron2.modeling.roi_heads.roi_heads import select_proposals_with_visible_keypoints
from detectron2.structures import Boxes, Instances, Keypoints
from detectron2.utils.events import EventStorage
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from d2_static_sampler.losses.keypoints import (
    has_visible_keypoint,
    keypoint_heatmap,
    keypoint_loss,
)
from d2_static_sampler.profiling.op_counter import count_data_dependent_ops

NUM_KEYPOINTS, SIDE = 5, 12
BAD = (math.nan, math.inf, -math.inf)
VALID = {"none": 0.0, "some": 0.7, "all": 1.0}
NORMALIZERS = {"visible": None, "fixed": 37.5}


def make_truth(num: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keypoints and boxes; some keypoints lie on edges, some outside, some boxes are flat."""
    random = torch.Generator().manual_seed(seed)
    corner = torch.rand(num, 2, generator=random) * 40
    boxes = torch.cat([corner, corner + torch.rand(num, 2, generator=random) * 50 + 1], dim=1)
    boxes[3::9, 2] = boxes[3::9, 0]
    place = torch.rand(num, NUM_KEYPOINTS, 2, generator=random) * 1.3 - 0.15
    low, high = boxes[:, None, :2], boxes[:, None, 2:]
    location = low + place * (high - low)
    location = torch.where(place > 1.1, high, torch.where(place < -0.1, low, location))
    visibility = torch.randint(3, (num, NUM_KEYPOINTS, 1), generator=random).float()
    visibility[4::5] *= 0.4  # below 1: stock's two tests of visibility differ
    return torch.cat([location, visibility], dim=-1), boxes


def make_slots(num: int, valid: float = 0.7, dtype: torch.dtype = torch.float32) -> Any:
    """Logits, keypoints, boxes and validity."""
    random = torch.Generator().manual_seed(num)
    logits = torch.randn(num, NUM_KEYPOINTS, SIDE, SIDE, generator=random, dtype=dtype) * 3
    is_valid = torch.rand(num, generator=random) < valid
    return logits.requires_grad_(), *make_truth(num), is_valid


def ours(slots: Any, normalizer: float | None) -> Tensor:
    logits, keypoints, boxes, is_valid = slots
    return keypoint_loss(logits, *keypoint_heatmap(keypoints, boxes, SIDE), is_valid, normalizer)


def as_instances(keypoints: Tensor, boxes: Tensor) -> Instances:
    instances = Instances((128, 128))
    instances.proposal_boxes = Boxes(boxes)
    instances.gt_keypoints = Keypoints(keypoints)
    instances.gt_classes = torch.zeros(len(boxes), dtype=torch.int64)
    return instances


def stock(slots: Any, normalizer: float | None) -> Tensor:
    logits, keypoints, boxes, is_valid = slots
    instances = as_instances(keypoints[is_valid], boxes[is_valid])
    with EventStorage():
        return keypoint_rcnn_loss(logits[is_valid], [instances], normalizer)


def with_gradient(loss_of: Any, slots: Any, normalizer: float | None) -> tuple[Tensor, Tensor]:
    loss = loss_of(slots, normalizer)
    return loss.detach(), torch.autograd.grad(loss, slots[0])[0]


def check(slots: Any, normalizer: float | None, tolerance: float) -> None:
    loss, gradient = with_gradient(ours, slots, normalizer)
    stock_loss, stock_gradient = with_gradient(stock, slots, normalizer)
    assert loss.shape == ()
    torch.testing.assert_close(loss, stock_loss, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradient, stock_gradient, rtol=tolerance, atol=tolerance)
    assert not gradient[~slots[-1]].any()


@settings(max_examples=60, deadline=None)
@given(num=st.integers(1, 40), seed=st.integers(0, 2**31), side=st.sampled_from([1, 7, 56]))
def test_targets_have_the_bits_of_detectron2(num: int, seed: int, side: int) -> None:
    keypoints, boxes = make_truth(num, seed)
    index, is_visible = keypoint_heatmap(keypoints, boxes, side)
    stock_index, stock_visible = Keypoints(keypoints).to_heatmap(boxes, side)
    assert index.dtype == torch.int64
    assert torch.equal(index, stock_index)
    assert torch.equal(is_visible, stock_visible.bool())
    with EventStorage():
        kept = select_proposals_with_visible_keypoints([as_instances(keypoints, boxes)])[0]
    assert torch.equal(boxes[has_visible_keypoint(keypoints, boxes)], kept.proposal_boxes.tensor)


def test_targets_of_impossible_truth_are_those_of_detectron2() -> None:
    keypoints, boxes = make_truth(24)
    boxes[1::4], boxes[2::4] = math.nan, boxes[2::4].flip(1)
    keypoints[::3, 0], keypoints[::3, 1], keypoints[::3, 2] = math.nan, math.inf, -math.inf
    index, is_visible = keypoint_heatmap(keypoints, boxes, SIDE)
    stock_index, stock_visible = Keypoints(keypoints).to_heatmap(boxes, SIDE)
    assert torch.equal(index, stock_index)
    assert torch.equal(is_visible, stock_visible.bool())


def test_no_slot_at_all() -> None:
    index, is_visible = keypoint_heatmap(*make_truth(0), SIDE)
    assert index.shape == is_visible.shape == (0, NUM_KEYPOINTS)
    assert has_visible_keypoint(*make_truth(0)).shape == (0,)
    assert ours(make_slots(0), None) == 0


@pytest.mark.parametrize("normalizer", NORMALIZERS.values(), ids=NORMALIZERS)
@pytest.mark.parametrize("valid", VALID.values(), ids=VALID)
def test_loss_and_gradient_equal_detectron2(valid: float, normalizer: float | None) -> None:
    for num in (1, 8, 60):
        check(make_slots(num, valid), normalizer, 1e-6)
        check(make_slots(num, valid, torch.float64), normalizer, 1e-12)


def test_gradients_have_the_bits_of_detectron2() -> None:
    slots = make_slots(60)
    for normalizer in NORMALIZERS.values():
        gradient = with_gradient(ours, slots, normalizer)[1]
        assert torch.equal(gradient, with_gradient(stock, slots, normalizer)[1])


@pytest.mark.parametrize("normalizer", NORMALIZERS.values(), ids=NORMALIZERS)
def test_no_visible_keypoint_gives_0_with_a_gradient(normalizer: float | None) -> None:
    slots = make_slots(8, 1.0)
    slots[1][..., 2] = 0
    loss, gradient = with_gradient(ours, slots, normalizer)
    assert loss == stock(slots, normalizer) == 0
    assert not gradient.any()


@pytest.mark.parametrize("bad", BAD)
def test_what_is_not_valid_or_not_visible_has_no_effect(bad: float) -> None:
    logits, keypoints, boxes, is_valid = make_slots(20)
    clean = with_gradient(ours, (logits, keypoints, boxes, is_valid), None)
    is_visible = keypoint_heatmap(keypoints, boxes, SIDE)[1]
    planted = [tensor.detach().clone() for tensor in (logits, keypoints, boxes)]
    planted[0][~(is_visible & is_valid[:, None])] = bad
    for tensor in planted[1:]:
        tensor[~is_valid] = bad
    planted[0].requires_grad_()
    for found, expected in zip(with_gradient(ours, (*planted, is_valid), None), clean, strict=True):
        assert torch.equal(found, expected)


def test_a_nan_in_a_visible_keypoint_is_seen() -> None:
    slots = make_slots(20, 1.0)
    is_visible = keypoint_heatmap(*slots[1:3], SIDE)[1]
    slots[0].data[tuple(is_visible.nonzero()[0].tolist())] = math.nan
    assert ours(slots, None).isnan()


def test_autocast_and_half_logits() -> None:
    logits, *rest = make_slots(20)
    slots = (logits.detach().bfloat16().requires_grad_(), *rest)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ours(slots, None).dtype == stock(slots, None).dtype == torch.float32
        check(slots, None, 1e-6)


def test_nothing_depends_on_data_and_ops_do_not_grow() -> None:
    ops = set()
    for num in (2, 8, 32):
        slots = make_slots(num)
        with count_data_dependent_ops() as count:
            ours(slots, None).backward()
            has_visible_keypoint(*slots[1:3])
        assert count.data_dependent == []
        ops.add(count.num_ops)
    assert len(ops) == 1
    with count_data_dependent_ops() as count:
        stock(make_slots(8), None)
    assert count.data_dependent


def test_runs_without_data() -> None:
    slots = [tensor.detach().to("meta") for tensor in make_slots(6)]
    slots[0].requires_grad_()
    loss, gradient = with_gradient(ours, slots, None)
    assert loss.shape == ()
    assert gradient.shape == slots[0].shape
    assert has_visible_keypoint(*slots[1:3]).shape == (6,)


def test_compiles_to_one_graph() -> None:
    def both(slots: Any) -> tuple[Tensor, Tensor]:
        return ours(slots, None), has_visible_keypoint(*slots[1:3])

    slots = make_slots(12)
    loss, kept = torch.compile(both, fullgraph=True, backend="eager")(slots)
    assert torch.equal(loss, both(slots)[0])
    assert torch.equal(kept, both(slots)[1])
    assert torch.autograd.grad(loss, slots[0])[0].any()

"""Mask targets, losses and counts over slots against Detectron2's on the valid rows alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from detectron2.modeling.roi_heads.mask_head import mask_rcnn_loss
from detectron2.structures import BitMasks, Boxes, Instances
from detectron2.utils.events import EventStorage
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from d2_static_sampler.losses.masks import (
    crop_masks,
    mask_loss_mean,
    mask_stats,
    pick_class_masks,
)
from d2_static_sampler.profiling.op_counter import count_data_dependent_ops

NUM_CLASSES, SIDE = 3, 14
BAD = (math.nan, math.inf, -math.inf)
VALID = {"none": 0.0, "some": 0.7, "all": 1.0}


def make_slots(
    num: int, valid: float = 0.7, channels: int = NUM_CLASSES, dtype: torch.dtype = torch.float32
) -> Any:
    """Logits, classes, targets and validity; what is not valid has no class at all."""
    random = torch.Generator().manual_seed(num)
    logits = torch.randn(num, channels, SIDE, SIDE, generator=random, dtype=dtype) * 3
    classes = torch.randint(NUM_CLASSES, (num,), generator=random)
    targets = torch.rand(num, SIDE, SIDE, generator=random) > 0.6
    is_valid = torch.rand(num, generator=random) < valid
    return logits.requires_grad_(), torch.where(is_valid, classes, 10**9), targets, is_valid


class GivenMasks:
    """Ground truth whose crops are known; ``mask_rcnn_loss`` asks for nothing else."""

    def __init__(self, targets: Tensor) -> None:
        self.targets = targets

    def __len__(self) -> int:
        return len(self.targets)

    def crop_and_resize(self, boxes: Tensor, side: int) -> Tensor:
        return self.targets


def stock(logits: Tensor, classes: Tensor, targets: Tensor, is_valid: Tensor) -> Tensor:
    return stock_with_log(logits, classes, targets, is_valid)[0]


def stock_with_log(
    logits: Tensor, classes: Tensor, targets: Tensor, is_valid: Tensor
) -> tuple[Tensor, dict[str, float]]:
    instances = Instances((64, 64))
    instances.proposal_boxes = Boxes(torch.zeros(int(is_valid.sum()), 4))
    instances.gt_classes = classes[is_valid]
    instances.gt_masks = GivenMasks(targets[is_valid])
    with EventStorage() as storage:
        loss = mask_rcnn_loss(logits[is_valid], [instances])
    return loss, {name.split("/")[1]: value for name, (value, _) in storage.latest().items()}


def with_gradient(loss_of: Any, slots: Any) -> tuple[Tensor, Tensor]:
    loss = loss_of(*slots)
    return loss.detach(), torch.autograd.grad(loss, slots[0])[0]


def check(slots: Any) -> None:
    """In float32, as Detectron2: within eight roundings; torch sums in a tree, not in a row."""
    loss, gradient = with_gradient(mask_loss_mean, slots)
    stock_loss, stock_gradient = with_gradient(stock, slots)
    assert loss.shape == ()
    torch.testing.assert_close(loss, stock_loss, rtol=1e-6, atol=1e-7, check_dtype=False)
    torch.testing.assert_close(gradient, stock_gradient, rtol=1e-6, atol=1e-9)
    assert not gradient[~slots[-1]].any()


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 4),
    num=st.integers(0, 9),
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    seed=st.integers(0, 2**31),
)
def test_crops_have_the_bits_of_detectron2(
    count: int, num: int, height: int, width: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    masks = torch.rand(count, height, width, generator=random) > 0.5
    size = torch.tensor([width, height]).float()
    corners = torch.rand(2, num, 2, generator=random) * size * 1.2 - 0.1 * size
    boxes = torch.cat([corners.amin(0), corners.amax(0)], dim=1)
    boxes[::4] = torch.tensor([0.0, 0, width, height])  # to the border
    boxes[1::4, 2:] = boxes[1::4, :2]  # flat
    boxes[2::4] = boxes[2::4].round()  # many values of exactly 0.5
    match = torch.randint(count, (num,), generator=random)
    expected = BitMasks(masks)[match].crop_and_resize(boxes, SIDE)
    crops = crop_masks(masks, boxes, match, SIDE)
    assert crops.dtype == torch.bool
    assert torch.equal(crops, expected)
    assert torch.equal(crop_masks(masks * 0.3, boxes.double(), match, SIDE), expected)


def test_no_mask_and_a_match_out_of_range_read_no_foreign_memory() -> None:
    boxes, far = torch.tensor([[0.0, 0, 8, 8]]), torch.tensor([10**9])
    assert not crop_masks(torch.zeros(0, 8, 8, dtype=torch.bool), boxes, far, SIDE).any()
    assert crop_masks(torch.ones(2, 8, 8, dtype=torch.bool), boxes, far, SIDE).all()


@pytest.mark.parametrize("channels", [NUM_CLASSES, 1])
@pytest.mark.parametrize("valid", VALID.values(), ids=VALID)
def test_loss_and_gradient_equal_detectron2(valid: float, channels: int) -> None:
    for num in (1, 8, 60):
        for dtype in (torch.float32, torch.float64):  # the loss is float32 in both, as stock
            slots = make_slots(num, valid, channels, dtype)
            if slots[-1].any():
                check(slots)
            else:
                loss, gradient = with_gradient(mask_loss_mean, slots)
                assert loss == 0
                assert not gradient.any()


def test_no_slot_at_all() -> None:
    loss, gradient = with_gradient(mask_loss_mean, make_slots(0))
    assert loss == 0
    assert gradient.numel() == 0


def test_what_is_not_valid_has_no_effect() -> None:
    logits, classes, targets, is_valid = make_slots(20)
    clean = with_gradient(mask_loss_mean, (logits, classes, targets, is_valid))
    counts = mask_stats(logits, classes, targets, is_valid)
    for bad in BAD:
        planted = logits.detach().clone()
        planted[~is_valid] = bad
        slots = (planted.requires_grad_(), classes, targets ^ ~is_valid[:, None, None], is_valid)
        found = with_gradient(mask_loss_mean, slots)
        assert torch.equal(found[0], clean[0])
        assert torch.equal(found[1], clean[1])
        assert mask_stats(*slots) == counts


def test_masks_of_other_classes_get_no_gradient() -> None:
    slots = make_slots(20, 1.0)
    gradient = with_gradient(mask_loss_mean, slots)[1]
    of_class = torch.nn.functional.one_hot(slots[1], NUM_CLASSES).bool()
    assert gradient[of_class].any(dim=-1).all()
    assert not gradient[~of_class].any()


def test_a_nan_in_a_valid_slot_is_seen() -> None:
    logits, *rest = make_slots(20, 1.0)
    logits.data[3] = math.nan
    assert mask_loss_mean(logits, *rest).isnan()


def test_picked_masks_stand_for_the_logits() -> None:
    slots = make_slots(20)
    picked = pick_class_masks(slots[0], slots[1], slots[3])
    assert picked.shape == (20, 1, SIDE, SIDE)
    assert torch.equal(mask_loss_mean(picked, *slots[1:]), mask_loss_mean(*slots))
    assert mask_stats(picked, *slots[1:]) == mask_stats(*slots)


def test_autocast_and_half_logits() -> None:
    logits, *rest = make_slots(20)
    slots = (logits.detach().bfloat16().requires_grad_(), *rest)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, gradient = with_gradient(mask_loss_mean, slots)
        stock_loss, stock_gradient = with_gradient(stock, slots)
    assert loss.dtype == stock_loss.dtype == torch.float32
    torch.testing.assert_close(loss, stock_loss, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradient, stock_gradient)


@pytest.mark.parametrize("inside", ["some", "nothing", "everything"])
def test_counts_give_what_detectron2_logs(inside: str) -> None:
    for valid in (0.7, 1.0):
        logits, classes, targets, is_valid = make_slots(16, valid)
        if inside != "some":
            targets = torch.full_like(targets, inside == "everything")
        stats = mask_stats(logits, classes, targets, is_valid)
        assert all(count.shape == () and count.dtype == torch.int64 for count in stats)
        wrong, total, positive, false_positive, false_negative = (n.item() for n in stats)
        _, log = stock_with_log(logits, classes, targets, is_valid)
        assert log == {
            "accuracy": 1 - wrong / max(total, 1.0),
            "false_positive": false_positive / max(total - positive, 1.0),
            "false_negative": false_negative / max(positive, 1.0),
        }


def crop_inputs(num: int) -> Any:
    boxes = torch.tensor([[1.0, 2, 9, 7]]).repeat(num, 1)
    return torch.ones(3, 10, 10, dtype=torch.bool), boxes, torch.arange(num) % 3


def test_nothing_depends_on_data_and_ops_do_not_grow() -> None:
    ops = set()
    for num in (2, 8, 32):
        slots = make_slots(num)
        with count_data_dependent_ops() as count:
            crop_masks(*crop_inputs(num), SIDE)
            mask_loss_mean(*slots).backward()
            mask_stats(*slots)
        assert count.data_dependent == []
        ops.add(count.num_ops)
    assert len(ops) == 1
    with count_data_dependent_ops() as count:
        stock(*make_slots(8))
    assert count.data_dependent


def test_runs_without_data() -> None:
    slots = [tensor.detach().to("meta") for tensor in make_slots(6)]
    slots[0].requires_grad_()
    loss, gradient = with_gradient(mask_loss_mean, slots)
    assert loss.shape == mask_stats(*slots).num_incorrect.shape == ()
    assert gradient.shape == slots[0].shape
    crops = crop_masks(*(tensor.to("meta") for tensor in crop_inputs(5)), SIDE)
    assert crops.shape == (5, SIDE, SIDE)


def test_compiles_to_one_graph() -> None:
    def both(masks: Tensor, boxes: Tensor, match: Tensor, logits: Tensor, classes: Tensor) -> Any:
        targets, is_valid = crop_masks(masks, boxes, match, SIDE), classes < NUM_CLASSES
        stats = mask_stats(logits, classes, targets, is_valid)
        return mask_loss_mean(logits, classes, targets, is_valid), stats

    inputs = (*crop_inputs(12), *make_slots(12)[:2])
    compiled = torch.compile(both, fullgraph=True, backend="eager")
    loss, stats = compiled(*inputs)
    assert (loss, stats) == both(*inputs)
    loss.backward()
    assert inputs[3].grad.any()

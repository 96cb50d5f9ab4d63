"""Box losses over slots against Detectron2's on the foreground rows alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from detectron2.layers import ciou_loss, diou_loss
from detectron2.modeling.box_regression import Box2BoxTransform
from fvcore.nn import giou_loss, smooth_l1_loss
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from d2_static_sampler.losses.boxes import (
    BOX_LOSSES,
    apply_box_deltas,
    are_ordered,
    are_valid_sources,
    box_deltas,
    box_loss_sum,
)
from d2_static_sampler.profiling.op_counter import count_data_dependent_ops
from tests.helpers import needs_inductor

CLAMP = math.log(1000.0 / 16)
WEIGHTS = {"rpn": (1.0, 1.0, 1.0, 1.0), "roi": (10.0, 10.0, 5.0, 5.0), "odd": (1.5, 2.5, 3.5, 0.7)}
IOU_LOSSES = {"giou": giou_loss, "diou": diou_loss, "ciou": ciou_loss}
FOREGROUND = {"none": 0.0, "one in five": 0.2, "all": 1.0}
BAD = (math.nan, math.inf, -math.inf)
IMPOSSIBLE = [(3.0, 1, 3, 5), (5, 5, 1, 1), (math.nan, 0, 4, 4), (1, 1, 1, 1)]  # flat, inverted


def make_slots(num: int, fg: float = 0.5, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Predicted deltas, sources, targets and foreground of ``num`` slots.

    Some targets equal their source, some touch it, some lie apart, and some end at the border.
    """
    random = torch.Generator().manual_seed(seed)
    corner = torch.rand(2, num, 2, generator=random, dtype=dtype) * 80
    extent = torch.rand(2, num, 2, generator=random, dtype=dtype) * 60 + 1
    src, target = torch.cat([corner, corner + extent], dim=-1)
    target[::7] = src[::7]
    target[1::7] = src[1::7] + (src[1::7, 2:] - src[1::7, :2]).repeat(1, 2)
    target[2::7, :2] = 0
    target[3::7] = src[3::7] + 500
    pred = torch.randn(num, 4, generator=random, dtype=dtype) * 0.6
    pred[::5] = 0
    is_fg = torch.rand(num, generator=random) < fg
    return pred.requires_grad_(), src, target, is_fg


def ours(kind: str, slots: Any, *, weights: Any = WEIGHTS["roi"], beta: float = 0.0) -> Tensor:
    return box_loss_sum(kind, *slots, weights=weights, scale_clamp=CLAMP, beta=beta)


def stock(kind: str, slots: Any, *, weights: Any = WEIGHTS["roi"], beta: float = 0.0) -> Tensor:
    *tensors, is_fg = slots
    pred, src, target = (tensor[is_fg] for tensor in tensors)
    transform = Box2BoxTransform(weights, CLAMP)
    if kind == "smooth_l1":
        return smooth_l1_loss(pred, transform.get_deltas(src, target), beta, reduction="sum")
    boxes = transform.apply_deltas(pred, src).to(target.dtype)  # always float32 before
    return IOU_LOSSES[kind](boxes, target, reduction="sum")


def with_gradient(loss_of: Any, kind: str, slots: Any, **options: Any) -> tuple[Tensor, Tensor]:
    loss = loss_of(kind, slots, **options)
    return loss.detach(), torch.autograd.grad(loss, slots[0])[0]


def check(kind: str, slots: Any, tolerance: float, **options: Any) -> None:
    loss, gradient = with_gradient(ours, kind, slots, **options)
    stock_loss, stock_gradient = with_gradient(stock, kind, slots, **options)
    assert loss.shape == ()
    torch.testing.assert_close(loss, stock_loss, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradient, stock_gradient, rtol=tolerance, atol=tolerance)
    assert not gradient[~slots[-1]].any()


@settings(max_examples=60, deadline=None)
@given(num=st.integers(0, 70), seed=st.integers(0, 2**31), name=st.sampled_from(sorted(WEIGHTS)))
def test_deltas_and_boxes_have_the_bits_of_detectron2(num: int, seed: int, name: str) -> None:
    pred, src, target, _ = make_slots(num, seed=seed)
    transform = Box2BoxTransform(WEIGHTS[name], CLAMP)
    deltas = box_deltas(src, target, WEIGHTS[name])
    assert torch.equal(deltas, transform.get_deltas(src, target))
    for some in (pred.detach(), pred.detach() * 100, deltas, pred.detach().bfloat16()):
        boxes = apply_box_deltas(some, src, WEIGHTS[name], CLAMP)
        assert torch.equal(boxes, transform.apply_deltas(some, src))
    both = box_deltas(torch.stack([src, target]), torch.stack([target, src]), WEIGHTS[name])
    assert torch.equal(both[0], deltas)


def test_impossible_boxes_have_the_deltas_of_detectron2() -> None:
    src = torch.tensor([[0.0, 0, 4, 4]]).expand(4, 4)
    nan = math.nan
    target = torch.tensor([[3.0, 1, 3, 5], [5, 5, 1, 1], [nan, 0, 4, 4], [0, 2, 9, 2]])
    stock_deltas = Box2BoxTransform(WEIGHTS["roi"]).get_deltas(src, target)
    deltas = box_deltas(src, target, WEIGHTS["roi"])
    torch.testing.assert_close(deltas, stock_deltas, rtol=0, atol=0, equal_nan=True)
    assert not deltas.isfinite().all(dim=1).any()


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("fg", FOREGROUND.values(), ids=FOREGROUND)
@pytest.mark.parametrize("kind", BOX_LOSSES)
def test_losses_and_gradients_equal_detectron2(kind: str, fg: float, weights: Any) -> None:
    for beta in (0.0, 1e-6, 0.11, 1.0):
        check(kind, make_slots(200, fg), 4e-6, weights=weights, beta=beta)
        check(kind, make_slots(200, fg, torch.float64), 1e-12, weights=weights, beta=beta)


@pytest.mark.parametrize("kind", BOX_LOSSES)
def test_loss_has_the_bits_of_detectron2_when_all_is_foreground(kind: str) -> None:
    slots = make_slots(333, 1.0)
    loss, gradient = with_gradient(ours, kind, slots)
    stock_loss, stock_gradient = with_gradient(stock, kind, slots)
    assert torch.equal(loss, stock_loss)
    assert kind != "smooth_l1" or torch.equal(gradient, stock_gradient)


@pytest.mark.parametrize("kind", BOX_LOSSES)
def test_touching_edges_pull_as_in_detectron2(kind: str) -> None:
    src = torch.tensor([[0.0, 0, 4, 4]]).expand(4, 4)
    target = torch.tensor([[4.0, 0, 8, 4], [0, 4, 4, 8], [4, 4, 8, 8], [0, 0, 4, 4]])
    pred = torch.zeros(4, 4, requires_grad=True)
    check(kind, (pred, src, target, torch.ones(4, dtype=torch.bool)), 1e-6)


@pytest.mark.parametrize("kind", BOX_LOSSES)
def test_what_is_not_foreground_has_no_effect(kind: str) -> None:
    slots = make_slots(60)
    clean = with_gradient(ours, kind, slots, beta=0.5)
    for place in range(3):
        for bad in (*BAD, 0.0):
            planted = [tensor.detach().clone() for tensor in slots]
            planted[place][~slots[-1]] = bad
            planted[0].requires_grad_()
            for found, expected in zip(
                with_gradient(ours, kind, planted, beta=0.5), clean, strict=True
            ):
                assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", BOX_LOSSES)
@pytest.mark.parametrize(
    "target", [(3.0, 1, 3, 5), (5, 5, 1, 1), (math.nan, 0, 4, 4), (1, 1, 1, 1)]
)
def test_impossible_targets_in_the_foreground_give_what_detectron2_gives(
    kind: str, target: Any
) -> None:
    slots = make_slots(9, 1.0)
    slots[2][4] = torch.tensor(target)
    for found, expected in zip(
        with_gradient(ours, kind, slots), with_gradient(stock, kind, slots), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=4e-6, atol=4e-6, equal_nan=True)


def test_a_nan_target_in_the_foreground_is_seen() -> None:
    for kind in BOX_LOSSES:
        slots = make_slots(9, 1.0)
        slots[2][4] = math.nan
        assert ours(kind, slots).isnan()


@pytest.mark.parametrize("kind", BOX_LOSSES)
def test_autocast_and_half_predictions(kind: str) -> None:
    slots = make_slots(100)
    slots = (slots[0].detach().bfloat16().requires_grad_(), *slots[1:])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, gradient = with_gradient(ours, kind, slots)
        stock_loss, stock_gradient = with_gradient(stock, kind, slots)
    assert loss.dtype == stock_loss.dtype == torch.float32
    torch.testing.assert_close(loss, stock_loss, rtol=4e-6, atol=4e-6)
    torch.testing.assert_close(gradient, stock_gradient)


def test_sources_are_valid_where_detectron2_accepts_them() -> None:
    transform = Box2BoxTransform(WEIGHTS["roi"])
    boxes = [(0.0, 0, 4, 4), (0, 4, 4, 0), (4, 0, 4, 4), (5, 0, 4, 4), (math.nan, 0, 4, 4)]
    accepted = []
    for box in boxes:
        src = torch.tensor([(0, 0, 1, 1), box])
        try:
            transform.get_deltas(src, src)
            accepted.append(True)
        except AssertionError:
            accepted.append(False)
        is_fg = torch.tensor([True, True])
        assert are_valid_sources(src, is_fg).item() is accepted[-1]
        assert are_valid_sources(src, torch.tensor([True, False]))
    assert accepted == [True, True, False, False, False]


def test_predictions_are_ordered_where_the_iou_losses_accept_them() -> None:
    good = torch.tensor([(0.0, 0, 1, 1), (2, 2, 2, 2)])
    assert are_ordered(good, torch.tensor([True, True]))
    for box in [(1.0, 0, 0, 1), (0, 1, 1, 0), (math.nan, 0, 1, 1), (0, 0, 1, math.nan)]:
        bad = torch.tensor([(0, 0, 1, 1), box])
        with pytest.raises(AssertionError):
            giou_loss(bad, good)
        assert not are_ordered(bad, torch.tensor([True, True]))
        assert are_ordered(bad, torch.tensor([True, False]))


def test_an_unknown_kind_is_told_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"'l2'.*smooth_l1, giou, diou, ciou"):
        ours("l2", make_slots(3))


@pytest.mark.parametrize("kind", BOX_LOSSES)
def test_nothing_depends_on_data_and_ops_do_not_grow(kind: str) -> None:
    ops = set()
    for shape in ((1, 8), (2, 64), (8, 64)):
        slots = [tensor.detach().unflatten(0, shape) for tensor in make_slots(math.prod(shape))]
        with count_data_dependent_ops() as count:
            slots[0].requires_grad_()
            ours(kind, slots, beta=0.5).backward()
            are_valid_sources(slots[1], slots[3])
            are_ordered(slots[2], slots[3])
        assert count.data_dependent == []
        ops.add(count.num_ops)
    assert len(ops) == 1
    with count_data_dependent_ops() as count:
        stock(kind, make_slots(64), beta=0.5)
    assert count.data_dependent


@pytest.mark.parametrize("kind", BOX_LOSSES)
def test_runs_without_data(kind: str) -> None:
    slots = [tensor.detach().to("meta") for tensor in make_slots(12)]
    slots[0].requires_grad_()
    loss, gradient = with_gradient(ours, kind, slots)
    assert loss.shape == ()
    assert gradient.shape == (12, 4)
    assert are_ordered(slots[1], slots[3]).shape == are_valid_sources(*slots[2:]).shape == ()


@pytest.mark.parametrize(
    ("kind", "backend"),
    [("ciou", "eager"), pytest.param("smooth_l1", "inductor", marks=needs_inductor)],
)
def test_compiles_to_one_graph(kind: str, backend: str) -> None:
    compiled = torch.compile(ours, fullgraph=True, backend=backend)
    slots = make_slots(40)
    loss, gradient = with_gradient(compiled, kind, slots, beta=0.5)
    eager_loss, eager_gradient = with_gradient(ours, kind, slots, beta=0.5)
    torch.testing.assert_close(loss, eager_loss, rtol=4e-6, atol=4e-6)
    torch.testing.assert_close(gradient, eager_gradient, rtol=4e-6, atol=4e-6)

"""Classification losses and counts over slots against Detectron2's on the valid rows alone."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from detectron2.layers import cross_entropy
from detectron2.modeling.roi_heads.fast_rcnn import (
    FastRCNNOutputLayers,
    _log_classification_stats,
)
from detectron2.utils.events import EventStorage
from torch import Tensor

from d2_static_sampler.losses.classes import (
    class_loss_mean,
    class_stats,
    objectness_loss_sum,
    sigmoid_class_loss,
)
from d2_static_sampler.profiling.op_counter import count_data_dependent_ops

NUM_CLASSES = 5
BAD = (math.nan, math.inf, -math.inf)
VALID = {"none": 0.0, "some": 0.7, "all": 1.0}


def make_slots(num: int, valid: float = 0.7, dtype: torch.dtype = torch.float32) -> Any:
    """Scores, classes and validity; what is not valid has no class at all."""
    random = torch.Generator().manual_seed(num)
    scores = torch.randn(num, NUM_CLASSES + 1, generator=random, dtype=dtype) * 3
    classes = torch.randint(NUM_CLASSES + 1, (num,), generator=random)
    is_valid = torch.rand(num, generator=random) < valid
    classes = torch.where(is_valid, classes, 10**9)
    return scores.requires_grad_(), classes, is_valid


def stock_mean(scores: Tensor, classes: Tensor, is_valid: Tensor) -> Tensor:
    return cross_entropy(scores[is_valid], classes[is_valid], reduction="mean")


def stock_sigmoid(scores: Tensor, classes: Tensor, is_valid: Tensor) -> Tensor:
    """Detectron2's own where it has it (its main branch), else the same in few words."""
    scores, classes = scores[is_valid], classes[is_valid]
    if hasattr(FastRCNNOutputLayers, "sigmoid_cross_entropy_loss"):
        layers = SimpleNamespace(use_fed_loss=False)
        loss = FastRCNNOutputLayers.sigmoid_cross_entropy_loss(layers, scores, classes)
        return loss + scores.sum() * 0  # without rows it is not connected
    target = F.one_hot(classes, NUM_CLASSES + 1)[:, :-1].to(scores.dtype)
    loss = F.binary_cross_entropy_with_logits(scores[:, :-1], target, reduction="none")
    return loss.sum() / max(len(scores), 1)


def objectness(logits: Tensor, labels: Tensor, is_valid: Tensor) -> Tensor:
    return objectness_loss_sum(logits, labels == 1, is_valid)


def stock_objectness(logits: Tensor, labels: Tensor, is_valid: Tensor) -> Tensor:
    target = (labels == 1)[is_valid].to(torch.float32)
    return F.binary_cross_entropy_with_logits(logits[is_valid], target, reduction="sum")


def make_logits(num: int, valid: float = 0.7, dtype: torch.dtype = torch.float32) -> Any:
    """Logits (2, num), labels of which -1 is not valid, and validity."""
    scores, classes, is_valid = make_slots(2 * num, valid, dtype)
    labels = torch.where(is_valid, (classes < 2).long(), -1)
    logits = scores.detach()[:, 0].reshape(2, num).requires_grad_()
    return logits, labels.view(2, num), is_valid.view(2, num)


LOSSES = {
    "mean": (class_loss_mean, stock_mean, make_slots),
    "sigmoid": (sigmoid_class_loss, stock_sigmoid, make_slots),
    "objectness": (objectness, stock_objectness, make_logits),
}
each_loss = pytest.mark.parametrize(("ours", "stock", "make"), LOSSES.values(), ids=LOSSES)


def with_gradient(loss_of: Any, slots: Any) -> tuple[Tensor, Tensor]:
    loss = loss_of(*slots)
    return loss.detach(), torch.autograd.grad(loss, slots[0])[0]


def check(ours: Any, stock: Any, slots: Any, tolerance: float) -> None:
    loss, gradient = with_gradient(ours, slots)
    stock_loss, stock_gradient = with_gradient(stock, slots)
    assert loss.shape == ()
    torch.testing.assert_close(loss, stock_loss, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradient, stock_gradient, rtol=tolerance, atol=tolerance)
    assert not gradient[~slots[-1]].any()


@pytest.mark.parametrize("valid", VALID.values(), ids=VALID)
@each_loss
def test_loss_and_gradient_equal_detectron2(ours: Any, stock: Any, make: Any, valid: float) -> None:
    for num in (1, 8, 300):
        check(ours, stock, make(num, valid), 1e-6)
        # Detectron2 sums the objectness in the type of its targets, float32.
        check(ours, stock, make(num, valid, torch.float64), 1e-6 if ours is objectness else 1e-12)


@each_loss
def test_no_slot_at_all(ours: Any, stock: Any, make: Any) -> None:
    loss, gradient = with_gradient(ours, make(0))
    assert loss == 0
    assert gradient.numel() == 0


@pytest.mark.parametrize("valid", VALID.values(), ids=VALID)
def test_the_gradient_of_the_mean_has_the_bits_of_detectron2(valid: float) -> None:
    slots = make_slots(200, valid)
    gradient = with_gradient(class_loss_mean, slots)[1]
    assert torch.equal(gradient, with_gradient(stock_mean, slots)[1])


@each_loss
def test_what_is_not_valid_has_no_effect(ours: Any, stock: Any, make: Any) -> None:
    scores, classes, is_valid = make(40)
    clean = with_gradient(ours, (scores, classes, is_valid))
    for bad in BAD:
        planted = scores.detach().clone()
        planted[~is_valid] = bad
        other = torch.where(is_valid, classes, 1)
        found = with_gradient(ours, (planted.requires_grad_(), other, is_valid))
        assert torch.equal(found[0], clean[0])
        assert torch.equal(found[1], clean[1])


@each_loss
def test_a_nan_in_a_valid_slot_is_seen(ours: Any, stock: Any, make: Any) -> None:
    scores, classes, is_valid = make(40)
    scores.data[tuple(is_valid.nonzero()[3].tolist())] = math.nan
    assert ours(scores, classes, is_valid).isnan()


@each_loss
def test_autocast_and_half_scores(ours: Any, stock: Any, make: Any) -> None:
    scores, *rest = make(64)
    slots = (scores.detach().bfloat16().requires_grad_(), *rest)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ours(*slots).dtype == stock(*slots).dtype == torch.float32
        check(ours, stock, slots, 1e-6)


def logged(scores: Tensor, classes: Tensor) -> dict[str, float]:
    with EventStorage() as storage:
        _log_classification_stats(scores, classes)
    return {name.split("/")[1]: value for name, (value, _) in storage.latest().items()}


@pytest.mark.parametrize("valid", VALID.values(), ids=VALID)
def test_counts_give_what_detectron2_logs(valid: float) -> None:
    for num in (1, 2, 200):
        scores, classes, is_valid = make_slots(num, valid)
        scores.data[~is_valid] = math.nan  # the highest score is that of class 0
        classes = torch.where(is_valid, classes, 0)
        if num == 2:
            classes = torch.where(is_valid, NUM_CLASSES, classes)  # no foreground
        stats = class_stats(scores, classes, is_valid)
        assert all(count.shape == () and count.dtype == torch.int64 for count in stats)
        ours = {}
        if stats.num_valid:
            ours["cls_accuracy"] = stats.num_accurate.item() / stats.num_valid.item()
        if stats.num_fg:
            ours["fg_cls_accuracy"] = stats.num_fg_accurate.item() / stats.num_fg.item()
            ours["false_negative"] = stats.num_false_negative.item() / stats.num_fg.item()
        assert ours == logged(scores[is_valid], classes[is_valid])


@each_loss
def test_nothing_depends_on_data_and_ops_do_not_grow(ours: Any, stock: Any, make: Any) -> None:
    ops = set()
    for num in (8, 64, 512):
        slots = make(num)
        with count_data_dependent_ops() as count:
            ours(*slots).backward()
            if slots[0].dim() == slots[1].dim() + 1:
                class_stats(*slots)
        assert count.data_dependent == []
        ops.add(count.num_ops)
    assert len(ops) == 1
    with count_data_dependent_ops() as count:
        stock(*make(64))
    assert count.data_dependent


@each_loss
def test_runs_without_data(ours: Any, stock: Any, make: Any) -> None:
    slots = [tensor.detach().to("meta") for tensor in make(12)]
    slots[0].requires_grad_()
    loss, gradient = with_gradient(ours, slots)
    assert loss.shape == ()
    assert gradient.shape == slots[0].shape
    if make is make_slots:
        assert class_stats(*slots).num_fg.shape == ()


@each_loss
def test_compiles_to_one_graph(ours: Any, stock: Any, make: Any) -> None:
    slots = make(64)
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    for found, expected in zip(
        with_gradient(compiled, slots), with_gradient(ours, slots), strict=True
    ):
        assert torch.equal(found, expected)


def test_counts_compile_to_one_graph() -> None:
    slots = make_slots(64)
    compiled = torch.compile(class_stats, fullgraph=True, backend="eager")
    assert compiled(*slots) == class_stats(*slots)

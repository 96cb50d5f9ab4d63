"""Candidates, suppression and proposals of the static step are those of Detectron2."""

from __future__ import annotations

import copy
import functools
import math

import pytest
import torch
from detectron2.layers import batched_nms
from detectron2.utils.events import EventStorage
from hypothesis import given, settings
from hypothesis import strategies as st

from d2_static_sampler import install_sampler
from d2_static_sampler.modeling.proposals import (
    are_larger,
    clip_boxes,
    top_candidates,
)
from d2_static_sampler.modeling.static_rpn import AnchorPredictions
from d2_static_sampler.ops import nms_topk
from d2_static_sampler.profiling.op_counter import count_data_dependent_ops
from tests.modeling.models import MODELS

SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, -1e-30, 3e4, -3e4, math.inf, -math.inf, math.nan]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.integers(1, 3),
    st.lists(st.integers(0, 12), min_size=1, max_size=3),
    st.integers(0, 14),
    st.sampled_from(DTYPES),
    st.randoms(use_true_random=False),
)
def test_candidates_are_those_of_a_stable_sort(num_images, sizes, limit, dtype, random):
    scores = [
        torch.tensor([random.choice(SPECIAL) for _ in range(num_images * size)])
        .to(dtype)
        .view(num_images, size)
        for size in sizes
    ]
    before = [level.clone() for level in scores]
    index, levels = top_candidates(scores, limit)
    first, expected, expected_levels = 0, [], []
    for number, level in enumerate(scores):
        order = level.sort(dim=1, descending=True, stable=True).indices[:, :limit]
        expected.append(order + first)
        expected_levels += [number] * order.shape[1]
        first += level.shape[1]
    assert torch.equal(index, torch.cat(expected, dim=1))
    assert levels.tolist() == expected_levels
    assert (index.dtype, levels.dtype) == (torch.int64, torch.int64)
    for now, then in zip(scores, before, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)


def test_candidates_with_a_nan_of_either_sign():
    quiet = torch.tensor([0x7FC00000, -0x400000, 0x3F800000], dtype=torch.int32)
    scores = quiet.view(torch.float32)[None]  # nan, -nan, 1
    assert top_candidates([scores], 3)[0].tolist() == [[0, 1, 2]]


def candidates(num_images, num_boxes, *, ties, seed=0):
    random = torch.Generator().manual_seed(seed)
    corner = torch.rand(num_images, num_boxes, 2, generator=random) * 60
    size = torch.rand(num_images, num_boxes, 2, generator=random) * 40
    scores = torch.rand(num_images, num_boxes, generator=random)
    if ties:
        scores = (scores * 4).round()
    levels = torch.arange(num_boxes) * 3 // max(1, num_boxes)
    is_valid = torch.rand(num_images, num_boxes, generator=random) > 0.3
    return torch.cat([corner, corner + size], dim=2), scores, levels, is_valid


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("limit", [1, 10, 500])
@pytest.mark.parametrize("num_boxes", [0, 1, 200])
@pytest.mark.parametrize("valid", ["some", "all", "none"])
def test_suppression_keeps_what_batched_nms_keeps(ties, limit, num_boxes, valid):
    boxes, scores, levels, is_valid = candidates(3, num_boxes, ties=ties)
    if valid != "some":
        is_valid = torch.full_like(is_valid, valid == "all")
    index, count = nms_topk(boxes, scores, levels, is_valid, 0.5, limit)
    assert index.shape == (3, limit)
    assert count.shape == (3,)
    for i, mask in enumerate(is_valid):
        kept = batched_nms(boxes[i][mask], scores[i][mask], levels[mask], 0.5)[:limit]
        expected = torch.arange(num_boxes)[mask][kept].tolist()
        assert count[i] == len(expected)
        assert index[i].tolist() == expected + [0] * (limit - len(expected))


def test_levels_do_not_suppress_each_other():
    boxes = torch.tensor([0.0, 0.0, 9.0, 9.0]).expand(1, 3, 4)
    scores, is_valid = torch.tensor([[0.1, 0.3, 0.2]]), torch.ones(1, 3, dtype=torch.bool)
    index, count = nms_topk(boxes, scores, torch.tensor([0, 1, 1]), is_valid, 0.5, 4)
    assert index.tolist() == [[1, 0, 0, 0]]
    assert count.tolist() == [2]


def test_the_operation_keeps_the_rules():
    torch.library.opcheck(nms_topk, (*candidates(2, 30, ties=False), 0.5, 8))


def test_clipping_and_sizes():
    boxes = torch.tensor([[[-5.0, -5, 50, 50], [3, 4, 8, 9], [60, 0, 70, 5], [8, 4, 3, 9]]])
    clipped = clip_boxes(boxes, torch.tensor([[40.0, 30, 40, 30]]))
    assert clipped.tolist() == [[[0, 0, 40, 30], [3, 4, 8, 9], [40, 0, 40, 5], [8, 4, 3, 9]]]
    assert are_larger(clipped, 0).tolist() == [[True, True, False, False]]
    assert are_larger(clipped, 5).tolist() == [[True, False, False, False]]


@functools.cache
def rpn_of(*opts):
    return MODELS["rpn_only"]().build(*opts).proposal_generator


def predictions(rpn, num_images, *, spread, dtype=torch.float32):
    """Anchors, scores without ties, and deltas for 64 x 96 images."""
    maps = [torch.zeros(1, 1, 64 // 2**i, 96 // 2**i) for i in range(2, 7)]
    anchors = rpn.anchor_generator(maps)
    random = torch.Generator().manual_seed(1)
    total = sum(map(len, anchors))
    scores = torch.stack([torch.randperm(total, generator=random) for _ in range(num_images)])
    deltas = torch.randn(num_images, total, 4, generator=random) * spread
    sizes = [len(level) for level in anchors]
    scores = (scores.to(dtype) / 64 - 40).split(sizes, dim=1)
    return anchors, list(scores), list(deltas.split(sizes, dim=1))


def propose(static, anchors, scores, deltas, sizes):
    """The static step's proposals from the same predictions."""
    logits, shifts = torch.cat(scores, dim=1), torch.cat(deltas, dim=1)
    boxes = torch.cat([level.tensor for level in anchors])
    with torch.no_grad():
        return static.propose(AnchorPredictions(boxes, scores, logits, shifts), sizes)


SETTINGS = {
    "usual": (),
    "all that there is": (
        *("MODEL.RPN.PRE_NMS_TOPK_TRAIN", 100000),
        *("MODEL.RPN.POST_NMS_TOPK_TRAIN", 5000),
    ),
    "large boxes": ("MODEL.PROPOSAL_GENERATOR.MIN_SIZE", 20),
    "none": ("MODEL.PROPOSAL_GENERATOR.MIN_SIZE", 1000),
    "little overlap": ("MODEL.RPN.NMS_THRESH", 0.1),
    "three": ("MODEL.RPN.POST_NMS_TOPK_TRAIN", 3),
}


@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("name", SETTINGS)
def test_proposals_are_detectron2s(name, spread):
    stock = rpn_of(*SETTINGS[name])
    static = install_sampler(copy.deepcopy(stock), "static", static_step=True)
    sizes = [(64, 96), (50, 33), (64, 64)]
    inputs = (*predictions(stock, 3, spread=spread), sizes)
    with torch.no_grad():
        expected = stock.predict_proposals(*inputs)
        with EventStorage():
            got = propose(static, *inputs)
    for image, of_stock, size in zip(got.to_instances(), expected, sizes, strict=True):
        assert image.image_size == of_stock.image_size == size
        assert image.get_fields().keys() == of_stock.get_fields().keys()
        assert torch.equal(image.proposal_boxes.tensor, of_stock.proposal_boxes.tensor)
        assert torch.equal(image.objectness_logits, of_stock.objectness_logits)
    assert got.num_boxes.tolist() == [len(image) for image in expected]


def test_only_suppression_may_wait():
    static = install_sampler(copy.deepcopy(rpn_of()), "static", static_step=True)
    with EventStorage(), count_data_dependent_ops() as count:
        propose(static, *predictions(static, 2, spread=0.5), [(64, 96)] * 2)
    assert count.data_dependent == []
    assert count.num_ops > 20


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_box_that_is_not_finite_is_no_proposal(bad):
    """Training is stopped by a check at the next flush; until then others have to bear it."""
    static = install_sampler(copy.deepcopy(rpn_of()), "static", static_step=True)
    anchors, scores, deltas = predictions(static, 2, spread=0.5)
    for level in deltas:
        level[1] = bad
    with EventStorage():
        got = propose(static, anchors, scores, deltas, [(64, 96)] * 2)
    assert got.num_boxes.tolist() == [50, 0]
    assert got.boxes.isfinite().all()

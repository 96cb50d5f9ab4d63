"""Both ways to match have the bits of Detectron2's Matcher on its own overlaps, ties included."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from detectron2.modeling.anchor_generator import DefaultAnchorGenerator
from detectron2.modeling.matcher import Matcher
from detectron2.structures import Boxes, pairwise_iou
from hypothesis import given, settings
from hypothesis import strategies as st

from d2_static_sampler.ops import matching
from d2_static_sampler.ops.matching import MatchRule, match_boxes, match_in_torch, match_op
from d2_static_sampler.profiling.peak_memory import peak_bytes


def match_by_body(truth, num_truth, boxes, rule):
    return match_in_torch(truth, num_truth, boxes, rule.thresholds, rule.labels, rule.low_quality)


WAYS = {"kernel": match_boxes, "body": match_by_body}
RULES = {
    "rpn": MatchRule((0.3, 0.7), (0, -1, 1), low_quality=True),
    "rpn, strict": MatchRule((0.3, 0.7), (0, -1, 1)),
    "roi": MatchRule((0.5,), (0, 1)),
    "one level, low quality": MatchRule((0.5,), (-1, 1), low_quality=True),
    "upside down": MatchRule((0.2, 0.6), (1, -1, 0), low_quality=True),
    "three levels": MatchRule((0.1, 1 / 3, 0.9), (-1, 1, 0, 1)),
    "equal": MatchRule((0.5, 0.5, 1.0), (-1, 1, 0, 1), low_quality=True),
}
NAN, INF = math.nan, math.inf
# Ground truth of odd kinds; the boxes are anchors of 3 levels of a 96 x 160 image.
TRUTH = {
    "usual": [[10.0, 10, 40, 50], [60, 20, 120, 90], [0, 0, 160, 96]],
    "none": [],
    "one": [[30.0, 30, 60, 60]],
    "no area": [[30.0, 30, 30, 60], [10, 40, 50, 40], [20, 20, 20, 20]],
    "inverted": [[60.0, 30, 30, 60], [30, 60, 60, 30], [60, 60, 30, 30], [10, 10, 40, 50]],
    "not a number": [[NAN, 10, 40, 50], [10, 10, NAN, 50], [60, 20, 120, NAN], [5, 5, 60, 60]],
    "outside": [[500.0, 500, 600, 600], [-90, -90, -70, -70], [10, 10, 40, 50]],
    "twice": [[10.0, 10, 40, 50]] * 3,
    "on the border": [[0.0, 0, 32, 32], [128, 64, 160, 96], [159, 95, 160, 96]],
    "one side infinite": [[20.0, 20, INF, 60], [10, 10, 40, 50]],
    "all infinite": [[-INF, -INF, INF, INF], [10, 10, 40, 50]],
    "infinitely far": [[INF, INF, INF, INF]],
}


@functools.cache
def anchors_of_a_generator():
    generator = DefaultAnchorGenerator(
        sizes=[[16], [32], [64]], aspect_ratios=[[0.5, 1.0, 2.0]], strides=[4, 8, 16]
    )
    maps = [torch.zeros(1, 1, 96 // stride, 160 // stride) for stride in (4, 8, 16)]
    return Boxes.cat(generator(maps)).tensor


def as_stocks(tensor):
    boxes = Boxes(tensor)
    boxes.tensor = tensor  # keeps float64
    return boxes


def of_stock(truth, counts, boxes, rule):
    """As :func:`match_boxes`; False alone where Detectron2 refuses."""
    matcher = Matcher(list(rule.thresholds), list(rule.labels), rule.low_quality)
    found = []
    for i, count in enumerate(counts):
        of_image = boxes if boxes.dim() == 2 else boxes[i]
        overlaps = pairwise_iou(as_stocks(truth[i, :count]), as_stocks(of_image))
        try:
            found.append(matcher(overlaps))
        except AssertionError:
            return None, None, False
    matches, labels = zip(*found, strict=True)
    return torch.stack(matches), torch.stack(labels), True


def assert_equals_detectron2(way, truth, counts, boxes, rule):
    matches, labels, is_right = of_stock(truth, counts, boxes, rule)
    before = truth.clone(), boxes.clone()
    got = WAYS[way](truth, torch.tensor(counts), boxes, rule)
    assert got[2].shape == ()
    assert bool(got[2]) is is_right
    if is_right:
        assert (got[0].dtype, got[1].dtype) == (torch.int64, torch.int8)
        assert torch.equal(got[0], matches)
        assert torch.equal(got[1], labels)
    for now, then in zip((truth, boxes), before, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)


def padded(*images):
    """(B, G, 4), G >= 2, filled up with a box that would match much; and the counts."""
    truth = torch.tensor([0.0, 0.0, 160.0, 96.0]).repeat(len(images), max(2, *map(len, images)), 1)
    for row, boxes in zip(truth, images, strict=True):
        row[: len(boxes)] = torch.as_tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    return truth, [len(boxes) for boxes in images]


@st.composite
def grids(draw):
    """Boxes on a coarse grid, where overlaps are often equal; some are flat or inverted."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    size = draw(st.integers(2, 9))
    num_images, num_truth = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    num_boxes = draw(st.sampled_from([0, 1, 2, 7, 127, 128, 129, 300]))
    own = draw(st.booleans())
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))

    def grid(*shape):
        boxes = torch.randint(0, size, (*shape, 4), generator=generator)
        if draw(st.booleans()):
            low, high = boxes.split(2, dim=-1)
            boxes = torch.cat([torch.minimum(low, high), torch.maximum(low, high)], dim=-1)
        return boxes.to(dtype) * draw(st.sampled_from([1.0, 0.3]))

    counts = torch.randint(0, num_truth + 1, (num_images,), generator=generator).tolist()
    boxes = grid(num_images, num_boxes) if own else grid(num_boxes)
    return grid(num_images, num_truth), counts, boxes


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=80, deadline=None, derandomize=True)
@given(grids(), st.sampled_from(sorted(RULES)), st.sampled_from([1 << 19, 64, 1]))
def test_ties_on_a_grid(way, case, rule, budget):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(matching._BLOCK_ELEMENTS, "cpu", budget)
        assert_equals_detectron2(way, *case, RULES[rule])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", TRUTH)
def test_odd_truth_and_real_anchors(way, rule, name, monkeypatch):
    """Beside an image with usual truth, in blocks whose last one is not full."""
    monkeypatch.setitem(matching._BLOCK_ELEMENTS, "cpu", 8 * 1000)
    truth, counts = padded(TRUTH[name], TRUTH["usual"])
    assert_equals_detectron2(way, truth, counts, anchors_of_a_generator(), RULES[rule])


@pytest.mark.parametrize("way", WAYS)
def test_truth_among_the_boxes(way):
    """Some anchors are the ground truth, some touch it at an edge; own boxes in each image."""
    anchors = anchors_of_a_generator()
    truth, counts = padded(anchors[100:900:50], [], anchors[5:6])
    touching = truth[0] + (truth[0, :, 2:] - truth[0, :, :2]).repeat(1, 2)
    boxes = torch.stack([torch.cat([anchors[i:500:3][:100], touching]) for i in range(3)])
    for rule in RULES.values():
        assert_equals_detectron2(way, truth, counts, boxes, rule)


@pytest.mark.parametrize("name", [name for name in TRUTH if "infinite" in name])
@pytest.mark.parametrize("way", WAYS)
def test_infinite_truth_among_the_boxes_is_refused_where_detectron2_refuses(way, name):
    truth, counts = padded(TRUTH["usual"], TRUTH[name])
    boxes = torch.cat([truth[1, : counts[1]], anchors_of_a_generator()[:50]])
    refused = not of_stock(truth, counts, boxes, RULES["roi"])[2]
    assert refused is (name != "infinitely far")
    assert_equals_detectron2(way, truth, counts, boxes, RULES["roi"])


@pytest.mark.parametrize("way", WAYS)
def test_very_much_truth(way):
    random = torch.Generator().manual_seed(0)
    corner = torch.rand(3000, 2, generator=random) * 80
    many = torch.cat([corner, corner + torch.rand(3000, 2, generator=random) * 60], dim=1)
    truth, counts = padded(many, [])
    boxes = anchors_of_a_generator()[::9]
    assert_equals_detectron2(way, truth, counts, boxes, RULES["rpn"])


@pytest.mark.parametrize("way", WAYS)
def test_memory_stays_far_below_all_overlaps(way):
    anchors = anchors_of_a_generator()
    truth, counts = padded(anchors[:3000], *[anchors[:1]] * 3)
    num_truth = torch.tensor(counts)
    peak = peak_bytes(lambda: WAYS[way](truth, num_truth, anchors, RULES["rpn"]))
    assert 0 < peak < 0.15 * truth[..., 0].numel() * len(anchors) * 4


def test_the_operation_keeps_the_rules():
    truth, counts = padded(TRUTH["usual"], [])
    rule = RULES["rpn"]
    arguments = (
        truth, torch.tensor(counts), anchors_of_a_generator()[:40],
        list(rule.thresholds), list(rule.labels), rule.low_quality,
    )  # fmt: skip
    torch.library.opcheck(match_op, arguments)

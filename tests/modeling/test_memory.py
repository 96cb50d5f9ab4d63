"""How much memory the labelling of a crowded image takes: counted, not timed."""

from __future__ import annotations

import pytest
import torch
from detectron2.structures import Boxes, Instances, pairwise_iou
from detectron2.utils.events import EventStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from d2_static_sampler import install_sampler
from d2_static_sampler.profiling.peak_memory import peak_bytes
from tests.helpers import small_model

SIZE = 96
CROWD = 3000
NUM_CANDIDATES = 1000
# Bytes a candidate that sampling the whole batch may add to labelling image by image.
PER_CANDIDATE = 32
COUNTS = (1, CROWD, 1, 1)


def random_boxes(n):
    corner = torch.rand(n, 2) * SIZE * 0.7
    return Boxes(torch.cat([corner, corner + torch.rand(n, 2) * SIZE * 0.3 + 1], dim=1))


def random_truth():
    return [
        Instances(
            (SIZE, SIZE), gt_boxes=random_boxes(n), gt_classes=torch.zeros(n, dtype=torch.int64)
        )
        for n in COUNTS
    ]


def label_anchors(impl):
    """A call of the RPN's label_and_sample_anchors."""
    rpn = install_sampler(small_model().proposal_generator, impl)
    anchors, truth = [random_boxes(NUM_CANDIDATES)], random_truth()
    return lambda: rpn.label_and_sample_anchors(anchors, truth)


def label_proposals(impl):
    """The same of the ROI heads, without the truth among the proposals."""
    heads = install_sampler(small_model().roi_heads, impl)
    heads.proposal_append_gt = False
    truth = random_truth()
    proposals = [
        Instances(
            (SIZE, SIZE),
            proposal_boxes=random_boxes(NUM_CANDIDATES),
            objectness_logits=torch.rand(NUM_CANDIDATES),
        )
        for _ in COUNTS
    ]

    def call():
        with EventStorage():
            heads.label_and_sample_proposals(proposals, truth)

    return call


def peak(call):
    call()  # what is made once, graphs among it, is no part of the labelling
    return peak_bytes(call)


@pytest.mark.parametrize("label", [label_anchors, label_proposals])
def test_a_crowded_image_costs_what_it_costs_alone(label):
    """Not a matrix as large as the crowd's for each of the other images."""
    naive = peak(label("naive"))
    assert naive > CROWD * NUM_CANDIDATES * 4  # the crowd's overlaps, in float32
    limit = naive + PER_CANDIDATE * len(COUNTS) * NUM_CANDIDATES
    for impl in ("static", "compiled"):
        assert peak(label(impl)) <= limit


class largest_tensor(TorchDispatchMode):
    """A context that keeps the most elements that one tensor had in it."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.numel = max(self.numel, *sizes, 0)
        return out


@pytest.mark.parametrize("impl", ["naive", "static", "compiled"])
@pytest.mark.parametrize("label", [label_anchors, label_proposals])
def test_no_tensor_of_all_images_overlaps(label, impl):
    call = label(impl)
    with largest_tensor() as largest:
        call()
    # Detectron2 intersects the corners of each pair of boxes: two numbers a pair.
    assert largest.numel == 2 * CROWD * NUM_CANDIDATES


def all_at_once():
    """The overlaps of as many images as there are, each with as much truth as the crowd."""
    boxes = random_boxes(NUM_CANDIDATES)
    return torch.stack([pairwise_iou(random_boxes(CROWD), boxes) for _ in COUNTS])


def test_overlaps_of_all_images_at_once_are_seen():
    with largest_tensor() as largest:
        all_at_once()
    assert largest.numel > 2 * CROWD * NUM_CANDIDATES
    limit = peak(label_anchors("naive")) + PER_CANDIDATE * len(COUNTS) * NUM_CANDIDATES
    assert peak(all_at_once) > limit

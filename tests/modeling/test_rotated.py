"""The seams of rotated heads, by themselves: their overlaps need Detectron2's C++ operators."""

from __future__ import annotations

import detectron2.modeling.roi_heads.roi_heads as stock_roi_heads
import pytest
import torch
from detectron2.modeling.proposal_generator.rrpn import RRPN
from detectron2.modeling.roi_heads.rotated_fast_rcnn import RROIHeads
from detectron2.structures import Instances, RotatedBoxes
from detectron2.utils.events import EventStorage

from d2_static_sampler import install_sampler
from d2_static_sampler.modeling import installed_samplers
from d2_static_sampler.modeling.roi_heads import BatchRotatedProposalSampler
from tests.helpers import ReplaySampler, small_model
from tests.modeling.rotated_operators import replace_overlaps


@pytest.fixture(autouse=True)
def _overlaps_without_operators(monkeypatch):
    replace_overlaps(monkeypatch)


def rotated_boxes(n: int) -> RotatedBoxes:
    return RotatedBoxes(torch.rand(n, 5) * torch.tensor([60, 60, 20, 20, 90]) + 5)


def targets():
    """Two images, the second without ground truth, the first with a box of 0.1 x 0.1."""
    truth = []
    for n in (3, 0):
        boxes = rotated_boxes(n)
        boxes.tensor[:1, 2:4] = 0.1
        truth.append(
            Instances((96, 96), gt_boxes=boxes, gt_classes=torch.arange(n), gt_own=[0] * n)
        )
    return truth


def record(monkeypatch):
    picks = []

    def subsample(*args, stock=stock_roi_heads.subsample_labels):
        picks.append(stock(*args))
        return picks[-1]

    monkeypatch.setattr(stock_roi_heads, "subsample_labels", subsample)
    return picks


def test_proposals_are_stocks(monkeypatch):
    heads = small_model().roi_heads
    heads.__class__ = RROIHeads
    truth = targets()
    proposals = [
        Instances((96, 96), proposal_boxes=rotated_boxes(50), objectness_logits=torch.rand(50))
        for _ in truth
    ]
    picks = record(monkeypatch)
    with EventStorage() as storage:
        expected = heads.label_and_sample_proposals(proposals, truth)
        logged = storage.latest()
    install_sampler(heads, ReplaySampler([picks]))
    assert isinstance(heads, BatchRotatedProposalSampler)
    with EventStorage() as storage:
        got = heads.label_and_sample_proposals(proposals, truth)
        assert storage.latest() == logged
    for a, b in zip(got, expected, strict=True):
        assert list(a.get_fields()) == list(b.get_fields())
        for name in ("proposal_boxes", "gt_boxes"):
            assert a.has(name) == b.has(name)
            if b.has(name):
                assert torch.equal(a.get(name).tensor, b.get(name).tensor)
        assert torch.equal(a.gt_classes, b.gt_classes)


def test_anchors_are_sampled_in_one_call():
    rpn = small_model().proposal_generator
    rpn.__class__ = RRPN
    install_sampler(rpn, "static")
    labels, boxes = rpn.label_and_sample_anchors([rotated_boxes(2000)], targets())
    assert installed_samplers(rpn)[rpn].calls == 1
    assert [tuple(x.shape) for x in boxes] == [(2000, 5)] * 2
    for vector in labels:
        assert (vector >= 0).sum() == rpn.batch_size_per_image
    assert (labels[1] != 1).all()

"""What a user wrote of a head's sampling stays theirs, method by method."""

from __future__ import annotations

import pytest
import torch
from detectron2.modeling.proposal_generator.rpn import RPN
from detectron2.modeling.roi_heads import ROIHeads, StandardROIHeads
from detectron2.utils.events import EventStorage

from d2_static_sampler import install_sampler, uninstall_sampler
from d2_static_sampler.modeling import installed_samplers
from tests.helpers import make_batch, small_model, step


class OwnLoop(StandardROIHeads):
    def label_and_sample_proposals(self, proposals, targets):
        self.loops = getattr(self, "loops", 0) + 1
        return super().label_and_sample_proposals(proposals, targets)


class OwnPick(StandardROIHeads):
    def _sample_proposals(self, matched_idxs, matched_labels, gt_classes):
        self.picks = getattr(self, "picks", 0) + 1
        return super()._sample_proposals(matched_idxs, matched_labels, gt_classes)


class OwnAnchorPick(RPN):
    def _subsample_labels(self, label):
        self.picks = getattr(self, "picks", 0) + 1
        return super()._subsample_labels(label)


class OwnAnchorLoop(RPN):
    def label_and_sample_anchors(self, anchors, gt_instances):
        self.loops = getattr(self, "loops", 0) + 1
        return super().label_and_sample_anchors(anchors, gt_instances)


@pytest.mark.parametrize(
    ("head", "cls", "method", "counter", "calls", "sampler_calls"),
    [
        ("roi_heads", OwnLoop, "label_and_sample_proposals", "loops", 1, 2),
        ("roi_heads", OwnPick, "_sample_proposals", "picks", 2, None),
        ("proposal_generator", OwnAnchorLoop, "label_and_sample_anchors", "loops", 1, 2),
        ("proposal_generator", OwnAnchorPick, "_subsample_labels", "picks", 2, None),
    ],
)
def test_a_users_override_wins_for_its_method(
    head, cls, method, counter, calls, sampler_calls, warnings_of_detectron2
):
    model = small_model()
    module = getattr(model, head)
    module.__class__ = cls
    install_sampler(model, "static")
    assert len(warnings_of_detectron2) == 1
    assert method in warnings_of_detectron2[0]
    assert cls.__name__ in warnings_of_detectron2[0]
    losses, _, _ = step(model, make_batch((2, 0)))
    assert all(torch.isfinite(loss) for loss in losses.values())
    assert getattr(module, counter) == calls
    sampler = installed_samplers(model).get(module)
    assert (sampler and sampler.calls) == sampler_calls
    uninstall_sampler(model)
    assert type(module) is cls


def test_a_method_patched_into_detectron2_wins(monkeypatch, warnings_of_detectron2):
    calls = []

    def mine(self, *args, stock=ROIHeads._sample_proposals):
        calls.append(args)
        return stock(self, *args)

    monkeypatch.setattr(ROIHeads, "_sample_proposals", mine)
    model = install_sampler(small_model(), "static")
    assert "_sample_proposals" in warnings_of_detectron2[0]
    step(model, make_batch((2, 1)))
    assert len(calls) == 2


def test_a_method_of_the_instance_wins(warnings_of_detectron2):
    model = small_model()
    heads, calls = model.roi_heads, []

    def mine(*args):
        calls.append(args)
        return type(heads).label_and_sample_proposals(heads, *args)

    heads.label_and_sample_proposals = mine
    install_sampler(model, "static")
    assert "label_and_sample_proposals" in warnings_of_detectron2[0]
    step(model, make_batch((2, 1)))
    assert len(calls) == 1


SEEN = []


class Registering(StandardROIHeads):
    """A head whose owner does something for each of its subclasses."""

    def __init_subclass__(cls, *, tag, **kwargs):
        super().__init_subclass__(**kwargs)
        SEEN.append((cls, tag))


class Registered(Registering, tag=3):
    pass


def test_an_owners_init_subclass_is_not_called_for_ours():
    model = small_model()
    model.roi_heads.__class__ = Registered
    install_sampler(model, "static")
    assert [(Registered, 3)] == SEEN
    step(model, make_batch((2,)))


def test_the_state_is_clean_after_an_error():
    model = install_sampler(small_model(), "static")
    batch = make_batch((2, 1))
    batch[1]["instances"].gt_boxes.tensor[0, 2] = float("inf")
    with EventStorage(), pytest.raises(AssertionError):
        model(batch)
    losses, _, _ = step(model, make_batch((2, 1)))
    assert all(torch.isfinite(loss) for loss in losses.values())
    label = torch.zeros(5000, dtype=torch.int8)
    model.proposal_generator._subsample_labels(label)
    assert (label == 0).sum() == model.proposal_generator.batch_size_per_image


@pytest.mark.parametrize("impl", ["naive", "static"])
def test_no_image_at_all(impl):
    model = install_sampler(small_model(), impl)
    with EventStorage():
        assert model.roi_heads.label_and_sample_proposals([], []) == []
    anchors = model.proposal_generator.anchor_generator([torch.rand(1, 64, 4, 4)] * 4)
    assert model.proposal_generator.label_and_sample_anchors(anchors, []) == ([], [])

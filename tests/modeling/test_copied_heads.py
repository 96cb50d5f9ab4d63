"""Heads that copy Detectron2's get the sampler where they call its ``subsample_labels``."""

from __future__ import annotations

import copy
import pickle

import detectron2.modeling.roi_heads.roi_heads as stock
import pytest
import torch
from detectron2.modeling.roi_heads import StandardROIHeads, select_foreground_proposals
from detectron2.modeling.sampling import subsample_labels
from detectron2.modeling.sampling import subsample_labels as pick
from detectron2.structures import pairwise_iou
from detectron2.utils.events import EventStorage
from torch import nn

from d2_static_sampler import LabelSample, build_label_sampler, install_sampler, uninstall_sampler
from d2_static_sampler.modeling import installed_samplers
from tests.helpers import record_picks, step
from tests.modeling.models import MODELS


class CopiedROIHeads(nn.Module):
    """No subclass: the methods, as a project would have copied them."""

    def __init__(self, heads):
        super().__init__()
        for name, value in vars(heads).items():
            if not name.startswith("_"):
                setattr(self, name, value)
        for name, child in heads.named_children():
            setattr(self, name, child)

    def _sample_proposals(self, matched_idxs, matched_labels, gt_classes):
        if gt_classes.numel() > 0:
            gt_classes = gt_classes[matched_idxs]
            gt_classes[matched_labels == 0] = self.num_classes
        else:
            gt_classes = torch.zeros_like(matched_idxs) + self.num_classes
        picked = subsample_labels(
            gt_classes, self.batch_size_per_image, self.positive_fraction, self.num_classes
        )
        index = torch.cat(picked)
        return index, gt_classes[index]

    def label_and_sample_proposals(self, proposals, targets):
        proposals = stock.add_ground_truth_to_proposals(targets, proposals)
        sampled = []
        for image, truth in zip(proposals, targets, strict=True):
            quality = pairwise_iou(truth.gt_boxes, image.proposal_boxes)
            index, classes = self._sample_proposals(
                *self.proposal_matcher(quality), truth.gt_classes
            )
            taken = image[index]
            taken.gt_classes = classes
            if len(truth):
                matches, _ = self.proposal_matcher(quality)
                taken.gt_boxes = truth.gt_boxes[matches[index]]
            sampled.append(taken)
        return sampled

    def forward(self, images, features, proposals, targets=None):
        sampled = self.label_and_sample_proposals(proposals, targets)
        return sampled, StandardROIHeads._forward_box(self, features, sampled)


class OtherName(CopiedROIHeads):
    """Calls it by another name, in a function of its own."""

    def _sample_proposals(self, matched_idxs, matched_labels, gt_classes):
        def picked():
            return pick(classes, self.batch_size_per_image, self.positive_fraction, 3)

        classes = torch.where(matched_labels == 0, 3, gt_classes.new_zeros(len(matched_idxs)))
        index = torch.cat(picked())
        return index, classes[index]


class OwnSampling(CopiedROIHeads):
    """Takes the first candidates."""

    def _sample_proposals(self, matched_idxs, matched_labels, gt_classes):
        index = torch.arange(min(len(matched_idxs), 4))
        return index, torch.full_like(index, self.num_classes)


def with_heads(cls):
    tiny = MODELS["faster_fpn"]()
    model = tiny.build()
    model.roi_heads = cls(model.roi_heads)
    return tiny, model.train()


class ReplayImages:
    """Recorded picks, an image after the other."""

    def __init__(self, picks):
        self.picks = list(picks)

    def __call__(self, labels, *, num_samples, **_):
        if labels.dim() == 2:
            rows = [self(row, num_samples=num_samples) for row in labels]
            parts = ((row.index, row.num_pos, row.num_neg) for row in rows)
            return LabelSample(*map(torch.stack, zip(*parts, strict=True)))
        positives, negatives = self.picks.pop(0)
        index = torch.zeros(num_samples, dtype=torch.int64)
        index[: len(positives) + len(negatives)] = torch.cat([positives, negatives])
        return LabelSample(index, torch.tensor(len(positives)), torch.tensor(len(negatives)))


@pytest.mark.parametrize("static_step", [False, True])
@pytest.mark.parametrize("cls", [CopiedROIHeads, OtherName])
def test_a_copied_head_trains_as_in_detectron2(cls, static_step, monkeypatch):
    tiny, model = with_heads(cls)
    batch, picks = tiny.batch((3, 0, 9)), []

    def recording(*args, of_detectron2=subsample_labels):
        picks.append(of_detectron2(*args))
        return picks[-1]

    with monkeypatch.context() as patch:
        for name in ("subsample_labels", "pick"):
            patch.setitem(globals(), name, recording)
        expected, (of_rpn,) = record_picks(copy.deepcopy(model), batch, patch)
    install_sampler(model, ReplayImages([*of_rpn, *picks]), static_step=static_step)
    assert model.roi_heads in installed_samplers(model)
    losses, gradients, _ = step(model, batch)
    for name, loss in expected[0].items():
        torch.testing.assert_close(losses[name], loss, rtol=1e-5, atol=1e-7)
    assert gradients.keys() == expected[1].keys()


def test_seeds_and_calls_are_those_of_any_head(warnings_of_detectron2):
    tiny, model = with_heads(CopiedROIHeads)
    before = type(model.roi_heads)
    install_sampler(model, "static", seed=4)
    rpn, heads = installed_samplers(model).values()
    with EventStorage():
        model(tiny.batch((3, 0, 9)))
    assert (rpn.head, rpn.calls, heads.head, heads.calls) == (0, 1, 1, 3)  # an image a call
    assert warnings_of_detectron2 == []
    clone = pickle.loads(pickle.dumps(model))
    assert type(clone.roi_heads) is type(model.roi_heads)
    uninstall_sampler(model)
    assert type(model.roi_heads) is before
    assert "_label_sampler" not in vars(model.roi_heads)


def test_a_head_with_a_sampling_of_its_own_is_named_once(warnings_of_detectron2):
    tiny, model = with_heads(OwnSampling)
    install_sampler(model, "static", static_step=True)
    assert [x for x in warnings_of_detectron2 if "roi_heads (OwnSampling)" in x]
    assert model.roi_heads not in installed_samplers(model)
    with EventStorage():
        (sampled,) = {
            len(x) for x in model.roi_heads.label_and_sample_proposals(*given(tiny, model))
        }
    assert sampled == 4


def given(tiny, model):
    batch = tiny.batch((3, 3))
    truth = [item["instances"] for item in batch]
    images = model.preprocess_image(batch)
    return model.proposal_generator(images, model.backbone(images.tensor), truth)[0], truth


def test_other_names_of_the_module_are_looked_up_at_each_call(monkeypatch):
    """The user's module stays theirs: what they replace in it counts."""
    tiny, model = with_heads(CopiedROIHeads)
    install_sampler(model, build_label_sampler("static"))
    with EventStorage():
        proposals, truth = given(tiny, model)
        monkeypatch.setitem(globals(), "pairwise_iou", lambda a, b: pairwise_iou_of_nothing(a, b))
        sampled = model.roi_heads.label_and_sample_proposals(proposals, truth)
    fg, _ = select_foreground_proposals(sampled, model.roi_heads.num_classes)
    assert [len(image) for image in fg] == [0, 0]


def pairwise_iou_of_nothing(truth, boxes):
    return torch.zeros(len(truth), len(boxes))

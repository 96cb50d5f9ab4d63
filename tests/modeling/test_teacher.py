"""Teacher and student: one sample for equal labels, drawn by torch's generator or by a seed."""

from __future__ import annotations

import copy

import pytest
import torch
from detectron2.structures import Boxes, Instances
from detectron2.utils.events import EventStorage

from d2_static_sampler import install_sampler, installed_samplers
from tests.helpers import make_batch
from tests.modeling.models import MODELS

IMPLS = ("static", "compiled")


def proposals_of(batch):
    generator = torch.Generator().manual_seed(3)
    proposals = []
    for item in batch:
        corner = torch.rand(40, 2, generator=generator) * 40
        each = Instances((64, 64))
        each.proposal_boxes = Boxes(torch.cat([corner, corner + 20], dim=1))
        each.objectness_logits = torch.zeros(40)
        truth = item["instances"].gt_boxes
        each.proposal_boxes = Boxes.cat([each.proposal_boxes[: 40 - len(truth)], truth])
        proposals.append(each)
    return proposals


def picks(model, batch):
    """The boxes that the ROI heads train on: their labels are equal for equal proposals."""
    truth = [item["instances"] for item in batch]
    with EventStorage():
        sampled = model.roi_heads.label_and_sample_proposals(proposals_of(batch), truth)
    return torch.cat([each.proposal_boxes.tensor for each in sampled])


@pytest.fixture
def batch():
    return make_batch((3, 2), size=64)


@pytest.mark.parametrize("impl", IMPLS)
def test_equal_torch_seeds_give_equal_picks(impl, batch):
    student, teacher = (install_sampler(MODELS["faster_fpn"]().build(), impl) for _ in range(2))
    picked = []
    for model in (student, teacher):
        torch.manual_seed(5)
        picked.append(picks(model, batch))
    assert torch.equal(*picked)
    assert not torch.equal(picked[0], picks(teacher, batch))  # another state of the generator


@pytest.mark.parametrize("impl", IMPLS)
def test_equal_seeds_and_counts_give_equal_picks(impl, batch):
    """Whatever torch's generator does, which a seed of one's own leaves alone."""
    student, teacher = (
        install_sampler(MODELS["faster_fpn"]().build(), impl, seed=1) for _ in range(2)
    )
    for i in range(3):
        torch.manual_seed(i)
        of_student = picks(student, batch)
        torch.manual_seed(100)
        state = torch.get_rng_state()
        assert torch.equal(picks(teacher, batch), of_student)
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("copied", [False, True])
def test_a_teacher_that_samples_less_often_takes_over_the_counts(batch, copied):
    student = install_sampler(MODELS["faster_fpn"]().build(), "static", seed=1)
    teacher = copy.deepcopy(student) if copied else MODELS["faster_fpn"]().build()
    if not copied:
        install_sampler(teacher, "static", seed=1)
    for _ in range(3):
        picks(student, batch)
    student_heads = list(installed_samplers(student).values())
    teacher_heads = list(installed_samplers(teacher).values())
    counts = [head.calls for head in student_heads]
    of_student = picks(student, batch)
    assert not torch.equal(picks(teacher, batch), of_student)
    for head, count in zip(teacher_heads, counts, strict=True):
        head.calls = count  # before the student sampled
    assert torch.equal(picks(teacher, batch), of_student)
    assert [head.calls for head in teacher_heads] == [head.calls for head in student_heads]

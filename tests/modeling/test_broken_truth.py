"""Ground truth that is no box: what Detectron2 does with it, every IMPL does."""

from __future__ import annotations

import re

import pytest
import torch
from detectron2.engine import SimpleTrainer
from detectron2.utils.events import EventStorage

from d2_static_sampler import install_sampler
from d2_static_sampler.modeling import installed_samplers
from tests.helpers import NUM_CLASSES
from tests.modeling.models import MODELS

IMPLS = ("naive", "static", "compiled")
# Corners of the first box of the first image.
BROKEN = {
    "infinite": [20.0, 20.0, float("inf"), 40.0],
    "x2 before x1": [40.0, 20.0, 20.0, 40.0],
    "y2 before y1": [20.0, 40.0, 40.0, 20.0],
    "nan": [float("nan"), 20.0, 40.0, 40.0],
}
# As many slots as candidates: every IMPL picks the same ones, all of them.
ALL = ("MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", 2000, "MODEL.ROI_HEADS.POSITIVE_FRACTION", 1.0)
# What torchvision's roi_align does with a box of NaN is not defined: none may get there.
WITHOUT_TRUTH = (*ALL, "MODEL.ROI_HEADS.PROPOSAL_APPEND_GT", False)
NAN_LOSS = (FloatingPointError, "Loss became infinite or NaN at iteration=0!", {"loss_rpn_loc"})


def broken_batch(tiny, how):
    batch = tiny.batch((2, 1, 0))
    batch[0]["instances"].gt_boxes.tensor[0] = torch.tensor(BROKEN[how])
    return batch


def why_training_stops(name, impl, how, *opts):
    """Type of what an iteration raises, its message without figures, and the losses at fault."""
    tiny = MODELS[name]()
    model = install_sampler(tiny.build(*opts), impl)
    assert len(installed_samplers(model)) == (0 if impl == "naive" else len(tiny.heads))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    trainer = SimpleTrainer(model, [broken_batch(tiny, how)], optimizer)
    with EventStorage(), pytest.raises((AssertionError, FloatingPointError)) as error:
        trainer.run_step()
    message = str(error.value)
    losses = set(re.findall(r"'(\w+)': [^,}]*(?:nan|inf)", message))
    return error.type, message.partition("\n")[0], losses


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize(("name", "opts"), [("rpn_only", ()), ("faster_fpn", WITHOUT_TRUTH)])
def test_a_nan_loss_stops_training(name, opts, how, impl):
    """With no overlap every anchor is the box's best, so a delta without end is in the loss."""
    assert why_training_stops(name, impl, how, *opts) == NAN_LOSS


@pytest.mark.parametrize("impl", IMPLS)
def test_an_infinite_box_among_the_proposals_is_refused(impl):
    assert why_training_stops("faster_fpn", impl, "infinite") == (AssertionError, "", set())


def labelled(impl, how):
    """What ROI heads that take all make of proposals with the truth among them, in any order."""
    tiny = MODELS["precomputed"]()
    batch = broken_batch(tiny, how)
    heads = install_sampler(tiny.build(*ALL).roi_heads, impl)
    with EventStorage():
        sampled = heads.label_and_sample_proposals(
            [item["proposals"] for item in batch], [item["instances"] for item in batch]
        )
    fields = [
        (
            x.proposal_boxes.tensor.tolist(),
            x.gt_classes.tolist(),
            x.gt_boxes.tensor.tolist() if x.has("gt_boxes") else [None] * len(x),
        )
        for x in sampled
    ]
    # As text: NaN is not equal to itself.
    return [sorted(map(str, zip(*values, strict=True))) for values in fields]


@pytest.mark.parametrize("how", sorted(BROKEN.keys() - {"infinite"}))
def test_a_broken_box_overlaps_nothing(how):
    expected = labelled("naive", how)
    assert [len(rows) for rows in expected] == [2, 2, 700]
    box = [row for row in expected[0] if row.startswith(f"({BROKEN[how]}, {NUM_CLASSES}, ")]
    assert len(box) == 1  # background
    for impl in IMPLS[1:]:
        assert labelled(impl, how) == expected

"""What Detectron2 refuses is refused at the next flush, and what it logs is logged."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from detectron2.utils.events import EventStorage

from d2_static_sampler import install_sampler
from d2_static_sampler.modeling.deferred import PERIOD, deferred_metrics
from tests.modeling.models import MODELS
from tests.processes import run_script

INF, NAN = math.inf, math.nan
BOX, RPN = "MODEL.ROI_BOX_HEAD.", "MODEL.RPN."
FROZEN = ("MODEL.RESNETS.NORM", "FrozenBN")
# As many slots as candidates: every truth that is appended is taken.
ALL = ("MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", 300, "MODEL.ROI_HEADS.POSITIVE_FRACTION", 1.0)


def logits_of_rpn(model, value):
    torch.nn.init.constant_(model.proposal_generator.rpn_head.objectness_logits.bias, value)


def deltas_of_rpn(model, value):
    torch.nn.init.constant_(model.proposal_generator.rpn_head.anchor_deltas.bias, value)


def deltas_of_box_head(model, value):
    torch.nn.init.constant_(model.roi_heads.box_predictor.bbox_pred.bias, value)


def first_truth(batch, box):
    batch[0]["instances"].gt_boxes.tensor[0] = torch.tensor(box)


# Settings, what is wrong with the model, and with the batch.
REFUSED = {
    "infinite truth": (("faster_fpn", ALL), None, [20.0, 20, INF, 40]),
    "all infinite truth": (("faster_fpn", ALL), None, [-INF, -INF, INF, INF]),
    "infinite truth with masks": (("mask_bitmaps", ALL), None, [20.0, 20, INF, 40]),
    "infinite truth in a cascade": (("cascade", ALL), None, [20.0, 20, INF, 40]),
    "nan deltas": (("faster_fpn", ()), functools.partial(deltas_of_rpn, value=NAN), None),
    "infinite deltas": (("faster_fpn", ()), functools.partial(deltas_of_rpn, value=INF), None),
    "nan logits": (("faster_fpn", ()), functools.partial(logits_of_rpn, value=NAN), None),
    "rpn alone": (("rpn_only", ()), functools.partial(deltas_of_rpn, value=NAN), None),
    "C4": (("faster_c4", FROZEN), functools.partial(deltas_of_rpn, value=NAN), None),
    "nan boxes for giou": (
        ("faster_fpn", (BOX + "BBOX_REG_LOSS_TYPE", "giou")),
        functools.partial(deltas_of_box_head, value=NAN),
        None,
    ),
    "nan anchors for diou": (
        ("rpn_only", (RPN + "BBOX_REG_LOSS_TYPE", "diou")),
        functools.partial(deltas_of_rpn, value=NAN),
        None,
    ),
}


def why_refused(name, *, static_step):
    """Type and text of what one step and its flush raise."""
    (model, opts), spoil, box = REFUSED[name]
    tiny = MODELS[model]()
    model = install_sampler(tiny.build(*opts), "static", static_step=static_step, seed=3)
    batch = tiny.batch((2, 1))
    if spoil:
        spoil(model)
    if box:
        first_truth(batch, box)
    with EventStorage():
        if not static_step:
            with pytest.raises((AssertionError, FloatingPointError)) as error:
                model(batch)
            return error.type, str(error.value)
        model(batch)
        with pytest.raises((AssertionError, FloatingPointError)) as error:
            deferred_metrics().flush()
    return error.type, str(error.value)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_same_exception(name):
    expected, text = why_refused(name, static_step=False)
    got, with_iteration = why_refused(name, static_step=True)
    assert got is expected
    assert with_iteration.endswith(" (iteration 0)")
    if "\n" not in text and expected is FloatingPointError:
        assert with_iteration.startswith(text)


# In a process of its own: what it guards from is a crash.
CRASHES = """
from tests.modeling.test_step_checks import *
tiny = MODELS["faster_c4"]()
for number in range(2):
    model = tiny.build(*FROZEN, *ALL, BOX + "POOLER_SAMPLING_RATIO", 2)
    install_sampler(model, "static", static_step=True)
    batch = tiny.batch((2, 1))
    if number:
        deltas_of_rpn(model, NAN)
    else:
        first_truth(batch, [20.0, 20, INF, 40])
    with EventStorage():
        model(batch)
        try:
            deferred_metrics().flush()
        except (AssertionError, FloatingPointError) as error:
            print(type(error).__name__)
"""


def test_roi_align_is_shown_no_box_that_is_not_finite(tmp_path):
    """On one level with a fixed number of samples it would read memory by them, and crash."""
    (script := tmp_path / "crashes.py").write_text(CRASHES)
    done = run_script([str(script)], tmp_path)
    expected = (0, "AssertionError\nFloatingPointError\n")
    assert (done.returncode, done.stdout) == expected, done.stderr[-500:]


def test_it_is_refused_within_a_period_without_any_flush():
    tiny = MODELS["rpn_only"]()
    model = install_sampler(tiny.build(), "static", static_step=True)
    deltas_of_rpn(model, NAN)
    batch = tiny.batch((2,))
    with EventStorage() as storage:
        for storage.iter in range(PERIOD - 1):
            model(batch)
        storage.iter = PERIOD - 1
        with pytest.raises(FloatingPointError, match=r"diverged. \(iteration 0\)"):
            model(batch)


def logged(model, batch):
    with EventStorage() as storage:
        model(batch)
        if deferred_metrics().pending:
            assert storage.latest().keys().isdisjoint({"rpn/num_pos_anchors"})
        deferred_metrics().flush()
    return storage.latest()


# Nothing is foreground: no truth, or no match.
NO_FOREGROUND = {
    "no truth": ((0, 0), ()),
    "no match": (
        (2, 1),
        ("MODEL.ROI_HEADS.IOU_THRESHOLDS", [0.99], "MODEL.ROI_HEADS.PROPOSAL_APPEND_GT", False),
    ),
    "no slot": ((2, 1), ("MODEL.ROI_HEADS.POSITIVE_FRACTION", 0.0)),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # Detectron2's mean of nothing
@pytest.mark.parametrize("case", NO_FOREGROUND)
@pytest.mark.parametrize("name", ["faster_fpn", "mask_bitmaps", "keypoint"])
def test_nothing_is_logged_where_detectron2_logs_nothing(name, case):
    tiny = MODELS[name]()
    num_gt, opts = NO_FOREGROUND[case]
    batch = tiny.batch(num_gt)
    stock, static = (
        logged(install_sampler(tiny.build(*opts), "static", static_step=step, seed=3), batch)
        for step in (False, True)
    )
    skipped = [logs.pop("kpts_num_skipped_batches", None) for logs in (stock, static)]
    if name == "keypoint":  # counted over all of a process
        assert skipped[1][0] == skipped[0][0] + 1
    stock = {key: value for key, value in stock.items() if value[0] == value[0]}
    assert static == stock
    assert "fast_rcnn/cls_accuracy" in static
    assert "fast_rcnn/fg_cls_accuracy" not in static
    assert "mask_rcnn/accuracy" not in static

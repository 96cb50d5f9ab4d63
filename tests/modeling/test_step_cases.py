"""The static step against Detectron2's with the same sample: settings, inputs, ways to train."""

from __future__ import annotations

import copy
import functools
import inspect

import pytest
import torch
from detectron2.modeling.roi_heads.fast_rcnn import FastRCNNOutputLayers
from detectron2.structures import Boxes
from detectron2.utils.events import EventStorage

from d2_static_sampler import LABEL_SAMPLER_REGISTRY, build_label_sampler, install_sampler
from d2_static_sampler.modeling.deferred import deferred_metrics
from d2_static_sampler.modeling.static_install import has_static_step
from tests.modeling.models import MODELS
from tests.modeling.test_step import SEED, assert_equals_stock, in_type, train_once

HAS_SIGMOID = "use_sigmoid_ce" in inspect.signature(FastRCNNOutputLayers.__init__).parameters
FROZEN = ("MODEL.RESNETS.NORM", "FrozenBN")
BOX_LOSSES = ("smooth_l1", "giou", "diou", "ciou")
RPN, HEADS, BOX = "MODEL.RPN.", "MODEL.ROI_HEADS.", "MODEL.ROI_BOX_HEAD."
SETTINGS = {
    **{f"rpn {kind}": (RPN + "BBOX_REG_LOSS_TYPE", kind) for kind in BOX_LOSSES},
    **{f"box head {kind}": (BOX + "BBOX_REG_LOSS_TYPE", kind) for kind in BOX_LOSSES},
    "class-agnostic": (BOX + "CLS_AGNOSTIC_BBOX_REG", True),
    "beta": (RPN + "SMOOTH_L1_BETA", 0.5, BOX + "SMOOTH_L1_BETA", 0.5),
    "weights": (
        *(RPN + "BBOX_REG_LOSS_WEIGHT", 3.0, RPN + "LOSS_WEIGHT", 0.25),
        *(BOX + "BBOX_REG_LOSS_WEIGHT", 7.0),
    ),
    "odd box weights": (
        *(RPN + "BBOX_REG_WEIGHTS", (1.5, 2.0, 0.5, 0.7)),
        *(BOX + "BBOX_REG_WEIGHTS", (9.0, 8.0, 7.0, 6.0)),
    ),
    "no positives": (RPN + "POSITIVE_FRACTION", 0.0, HEADS + "POSITIVE_FRACTION", 0.0),
    "positives alone": (RPN + "POSITIVE_FRACTION", 1.0, HEADS + "POSITIVE_FRACTION", 1.0),
    "border": (RPN + "BOUNDARY_THRESH", 0),
    "wide border": (RPN + "BOUNDARY_THRESH", 20),
    "truth not appended": (HEADS + "PROPOSAL_APPEND_GT", False),
    "group norm": (BOX + "NORM", "GN", BOX + "NUM_CONV", 1, BOX + "CONV_DIM", 32),
    "one class": (HEADS + "NUM_CLASSES", 1),
    "3 proposals": (
        *(RPN + "POST_NMS_TOPK_TRAIN", 3, HEADS + "BATCH_SIZE_PER_IMAGE", 512),
        *(HEADS + "PROPOSAL_APPEND_GT", False),
    ),
    "all ignored": (
        *(RPN + "IOU_LABELS", [-1, -1, -1], RPN + "IOU_THRESHOLDS", [0.3, 0.7]),
        *(HEADS + "IOU_LABELS", [-1, -1], RPN + "BOUNDARY_THRESH", 0),
    ),
    "large proposals": ("MODEL.PROPOSAL_GENERATOR.MIN_SIZE", 12),
    "sampling ratio": (BOX + "POOLER_SAMPLING_RATIO", 2),
    "old pooler": (BOX + "POOLER_TYPE", "ROIAlign"),
    "pictures": ("VIS_PERIOD", 1),
}
BY_NUMBER = ("MODEL.ROI_KEYPOINT_HEAD.NORMALIZE_LOSS_BY_VISIBLE_KEYPOINTS", False)
MODELS_OF_SETTINGS = {
    "C4": ("faster_c4", FROZEN),
    "C4 with masks": ("faster_c4", (*FROZEN, "MODEL.MASK_ON", True)),
    "C4 with masks for all classes": (
        "faster_c4",
        (*FROZEN, "MODEL.MASK_ON", True, "MODEL.ROI_MASK_HEAD.CLS_AGNOSTIC_MASK", True),
    ),
    "DC5": ("faster_dc5", FROZEN),
    "masks for all classes": ("mask_bitmaps", ("MODEL.ROI_MASK_HEAD.CLS_AGNOSTIC_MASK", True)),
    "mask head with group norm": (
        "mask_polygons",
        ("MODEL.ROI_MASK_HEAD.NORM", "GN", "MODEL.ROI_MASK_HEAD.CONV_DIM", 32),
    ),
    "keypoints by number": ("keypoint", BY_NUMBER),
    "keypoints by number, of no slot": ("keypoint", (*BY_NUMBER, HEADS + "POSITIVE_FRACTION", 0.0)),
    "cascade giou": (
        "cascade",
        ("MODEL.ROI_BOX_CASCADE_HEAD.IOUS", (0.5, 0.4, 0.2), BOX + "BBOX_REG_LOSS_TYPE", "giou"),
    ),
}


def broken(values):
    def change(batch):
        boxes = batch[0]["instances"].gt_boxes.tensor
        boxes[: len(values)] = torch.tensor(values)

    return change


def cut(batch):
    """Images of other sizes, that need padding; 33 x 64, 64 x 50 and 64 x 64."""
    for item, (height, width) in zip(batch, [(33, 64), (64, 50)], strict=False):
        item["image"] = item["image"][:, :height, :width]
        item["instances"]._image_size = (height, width)
        item["instances"].gt_boxes.clip((height, width))


def as_uint8(batch):
    for item in batch:
        item["image"] = item["image"].to(torch.uint8)


def all_equal(batch):
    for item in batch:
        item["instances"].gt_boxes = Boxes(torch.tensor([[8.0, 8, 40, 40]] * 3))
        item["instances"].gt_classes = torch.tensor([2, 0, 1])


INPUTS = {
    "no area": ((2, 1, 3), broken([[20.0, 20, 20, 40], [9, 9, 9, 9]])),
    "on the border": ((2, 1, 3), broken([[0.0, 0, 30, 64], [32, 0, 64, 30]])),
    "all of the image": ((2, 1, 0), broken([[0.0, 0, 64, 64]])),
    "other sizes": ((2, 1, 3), cut),
    "bytes": ((2, 1, 3), as_uint8),
    "equal boxes": ((3, 3, 3), all_equal),
    "very much truth": ((3000, 1), lambda batch: None),
}


@functools.cache
def faster():
    return MODELS["faster_fpn"]()


def assert_equal_steps(tiny, batch, *opts, sampler="static", autocast=False, hook=False):
    """Both steps from equal weights; sampler: a name or what makes a sampler."""
    model = tiny.build(*opts)
    if hook:
        model.proposal_generator.rpn_head.register_forward_hook(without_ties)
    static = copy.deepcopy(model)
    results, dtype = [], torch.float32 if autocast else torch.float64
    for each, static_step in ((model, False), (static, True)):
        chosen = sampler if isinstance(sampler, str) else sampler()
        install_sampler(each, chosen, static_step=static_step, seed=SEED)
        assert has_static_step(each) is static_step
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            results.append(train_once(each, batch, dtype=dtype))
    assert static_step_is_whole(static)
    expected, got = results
    # Float32 sums in another order may round to the next bfloat16, which is 2**-8 away.
    bounds = {"bound": 2**-8, "rtol": 2**-8} if autocast else {}
    assert_equals_stock(got, expected, **bounds)


def static_step_is_whole(model):
    parts = [module for module in model.modules() if "_label_sampler" in vars(module)]
    return all(len(set(vars(part)["_mixins"])) == 2 for part in parts)


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name):
    batch = faster().batch((3, 0, 4))
    if name == "one class":
        for item in batch:
            item["instances"].gt_classes.zero_()
    assert_equal_steps(faster(), batch, *SETTINGS[name])


@pytest.mark.parametrize("name", INPUTS)
def test_inputs(name):
    num_gt, change = INPUTS[name]
    batch = faster().batch(num_gt)
    change(batch)
    opts = ("MODEL.ROI_HEADS.PROPOSAL_APPEND_GT", name != "no area")
    if name == "no area":  # of which no loss is finite: the sample is what is compared
        opts += (RPN + "BBOX_REG_LOSS_TYPE", "giou", BOX + "BBOX_REG_LOSS_TYPE", "giou")
    assert_equal_steps(faster(), batch, *opts)


@pytest.mark.parametrize("name", MODELS_OF_SETTINGS)
def test_models(name):
    model, opts = MODELS_OF_SETTINGS[name]
    tiny = MODELS[model]()
    if "C4 with" in name:
        tiny = tiny._replace(masks="bitmask")
    assert_equal_steps(tiny, tiny.batch((2, 0, 3)), *opts)


def without_ties(head, inputs, outputs):
    """In bfloat16 many scores are equal, and Detectron2 has no order of its own for equal ones."""
    logits, deltas = outputs
    return [x.float() + torch.arange(x.numel()).view(x.shape) * 1e-7 for x in logits], deltas


@pytest.mark.parametrize("name", ["faster_fpn", "mask_bitmaps", "keypoint", "cascade", "rpn_only"])
def test_autocast(name):
    tiny = MODELS[name]()
    assert_equal_steps(tiny, tiny.batch((2, 0, 3)), autocast=True, hook=name != "rpn_only")


@pytest.mark.skipif(not HAS_SIGMOID, reason="this Detectron2 has no USE_SIGMOID_CE")
def test_sigmoid_cross_entropy():
    assert_equal_steps(faster(), faster().batch((3, 0, 4)), BOX + "USE_SIGMOID_CE", True)


@pytest.mark.parametrize("select", ["rank", "topk"])
def test_selections(select):
    sampler = functools.partial(build_label_sampler, "static", select=select)
    assert_equal_steps(faster(), faster().batch((3, 0, 4)), sampler=sampler)


def first_of_each(labels, *, num_samples, positive_fraction, bg_label, **_):
    """A user's sampler: seeded by its own means."""
    generator = torch.Generator().manual_seed(9)
    return build_label_sampler("static")(
        labels,
        num_samples=num_samples,
        positive_fraction=positive_fraction,
        bg_label=bg_label,
        generator=generator,
    )


def test_a_sampler_of_ones_own_by_name():
    LABEL_SAMPLER_REGISTRY._do_register("first_of_each", lambda: first_of_each)
    try:
        assert_equal_steps(faster(), faster().batch((3, 0, 4)), sampler="first_of_each")
    finally:
        del LABEL_SAMPLER_REGISTRY._obj_map["first_of_each"]


@pytest.mark.parametrize("model", ["faster_fpn", "mask_bitmaps"])
def test_three_steps_with_an_optimizer(model):
    """Every step has other words; the weights stay those of Detectron2's step, in float64."""
    tiny = MODELS[model]()
    static = install_sampler(tiny.build(), "static", static_step=True, seed=SEED)
    stock = install_sampler(tiny.build(), "static", seed=SEED)
    for each in (static, stock):
        optimizer = torch.optim.SGD(each.parameters(), lr=1e-4, momentum=0.9)
        with EventStorage() as storage, in_type(each, torch.float64):
            for iteration in range(3):
                storage.iter = iteration
                losses = each(tiny.batch((2, iteration, 3), seed=iteration))
                optimizer.zero_grad()
                sum(losses.values()).backward()
                optimizer.step()
            deferred_metrics().flush()
        each.logged = {
            name: torch.tensor(history.values()) for name, history in storage.histories().items()
        }
    assert static.logged.keys() == stock.logged.keys()
    # A share of right predictions may jump by one where two scores are equal but for a bit.
    for name in (name for name in stock.logged if "num_" in name):
        values = stock.logged[name]
        torch.testing.assert_close(static.logged[name], values, rtol=1e-6, atol=0, msg=name)
    for (name, weight), of_stock in zip(static.named_parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(weight, of_stock, rtol=1e-5, atol=1e-7, msg=name)

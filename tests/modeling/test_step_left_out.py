"""What of a model is not Detectron2's own keeps its step; the rest is static, and all is equal."""

from __future__ import annotations

import copy

import pytest
import torch
from detectron2.modeling.proposal_generator.rpn import RPN
from detectron2.modeling.roi_heads import StandardROIHeads
from detectron2.modeling.roi_heads.fast_rcnn import FastRCNNOutputLayers

from d2_static_sampler import install_sampler
from d2_static_sampler.modeling import installed_samplers
from d2_static_sampler.modeling.static_install import has_static_step
from tests.modeling.models import HAS_POINT_REND, MODELS, eager_focal_loss  # noqa: F401
from tests.modeling.test_step import SEED, assert_close, train_once

BOX = "MODEL.ROI_BOX_HEAD."
GENERATOR = "proposal_generator"


def is_static(module):
    in_evaluation, in_training = vars(module)["_mixins"]
    return in_evaluation is not in_training


class HalfLoss(RPN):
    def losses(self, *args, **kwargs):
        return {name: loss * 0.5 for name, loss in super().losses(*args, **kwargs).items()}


class LooksAtBoxes(StandardROIHeads):
    def _forward_box(self, features, proposals):
        self.sampled = [len(x) for x in proposals]
        return super()._forward_box(features, proposals)


class OwnOutput(FastRCNNOutputLayers):
    def losses(self, predictions, proposals):
        return {k: v * 2 for k, v in super().losses(predictions, proposals).items()}


def become(path, cls):
    def change(model):
        model.get_submodule(path).__class__ = cls

    return change


def own_forward(path):
    def change(model):
        module = model.get_submodule(path)
        module.forward = type(module).forward.__get__(module)

    return change


# Model, settings, what is changed in it, what the warning says, and the part that is not static.
LEFT_OUT = {
    "own losses": ("faster_fpn", (), become(GENERATOR, HalfLoss), "HalfLoss", GENERATOR),
    "own heads": ("faster_fpn", (), become("roi_heads", LooksAtBoxes), "LooksAtBoxes", "roi_heads"),
    "own output": (
        "faster_fpn", (), become("roi_heads.box_predictor", OwnOutput), "OwnOutput", "roi_heads",
    ),
    "own method of an instance": (
        "faster_fpn", (), own_forward(GENERATOR), "RPN has a forward of its own", GENERATOR,
    ),
    "predicted boxes": (
        "faster_fpn", (BOX + "TRAIN_ON_PRED_BOXES", True), None, "TRAIN_ON_PRED_BOXES", "roi_heads",
    ),
    "batch norm": (
        "faster_fpn", (BOX + "NORM", "BN", BOX + "NUM_CONV", 1, BOX + "CONV_DIM", 8), None,
        "BatchNorm", "roi_heads",
    ),
    "batch norm of masks": (
        "mask_bitmaps", ("MODEL.ROI_MASK_HEAD.NORM", "BN"), None, "its mask head has a BatchNorm",
        None,
    ),
    "batch norm of C4": ("faster_c4", (), None, "BatchNorm", "roi_heads"),
    "pooler": ("faster_fpn", (BOX + "POOLER_TYPE", "ROIPool"), None, "pooler", "roi_heads"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_is_left_out_is_said_and_equals_detectron2(name, warnings_of_detectron2):
    kind, opts, change, words, part = LEFT_OUT[name]
    tiny = MODELS[kind]()
    model = tiny.build(*opts)
    if change:
        change(model)
    static = copy.deepcopy(model)
    install_sampler(static, "static", static_step=True, seed=SEED)
    (warning,) = warnings_of_detectron2
    assert words in warning
    heads = GENERATOR, "roi_heads"
    left_out = [x for x in heads if not is_static(static.get_submodule(x))]
    assert left_out == ([part] if part else [])
    batch = tiny.batch((3, 0, 4))
    stock = install_sampler(model, "static", seed=SEED)
    # Detectron2's ROIPool takes float32 alone; its heads keep their step.
    dtype = torch.float32 if name == "pooler" else torch.float64
    assert_close(train_once(static, batch, dtype=dtype), train_once(stock, batch, dtype=dtype))


def test_a_method_patched_into_detectron2s_class_is_not_lost(monkeypatch, warnings_of_detectron2):
    stocks = RPN.losses

    def doubled(self, *args, **kwargs):
        return {name: loss * 2 for name, loss in stocks(self, *args, **kwargs).items()}

    monkeypatch.setattr(RPN, "losses", doubled)
    tiny = MODELS["rpn_only"]()
    batch = tiny.batch((3, 2))
    expected = train_once(install_sampler(tiny.build(), "static", seed=SEED), batch)
    static = install_sampler(tiny.build(), "static", static_step=True, seed=SEED)
    assert_close(train_once(static, batch), expected)
    assert len(warnings_of_detectron2) == 1


@pytest.mark.skipif(not HAS_POINT_REND, reason="no detectron2.projects.point_rend")
def test_point_rend(warnings_of_detectron2):
    install_sampler(MODELS["point_rend"]().build(), "static", static_step=True)
    (warning,) = warnings_of_detectron2
    assert "STATIC_STEP leaves out" in warning


def test_rotated_boxes(warnings_of_detectron2):
    model = install_sampler(MODELS["rotated"]().build(), "static", static_step=True)
    (warning,) = warnings_of_detectron2
    assert "proposal_generator: " in warning
    assert "roi_heads: RROIHeads" in warning
    assert len(installed_samplers(model)) == 2


@pytest.mark.usefixtures("eager_focal_loss")
def test_a_model_without_a_sampler(warnings_of_detectron2):
    tiny = MODELS["retinanet"]()
    model = install_sampler(tiny.build(), "static", static_step=True)
    assert len(warnings_of_detectron2) == 1
    assert not has_static_step(model)
    assert type(model) is type(tiny.build())

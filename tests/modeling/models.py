"""Detectron2's kinds of model, as small as they can be trained on a CPU.

Each is the model zoo's file with narrow layers, few anchors and few samples on top.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import detectron2
import detectron2.modeling.meta_arch.retinanet as stock_retinanet
import pytest
import torch
from detectron2 import model_zoo
from detectron2.config import CfgNode, get_cfg
from detectron2.modeling import build_model
from fvcore.nn import sigmoid_focal_loss
from torch import nn

from d2_static_sampler import add_sampler_config
from tests.helpers import NUM_CLASSES, make_batch
from tests.modeling.inputs import EXTRAS, NUM_KEYPOINTS
from tests.modeling.own_classes import OwnROIHeads, OwnRPN
from tests.short_backbones import short

RPN_SLOTS, ROI_SLOTS = 32, 16
HAS_POINT_REND = importlib.util.find_spec("detectron2.projects.point_rend") is not None
HAS_OPERATORS = importlib.util.find_spec("detectron2._C") is not None

TINY = (
    "MODEL.DEVICE", "cpu",
    "MODEL.WEIGHTS", "",
    "MODEL.BACKBONE.FREEZE_AT", 0,
    # ResNet-18 has fixed widths and no dilation: of narrow bottlenecks all models can be made.
    "MODEL.RESNETS.DEPTH", 50,
    "MODEL.RESNETS.STEM_OUT_CHANNELS", 8,
    "MODEL.RESNETS.RES2_OUT_CHANNELS", 16,
    "MODEL.RESNETS.WIDTH_PER_GROUP", 8,
    "MODEL.RESNETS.NORM", "BN",
    "MODEL.FPN.OUT_CHANNELS", 16,
    "MODEL.RPN.PRE_NMS_TOPK_TRAIN", 100,
    "MODEL.RPN.POST_NMS_TOPK_TRAIN", 50,
    "MODEL.RPN.BATCH_SIZE_PER_IMAGE", RPN_SLOTS,
    "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", ROI_SLOTS,
    "MODEL.ROI_HEADS.NUM_CLASSES", NUM_CLASSES,
    "MODEL.ROI_BOX_HEAD.FC_DIM", 32,
    "MODEL.ROI_MASK_HEAD.CONV_DIM", 8,
    "MODEL.ROI_MASK_HEAD.NUM_CONV", 1,
    "MODEL.ROI_KEYPOINT_HEAD.CONV_DIMS", [8],
    "MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS", NUM_KEYPOINTS,
)  # fmt: skip
_MASK = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x.yaml"
PYRAMID = ("MODEL.ANCHOR_GENERATOR.SIZES", [[8], [16], [32], [64], [128]])
ONE_LEVEL = ("MODEL.ANCHOR_GENERATOR.SIZES", [[8, 16, 32, 64]])
ROTATED = (
    "MODEL.ANCHOR_GENERATOR.NAME", "RotatedAnchorGenerator",
    "MODEL.ANCHOR_GENERATOR.ANGLES", [[-45, 0, 45]],
    "MODEL.PROPOSAL_GENERATOR.NAME", "RRPN",
    "MODEL.RPN.BBOX_REG_WEIGHTS", (1.0,) * 5,
    "MODEL.ROI_HEADS.NAME", "RROIHeads",
    "MODEL.ROI_BOX_HEAD.POOLER_TYPE", "ROIAlignRotated",
    "MODEL.ROI_BOX_HEAD.BBOX_REG_WEIGHTS", (10.0, 10.0, 5.0, 5.0, 1.0),
)  # fmt: skip


class TinyModel(NamedTuple):
    """A config, what its inputs need, and the heads that sample, in order of their calls."""

    cfg: CfgNode
    masks: str = ""
    extras: tuple[str, ...] = ()
    heads: tuple[str, ...] = ("proposal_generator", "roi_heads")

    def build(self, *opts: Any) -> nn.Module:
        """The model in training mode, equal for equal arguments."""
        cfg = self.cfg.clone()
        cfg.merge_from_list(list(opts))
        torch.manual_seed(0)
        return build_model(cfg).train()

    def batch(self, num_gt: tuple[int, ...], *, size: int = 64, seed: int = 0) -> Any:
        """One input a count of ground-truth boxes."""
        batch = make_batch(num_gt, size=size, masks=self.masks, seed=seed)
        torch.manual_seed(seed)
        for i, item in enumerate(batch):
            for extra in self.extras:
                EXTRAS[extra](item, size, i)
        return batch


# Ground-truth boxes of each image, and settings on top: what a sampler can meet.
CASES: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "usual": ((3, 2, 4), ()),
    "one image": ((2,), ()),
    "no truth": ((0, 0, 0), ()),
    "an image without truth": ((0, 3, 1), ()),
    "no negatives": (
        (3, 0, 4),
        ("MODEL.RPN.IOU_LABELS", [-1, -1, 1], "MODEL.ROI_HEADS.IOU_LABELS", [-1, 1]),
    ),
    "fewer candidates than slots": (
        (3, 2, 4),
        ("MODEL.RPN.BATCH_SIZE_PER_IMAGE", 5000, "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", 100),
    ),
    "more of both than slots": (
        (5, 9, 7),
        ("MODEL.RPN.BATCH_SIZE_PER_IMAGE", 5, "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", 5),
    ),
}
# PointRend's own code stops where no proposal of a batch is positive.
REFUSED = {("point_rend", "no truth")}


@pytest.fixture
def eager_focal_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """RetinaNet's loss is TorchScript, whose second call differs from the first in last bits."""
    monkeypatch.setattr(stock_retinanet, "sigmoid_focal_loss_jit", sigmoid_focal_loss)


def zoo_config(name: str) -> str:
    """A file of the model zoo; a checkout that is not installed has it in its own folder."""
    try:
        return model_zoo.get_config_file(name)
    except RuntimeError:
        return str(Path(detectron2.__file__).parents[1] / "configs" / name)


def faster_fpn() -> TinyModel:
    return TinyModel(_config("COCO-Detection/faster_rcnn_R_50_FPN_1x.yaml", *PYRAMID))


def faster_c4() -> TinyModel:
    return TinyModel(_config("COCO-Detection/faster_rcnn_R_50_C4_1x.yaml", *ONE_LEVEL))


def faster_dc5() -> TinyModel:
    return TinyModel(_config("COCO-Detection/faster_rcnn_R_50_DC5_1x.yaml", *ONE_LEVEL))


def mask_polygons() -> TinyModel:
    return TinyModel(_config(_MASK, *PYRAMID), masks="polygon")


def mask_bitmaps() -> TinyModel:
    cfg = _config(_MASK, *PYRAMID, "INPUT.MASK_FORMAT", "bitmask")
    return TinyModel(cfg, masks="bitmask")


def keypoint() -> TinyModel:
    cfg = _config("COCO-Keypoints/keypoint_rcnn_R_50_FPN_1x.yaml", *PYRAMID)
    return TinyModel(cfg, extras=("keypoints",))


def cascade() -> TinyModel:
    cfg = _config("Misc/cascade_mask_rcnn_R_50_FPN_1x.yaml", *PYRAMID)
    return TinyModel(cfg, masks="polygon")


def point_rend() -> TinyModel:
    from detectron2.projects.point_rend import add_pointrend_config

    cfg = _config(
        _MASK, *PYRAMID,
        "MODEL.ROI_BOX_HEAD.TRAIN_ON_PRED_BOXES", True,
        "MODEL.ROI_MASK_HEAD.NAME", "PointRendMaskHead",
        "MODEL.ROI_MASK_HEAD.POOLER_TYPE", "",
        "MODEL.ROI_MASK_HEAD.FC_DIM", 16,
        "MODEL.ROI_MASK_HEAD.POINT_HEAD_ON", True,
        "MODEL.POINT_HEAD.NUM_CLASSES", NUM_CLASSES,
        "MODEL.POINT_HEAD.FC_DIM", 16,
        "MODEL.POINT_HEAD.TRAIN_NUM_POINTS", 16,
        "INPUT.MASK_FORMAT", "bitmask",
        add=add_pointrend_config,
    )  # fmt: skip
    return TinyModel(cfg, masks="bitmask")


def rpn_only() -> TinyModel:
    cfg = _config("COCO-Detection/rpn_R_50_FPN_1x.yaml", *PYRAMID)
    return TinyModel(cfg, heads=("proposal_generator",))


def precomputed() -> TinyModel:
    cfg = _config("COCO-Detection/fast_rcnn_R_50_FPN_1x.yaml", *PYRAMID)
    return TinyModel(cfg, extras=("proposals",), heads=("roi_heads",))


def own_classes() -> TinyModel:
    cfg = _config("COCO-Detection/faster_rcnn_R_50_FPN_1x.yaml", *PYRAMID)
    cfg.MODEL.PROPOSAL_GENERATOR.NAME = OwnRPN.__name__
    cfg.MODEL.ROI_HEADS.NAME = OwnROIHeads.__name__
    return TinyModel(cfg)


def retinanet() -> TinyModel:
    cfg = _config("COCO-Detection/retinanet_R_50_FPN_1x.yaml", *PYRAMID)
    cfg.MODEL.RETINANET.NUM_CLASSES = NUM_CLASSES
    return TinyModel(cfg, heads=())


def rotated() -> TinyModel:
    cfg = _config("COCO-Detection/faster_rcnn_R_50_FPN_1x.yaml", *PYRAMID, *ROTATED)
    return TinyModel(cfg, extras=("angles",))


MODELS: dict[str, Callable[[], TinyModel]] = {
    function.__name__: function
    for function in (
        faster_fpn, faster_c4, faster_dc5, mask_polygons, mask_bitmaps, keypoint, cascade,
        point_rend, rpn_only, precomputed, own_classes, retinanet, rotated,
    )
}  # fmt: skip
# Why a model cannot run here.
MISSING: dict[str, str] = {}
if not HAS_POINT_REND:
    MISSING["point_rend"] = "this Detectron2 has no detectron2.projects.point_rend"
if not HAS_OPERATORS:
    MISSING["rotated"] = "rotated boxes need Detectron2's compiled operators; see test_rotated.py"

RUNNABLE = [
    pytest.param(name, marks=pytest.mark.skipif(name in MISSING, reason=MISSING.get(name, "")))
    for name in MODELS
]
RUNNABLE_CASES = [
    pytest.param(name, case, marks=model.marks, id=f"{name}-{case}")
    for model, (name,) in zip(RUNNABLE, (x.values for x in RUNNABLE), strict=True)
    for case in CASES
    if (name, case) not in REFUSED
]


def _config(name: str, *opts: Any, add: Callable[[CfgNode], None] | None = None) -> CfgNode:
    cfg = get_cfg()
    add_sampler_config(cfg)
    if add is not None:
        add(cfg)
    cfg.merge_from_file(zoo_config(name))
    cfg.merge_from_list([*TINY, *opts])
    cfg.MODEL.BACKBONE.NAME = short(cfg.MODEL.BACKBONE.NAME)
    return cfg

"""Which modules the static step equals: those of which all that it replaces is Detectron2's own.

Asked when a sampler is installed, and again in every training step: a hook, a patch or another
collaborator may come later. A fault is a text for the warning; where there is none, the static
step takes the module's place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from detectron2.layers import Conv2d, ConvTranspose2d, FrozenBatchNorm2d, ROIAlign
from detectron2.modeling.anchor_generator import DefaultAnchorGenerator
from detectron2.modeling.backbone import resnet
from detectron2.modeling.box_regression import Box2BoxTransform
from detectron2.modeling.matcher import Matcher
from detectron2.modeling.meta_arch.rcnn import GeneralizedRCNN, ProposalNetwork
from detectron2.modeling.poolers import ROIPooler
from detectron2.modeling.proposal_generator.rpn import RPN
from detectron2.modeling.roi_heads import CascadeROIHeads, Res5ROIHeads, StandardROIHeads
from detectron2.modeling.roi_heads.box_head import FastRCNNConvFCHead
from detectron2.modeling.roi_heads.fast_rcnn import FastRCNNOutputLayers
from detectron2.modeling.roi_heads.keypoint_head import KRCNNConvDeconvUpsampleHead
from detectron2.modeling.roi_heads.mask_head import MaskRCNNConvUpsampleHead
from detectron2.structures import BitMasks, Boxes, ImageList, Instances, Keypoints
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..losses.boxes import BOX_LOSSES
from .pooling import can_pool
from .stock import Functions, Methods, faults_of_process, has_hooks
from .subclass import plain_class

Faults = Iterator[str]

_SAMPLING = ("label_and_sample_proposals", "_sample_proposals")
_HEADS = ("forward", "_forward_box", "_forward_mask", "_forward_keypoint", *_SAMPLING)
_CASCADE = ("_match_and_label_boxes", "_run_stage", "_create_proposals_from_boxes")

METHODS = {
    methods.kind: methods
    for methods in (
        Methods(RPN, *("forward", "label_and_sample_anchors", "_subsample_labels", "losses"),
                *("predict_proposals", "_decode_proposals")),
        Methods(StandardROIHeads, *_HEADS),
        Methods(CascadeROIHeads, *_HEADS, *_CASCADE),
        Methods(Res5ROIHeads, "forward", "_shared_roi_transform", *_SAMPLING),
        Methods(DefaultAnchorGenerator, "forward", "_grid_anchors"),
        Methods(GeneralizedRCNN, "forward", "preprocess_image", "_move_to_current_device"),
        Methods(ProposalNetwork, "forward", "_move_to_current_device"),
        Methods(Matcher, "__call__", "set_low_quality_matches_"),
        Methods(Box2BoxTransform, "get_deltas", "apply_deltas"),
        Methods(FastRCNNOutputLayers, *("forward", "losses", "box_reg_loss", "predict_boxes"),
                *("sigmoid_cross_entropy_loss", "get_fed_loss_classes")),
        Methods(FastRCNNConvFCHead, "forward"),
        Methods(MaskRCNNConvUpsampleHead, "forward", "layers"),
        Methods(KRCNNConvDeconvUpsampleHead, "forward", "layers"),
        Methods(ROIPooler, "forward"),
        Methods(ROIAlign, "forward"),
        Methods(Boxes, *("area", "clip", "nonempty", "inside_box", "to", "__getitem__")),
        Methods(Instances, *("to", "set", "get", "has", "get_fields", "__getitem__")),
        Methods(ImageList, "from_tensors"),
        Methods(BitMasks, "crop_and_resize", "to", "__getitem__"),
        Methods(Keypoints, "to_heatmap", "to", "__getitem__"),
    )
}  # fmt: skip


def _reached_from(*kinds: type) -> Functions:
    return Functions(*(METHODS[kind] for kind in kinds))


_HEADS_PARTS = (Matcher, Box2BoxTransform, FastRCNNOutputLayers, ROIPooler, ROIAlign, Boxes)
FUNCTIONS = {
    RPN: _reached_from(RPN, Matcher, Box2BoxTransform, Boxes, Instances),
    StandardROIHeads: _reached_from(StandardROIHeads, *_HEADS_PARTS),
    CascadeROIHeads: _reached_from(CascadeROIHeads, *_HEADS_PARTS),
    Res5ROIHeads: _reached_from(Res5ROIHeads, *_HEADS_PARTS),
    DefaultAnchorGenerator: _reached_from(DefaultAnchorGenerator),
    GeneralizedRCNN: _reached_from(GeneralizedRCNN, ImageList),
    ProposalNetwork: _reached_from(ProposalNetwork, ImageList),
    MaskRCNNConvUpsampleHead: _reached_from(MaskRCNNConvUpsampleHead, BitMasks),
    KRCNNConvDeconvUpsampleHead: _reached_from(KRCNNConvDeconvUpsampleHead, Keypoints),
}

# Modules that treat each row of a batch by itself, so that padding changes no other row.
_BY_ROW = {
    cls: cls.forward
    for cls in (
        *(Conv2d, ConvTranspose2d, FrozenBatchNorm2d, ROIAlign, ROIPooler),
        *(FastRCNNConvFCHead, FastRCNNOutputLayers),
        *(MaskRCNNConvUpsampleHead, KRCNNConvDeconvUpsampleHead),
        *(resnet.BasicBlock, resnet.BottleneckBlock, resnet.DeformBottleneckBlock),
        *(nn.Linear, nn.Conv2d, nn.ConvTranspose2d, nn.GroupNorm, nn.Sequential, nn.ModuleList),
        *(nn.ReLU, nn.Flatten, nn.Identity),
    )
}


def first_fault(module: nn.Module, kind: type) -> str | None:
    """Why the static step of ``kind``, a key of ``METHODS``, cannot take the module's place."""
    return next(_FAULTS[kind](module), None)


def first_fault_of_head(heads: Any, what: str) -> str | None:
    """Why the heads' "mask" or "keypoint" head cannot be static where the box head is."""
    return next(_faults_of_head(heads, what), None)


def _faults_of_model(model: Any, kind: type) -> Faults:
    yield from _faults_of_module(model, kind)
    yield from _replaced(kind, ImageList)


def _faults_of_module(module: nn.Module, kind: type) -> Faults:
    yield from _named(plain_class(module).__name__, METHODS[kind].faults(module, subclass=True))


def _faults_of_rpn(head: Any) -> Faults:
    yield from _faults_of_module(head, RPN)
    yield from _named("anchor_matcher", METHODS[Matcher].faults(head.anchor_matcher))
    yield from _faults_of_loss(head)
    yield from _replaced(RPN)


def _faults_of_standard_heads(heads: Any) -> Faults:
    yield from _faults_of_module(heads, StandardROIHeads)
    yield from _faults_of_boxes(heads, heads.box_pooler, heads.box_head, [heads.box_predictor])
    yield from _replaced(StandardROIHeads)


def _faults_of_cascade(heads: Any) -> Faults:
    yield from _faults_of_module(heads, CascadeROIHeads)
    for each in heads.proposal_matchers:
        yield from _named("proposal_matchers", METHODS[Matcher].faults(each))
    yield from _faults_of_boxes(heads, heads.box_pooler, heads.box_head, heads.box_predictor)
    yield from _replaced(CascadeROIHeads)


def _faults_of_res5_heads(heads: Any) -> Faults:
    yield from _faults_of_module(heads, Res5ROIHeads)
    yield from _faults_of_boxes(heads, heads.pooler, heads.res5, [heads.box_predictor])
    yield from _replaced(Res5ROIHeads)


def _faults_of_anchors(generator: Any) -> Faults:
    yield from _faults_of_module(generator, DefaultAnchorGenerator)
    yield from FUNCTIONS[DefaultAnchorGenerator].faults()


def _faults_of_boxes(heads: Any, pooler: Any, features: Any, predictors: Any) -> Faults:
    """Faults of what all ROI heads have."""
    if getattr(heads, "train_on_pred_boxes", False):
        yield "TRAIN_ON_PRED_BOXES is on"
    yield from _named("proposal_matcher", METHODS[Matcher].faults(heads.proposal_matcher))
    yield from _faults_of_pooler("its pooler", pooler)
    yield from _faults_of_rows("its box head", features)
    for predictor in predictors:
        yield from _named("its box predictor", _faults_of_predictor(predictor))
        yield from _faults_of_rows("its box predictor", predictor)


def _faults_of_predictor(predictor: Any) -> Faults:
    yield from METHODS[FastRCNNOutputLayers].faults(predictor)
    if getattr(predictor, "use_fed_loss", False):
        yield "has USE_FED_LOSS on"
    yield from _faults_of_loss(predictor)


def _faults_of_loss(head: Any) -> Faults:
    """Faults of the regression loss of an RPN or of output layers."""
    transform = METHODS[Box2BoxTransform].faults(head.box2box_transform)
    yield from _named("box2box_transform", transform)
    if head.box_reg_loss_type not in BOX_LOSSES:
        yield f"box_reg_loss_type is {head.box_reg_loss_type!r}"


def _faults_of_head(heads: Any, what: str) -> Faults:
    head = getattr(heads, f"{what}_head")
    kind, truth = _HEADS_BESIDES[what]
    # Its layers are called past it: FSDP would not gather their parameters.
    if has_hooks(head):
        yield "has a hook"
    yield from METHODS[kind].faults(head)
    # Res5ROIHeads has one pooler for all.
    pooler = getattr(heads, f"{what}_pooler", getattr(heads, "pooler", None))
    yield from _faults_of_pooler("has a pooler that", pooler)
    yield from _faults_of_rows("", head)
    yield from _replaced(kind, truth)


def _faults_of_pooler(name: str, pooler: Any) -> Faults:
    if not can_pool(pooler):
        yield f"{name} is not a ROIPooler of ROIAlign"
        return
    yield from _named(name, METHODS[ROIPooler].faults(pooler))
    if any(map(has_hooks, (pooler, *pooler.level_poolers))):
        yield f"{name} has a hook"
    for level in pooler.level_poolers:
        yield from _named(name, METHODS[ROIAlign].faults(level))


def _faults_of_rows(name: str, module: nn.Module) -> Faults:
    """Parts of the module in which one row of a batch may see another."""
    parts = [module]
    for part in parts:
        parts += filter(None, part._modules.values())
        cls: Any = plain_class(part)
        if isinstance(part, _BatchNorm):
            yield f"{name} has a BatchNorm, whose statistics padding would change".strip()
        elif _BY_ROW.get(cls) is not cls.forward:
            kind = f"{cls.__name__}, which may not treat each region by itself"
            yield (f"{name} is a {kind}" if part is module else f"{name} has a {kind}").strip()
        if "forward" in vars(part):
            yield f"{name} has a forward of its own".strip()
        if has_hooks(part, but_fsdp=True):
            yield f"{name} has a hook, which would see padding".strip()


def _replaced(kind: type, *structures: type) -> Faults:
    """What others may have replaced for all modules."""
    yield from faults_of_process()
    for each in (Boxes, Instances, *structures):
        yield from METHODS[each].faults_of_class()
    yield from FUNCTIONS[kind].faults()


def _named(name: str, faults: Faults) -> Faults:
    for fault in faults:
        yield f"{name} {fault}"


_HEADS_BESIDES = {
    "mask": (MaskRCNNConvUpsampleHead, BitMasks),
    "keypoint": (KRCNNConvDeconvUpsampleHead, Keypoints),
}
_FAULTS: dict[type, Any] = {
    RPN: _faults_of_rpn,
    CascadeROIHeads: _faults_of_cascade,
    StandardROIHeads: _faults_of_standard_heads,
    Res5ROIHeads: _faults_of_res5_heads,
    DefaultAnchorGenerator: _faults_of_anchors,
    GeneralizedRCNN: lambda model: _faults_of_model(model, GeneralizedRCNN),
    ProposalNetwork: lambda model: _faults_of_model(model, ProposalNetwork),
}

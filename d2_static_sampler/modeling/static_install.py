"""Which modules of a model take the static step, and giving it to them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

from detectron2.modeling.anchor_generator import DefaultAnchorGenerator
from detectron2.modeling.box_regression import Box2BoxTransform
from detectron2.modeling.meta_arch.rcnn import GeneralizedRCNN, ProposalNetwork
from detectron2.modeling.proposal_generator.rpn import RPN
from detectron2.modeling.roi_heads import CascadeROIHeads, Res5ROIHeads, StandardROIHeads
from detectron2.modeling.roi_heads.fast_rcnn import FastRCNNOutputLayers
from detectron2.modeling.roi_heads.keypoint_head import BaseKeypointRCNNHead
from detectron2.modeling.roi_heads.mask_head import BaseMaskRCNNHead
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..static_step.box_losses import BOX_LOSSES
from ..static_step.graphs import Graphs
from ..static_step.pooling import can_pool
from .roi_heads import BatchProposalSampler
from .rpn import BatchAnchorSampler
from .static_anchors import StaticAnchors
from .static_cascade import StaticCascadeROIHeads
from .static_model import StaticProposalNetwork, StaticRCNN
from .static_roi_heads import RegionGraphs, StaticRes5ROIHeads, StaticROIHeads
from .static_rpn import StaticRPN, anchor_graphs
from .subclass import SampledHead, enter_subclass, own_class

logger = logging.getLogger(f"detectron2.{__name__}")

STATIC_ATTRIBUTES = ("_graphs", "_masks_are_static", "_keypoints_are_static")


class Part(NamedTuple):
    """A kind of module, what replaces it in training, and the methods that must be its own."""

    kind: type[nn.Module]
    in_evaluation: type
    in_training: type
    methods: tuple[str, ...]


_SAMPLING = ("label_and_sample_proposals", "_sample_proposals")
_HEADS = ("forward", "_forward_box", "_forward_mask", "_forward_keypoint")
_CASCADE = ("_match_and_label_boxes", "_run_stage", "_create_proposals_from_boxes")
_ANCHORS = ("label_and_sample_anchors", "_subsample_labels", "losses", "predict_proposals")

# The first kind that a module is counts.
_PARTS = (
    Part(RPN, BatchAnchorSampler, StaticRPN, ("forward", *_ANCHORS, "_decode_proposals")),
    Part(
        CascadeROIHeads,
        BatchProposalSampler,
        StaticCascadeROIHeads,
        (*_HEADS, *_SAMPLING, *_CASCADE),
    ),
    Part(StandardROIHeads, BatchProposalSampler, StaticROIHeads, (*_HEADS, *_SAMPLING)),
    Part(
        Res5ROIHeads,
        BatchProposalSampler,
        StaticRes5ROIHeads,
        ("forward", "_shared_roi_transform", *_SAMPLING),
    ),
    Part(DefaultAnchorGenerator, SampledHead, StaticAnchors, ("forward", "_grid_anchors")),
    Part(GeneralizedRCNN, SampledHead, StaticRCNN, ("forward", "preprocess_image")),
    Part(ProposalNetwork, SampledHead, StaticProposalNetwork, ("forward",)),
)


def install_static_step(model: nn.Module) -> None:
    """Give the static step to every module of ``model`` that it equals, in place.

    What is left out is said in one warning: it stays Detectron2's, or its owner's.
    """
    left_out = []
    for name, module in model.named_modules():
        part = next((part for part in _PARTS if isinstance(module, part.kind)), None)
        if part is None:
            if "_label_sampler" in vars(module):
                left_out.append(f"{name}: {own_class(module).__name__} is not covered")
            continue
        if reason := _why_not(module, part):
            left_out.append(f"{name or 'the model'}: {reason}")
            continue
        _enter(module, part)
        left_out += [f"{name}: {reason}" for reason in _choose_heads(module)]
    if left_out:
        logger.warning("STATIC_STEP leaves out " + "; ".join(left_out))


def has_static_step(model: nn.Module) -> bool:
    """Whether any module of ``model`` trains by the static step."""
    classes = [vars(module).get("_mixins", (None, None)) for module in model.modules()]
    return any(in_evaluation is not in_training for in_evaluation, in_training in classes)


def static_graphs(model: nn.Module) -> list[Graphs]:
    """What the static step of ``model`` compiles; nothing where its sampler is not compiled."""
    graphs: list[Graphs] = []
    for module in model.modules():
        own = vars(module).get("_graphs")
        if isinstance(own, Graphs):
            graphs.append(own)
        elif isinstance(own, RegionGraphs):
            graphs += [own.label_and_sample, own.losses]
    return graphs


def _enter(module: nn.Module, part: Part) -> None:
    enter_subclass(module, part.in_evaluation, part.in_training)
    if sampler := vars(module).get("_label_sampler"):
        of_compiled = anchor_graphs if part.kind is RPN else RegionGraphs
        module.__dict__["_graphs"] = of_compiled() if sampler.can_be_in_graph else None


def _why_not(module: nn.Module, part: Part) -> str | None:
    """Why the module keeps its step; None where the static one equals it."""
    cls = own_class(module)
    for method in part.methods:
        own = getattr(cls, method)
        is_stock = own is getattr(part.kind, method) and own.__module__.startswith("detectron2.")
        if method in vars(module) or not is_stock:
            return f"{cls.__name__} has a {method} of its own"
    if part.kind is RPN:
        return next(_faults_of_loss(module), None)
    return next(_faults_of_box_heads(module), None) if hasattr(module, "box_predictor") else None


def _faults_of_loss(head: Any) -> Iterator[str]:
    if type(head.box2box_transform) is not Box2BoxTransform:
        yield f"box2box_transform is a {type(head.box2box_transform).__name__}"
    if head.box_reg_loss_type not in BOX_LOSSES:
        yield f"box_reg_loss_type is {head.box_reg_loss_type!r}"


def _faults_of_box_heads(heads: Any) -> Iterator[str]:
    if getattr(heads, "train_on_pred_boxes", False):
        yield "TRAIN_ON_PRED_BOXES is on"
    pooler, features = getattr(heads, "box_pooler", None), getattr(heads, "box_head", None)
    if pooler is None:
        pooler, features = heads.pooler, heads.res5
    if not can_pool(pooler):
        yield "its pooler is not a ROIPooler of ROIAlign"
    if _has_batch_norm(features):
        yield "its box head has a BatchNorm, whose statistics padding would change"
    predictors = heads.box_predictor
    for predictor in predictors if isinstance(predictors, nn.ModuleList) else [predictors]:
        yield from _faults_of_predictor(predictor)


def _faults_of_predictor(predictor: Any) -> Iterator[str]:
    name = type(predictor).__name__
    for method in ("losses", "box_reg_loss", "predict_boxes", "sigmoid_cross_entropy_loss"):
        own = getattr(type(predictor), method, None)
        if own is not getattr(FastRCNNOutputLayers, method, None):
            yield f"{name} has a {method} of its own"
            return
    if getattr(predictor, "use_fed_loss", False):
        yield "USE_FED_LOSS is on"
    yield from _faults_of_loss(predictor)


def _choose_heads(heads: Any) -> list[str]:
    """Decide which heads besides the box head are static; why the others are not."""
    faults = []
    kinds = (
        ("mask", "_masks_are_static", BaseMaskRCNNHead),
        ("keypoint", "_keypoints_are_static", BaseKeypointRCNNHead),
    )
    for kind, attribute, base in kinds:
        if not getattr(heads, f"{kind}_on", False):
            continue
        fault = _fault_of_head(heads, kind, base)
        heads.__dict__[attribute] = fault is None
        if fault:
            faults.append(f"its {kind} head {fault}")
    return faults


def _fault_of_head(heads: Any, kind: str, base: Any) -> str | None:
    head = getattr(heads, f"{kind}_head")
    if not isinstance(head, base) or type(head).forward is not base.forward:
        return f"is a {type(head).__name__}"
    # Res5ROIHeads has one pooler for all.
    if not can_pool(getattr(heads, f"{kind}_pooler", getattr(heads, "pooler", None))):
        return "has a pooler that is not a ROIPooler of ROIAlign"
    if _has_batch_norm(head):
        return "has a BatchNorm, whose statistics padding would change"
    return None


def _has_batch_norm(module: Any) -> bool:
    return any(isinstance(part, _BatchNorm) for part in module.modules())

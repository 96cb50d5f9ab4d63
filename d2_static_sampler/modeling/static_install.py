"""Giving the static step to those modules of a model that it equals."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from detectron2.modeling.anchor_generator import DefaultAnchorGenerator
from detectron2.modeling.meta_arch.rcnn import GeneralizedRCNN, ProposalNetwork
from detectron2.modeling.proposal_generator.rpn import RPN
from detectron2.modeling.roi_heads import CascadeROIHeads, Res5ROIHeads, StandardROIHeads
from torch import nn

from ..compile import CompiledFunction
from .coverage import first_fault, first_fault_of_head
from .roi_heads import BatchProposalSampler
from .rpn import BatchAnchorSampler
from .static_anchors import StaticAnchors
from .static_cascade import StaticCascadeROIHeads
from .static_model import StaticProposalNetwork, StaticRCNN
from .static_part import ATTRIBUTE, StaticPart
from .static_roi_heads import RegionGraphs, StaticRes5ROIHeads, StaticROIHeads
from .static_rpn import StaticRPN, anchor_graphs
from .subclass import SampledHead, enter_subclass, plain_class

logger = logging.getLogger(f"detectron2.{__name__}")


class Kind(NamedTuple):
    """A kind of module, what serves it, and what compiles its part."""

    kind: type[nn.Module]
    in_evaluation: type
    in_training: type
    graphs: Callable[[], Any] | None = None


# The first kind that a module is counts.
_KINDS = (
    Kind(RPN, BatchAnchorSampler, StaticRPN, anchor_graphs),
    Kind(CascadeROIHeads, BatchProposalSampler, StaticCascadeROIHeads, RegionGraphs),
    Kind(StandardROIHeads, BatchProposalSampler, StaticROIHeads, RegionGraphs),
    Kind(Res5ROIHeads, BatchProposalSampler, StaticRes5ROIHeads, RegionGraphs),
    Kind(DefaultAnchorGenerator, SampledHead, StaticAnchors),
    Kind(GeneralizedRCNN, SampledHead, StaticRCNN),
    Kind(ProposalNetwork, SampledHead, StaticProposalNetwork),
)


def install_static_step(model: nn.Module) -> None:
    """Give the static step to every module of ``model`` that it equals, in place.

    What is left out is said in one warning: it stays Detectron2's, or its owner's.
    """
    left_out = []
    for name, module in model.named_modules():
        kind = next((kind for kind in _KINDS if isinstance(module, kind.kind)), None)
        faults: list[str] = []
        if kind is not None:
            faults = _enter(name, module, kind)
        elif "_label_sampler" in vars(module):
            faults = [f"{plain_class(module).__name__} is not covered"]
        left_out += [f"{name or 'the model'}: {fault}" for fault in faults]
    if left_out:
        logger.warning("STATIC_STEP leaves out " + "; ".join(left_out))


def has_static_step(model: nn.Module) -> bool:
    """Whether any module of ``model`` has the static step, which it takes where it equals it."""
    return any(ATTRIBUTE in vars(module) for module in model.modules())


def static_graphs(model: nn.Module) -> list[CompiledFunction]:
    """What the static step of ``model`` compiles; nothing where its sampler is not compiled."""
    graphs: list[CompiledFunction] = []
    for module in model.modules():
        own = vars(module)[ATTRIBUTE].graphs if ATTRIBUTE in vars(module) else None
        if isinstance(own, CompiledFunction):
            graphs.append(own)
        elif isinstance(own, RegionGraphs):
            graphs += [own.label_and_sample, own.losses]
    return graphs


def _enter(name: str, module: nn.Module, kind: Kind) -> list[str]:
    """Give the module its part; why it, or one of its heads, does not take it now."""
    if fault := first_fault(module, kind.kind):
        return [fault]
    sampler = vars(module).get("_label_sampler")
    is_compiled = sampler is not None and sampler.can_be_in_graph
    part = StaticPart(name, kind.kind)
    part.graphs = kind.graphs() if kind.graphs and is_compiled else None
    module.__dict__[ATTRIBUTE] = part
    enter_subclass(module, kind.in_evaluation, kind.in_training)
    heads = [what for what in ("mask", "keypoint") if getattr(module, f"{what}_on", False)]
    faults = [
        f"its {head} head {fault}" for head in heads if (fault := first_fault_of_head(module, head))
    ]
    part.said.update(faults)
    return faults

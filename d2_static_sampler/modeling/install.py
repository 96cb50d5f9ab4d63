"""Installing a sampler in a built model, and taking it out again."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from detectron2.modeling.proposal_generator import rpn
from detectron2.modeling.proposal_generator.rpn import RPN
from detectron2.modeling.roi_heads import roi_heads
from detectron2.modeling.roi_heads.roi_heads import ROIHeads
from detectron2.modeling.roi_heads.rotated_fast_rcnn import RROIHeads
from torch import nn

from .choice import check_model, resolve_choice
from .copied_heads import SUBSAMPLE_LABELS, CopiedHead, is_copied_head, samples_by_itself
from .deferred import flush_current
from .head_sampler import HeadSampler
from .roi_heads import BatchProposalSampler, BatchRotatedProposalSampler, ProposalSampler
from .rpn import AnchorSampler, BatchAnchorSampler
from .static_install import has_static_step, install_static_step
from .static_part import ATTRIBUTE
from .stock import is_same, is_stock
from .subclass import SampledHead, enter_subclass, has_subclass, leave_subclass, own_class

logger = logging.getLogger(f"detectron2.{__name__}")


class Seam(NamedTuple):
    """Where a head samples: a method over the whole batch, and one for an image inside it."""

    head: type[nn.Module]
    batch_method: str
    image_method: str
    batch_mixin: type[SampledHead]
    image_mixin: type[SampledHead]


# The first seam whose head a module is counts: RROIHeads is a ROIHeads too.
_SEAMS = (
    Seam(
        head=RPN,
        batch_method="label_and_sample_anchors",
        image_method="_subsample_labels",
        batch_mixin=BatchAnchorSampler,
        image_mixin=AnchorSampler,
    ),
    Seam(
        head=RROIHeads,
        batch_method="label_and_sample_proposals",
        image_method="_sample_proposals",
        batch_mixin=BatchRotatedProposalSampler,
        image_mixin=ProposalSampler,
    ),
    Seam(
        head=ROIHeads,
        batch_method="label_and_sample_proposals",
        image_method="_sample_proposals",
        batch_mixin=BatchProposalSampler,
        image_mixin=ProposalSampler,
    ),
)


def install_sampler(
    model: nn.Module,
    cfg_or_name_or_sampler: Any,
    *,
    static_step: bool | None = None,
    seed: int | None = None,
) -> nn.Module:
    """Let a label sampler serve every RPN and every ROI heads of ``model``, in place.

    Call it on a built model, from YAML or LazyConfig, before it is wrapped for data-parallel
    training. Keys of the state dict, checkpoints, inference and other models stay as they are.
    A method that a subclass of yours overrides stays yours. "naive" means Detectron2's own
    code: whatever was installed is taken out. A second call replaces the first one's sampler.

    Args:
        model: any module that holds RPN or ROIHeads modules, or is one.
        cfg_or_name_or_sampler: a config with ``MODEL.SAMPLER``, a registered name, or a sampler.
        static_step: overrides ``MODEL.SAMPLER.STATIC_STEP``: whether the rest of the training
            step has fixed shapes too, where it is Detectron2's own. False is the default.
        seed: overrides ``MODEL.SAMPLER.SEED``; -1, the default, is torch's global generator.

    Returns:
        ``model``.

    Raises:
        TypeError: a model that is no module, or a choice that is no config, name or sampler.
        ValueError: a name that is not registered, a wrong value in the config or in an argument,
            or a static step with "naive".
        Exception: as :func:`uninstall_sampler`, of a static step that was installed before.
    """
    check_model(model)
    impl, sampler, static_step, seed = resolve_choice(cfg_or_name_or_sampler, static_step, seed)
    uninstall_sampler(model)
    if sampler is None:
        return model
    heads = [
        (name, module)
        for name, module in model.named_modules()
        if _seam(module) or is_copied_head(module)
    ]
    for number, (name, module) in enumerate(heads):
        if mixin := _choose_mixin(name, module):
            enter_subclass(module, mixin)
            # Not through nn.Module's __setattr__: the sampler is no child of the model.
            module.__dict__["_label_sampler"] = HeadSampler(
                sampler, impl=impl, head=number, seed=seed
            )
    if not heads:
        logger.warning(f"{type(model).__name__} has no RPN and no ROIHeads: no sampler installed")
    _warn_of_a_function_of_ones_own()
    _warn_of_the_unserved(model)
    if heads and static_step:
        install_static_step(model)
    return model


def uninstall_sampler(model: nn.Module) -> nn.Module:
    """Give every head of ``model`` its own class back, in place; returns ``model``.

    What a static step has put off for the current event storage is written first, in order: the
    figures that Detectron2 writes from now on come behind.

    Raises:
        TypeError: ``model`` is no module.
        Exception: that of a check of the static step that had failed; the sampler is out then too.
    """
    check_model(model)
    try:
        if has_static_step(model):
            flush_current()
    finally:
        for module in model.modules():
            if has_subclass(module):
                leave_subclass(module)
                for name in ("_label_sampler", ATTRIBUTE):
                    module.__dict__.pop(name, None)
    return model


def installed_samplers(model: nn.Module) -> dict[nn.Module, HeadSampler]:
    """The heads of ``model`` that have a sampler, with what they call, in the model's order."""
    return {
        module: module.__dict__["_label_sampler"]
        for module in model.modules()
        if "_label_sampler" in module.__dict__
    }


def _seam(module: nn.Module) -> Seam | None:
    return next((seam for seam in _SEAMS if isinstance(module, seam.head)), None)


def _warn_of_a_function_of_ones_own() -> None:
    for module in (rpn, roi_heads):
        if not is_same(module.subsample_labels, SUBSAMPLE_LABELS):
            logger.warning(
                f"{module.__name__}.subsample_labels has been replaced by a function of yours, "
                "whose place the sampler takes"
            )


def _warn_of_the_unserved(model: nn.Module) -> None:
    unserved = [
        f"{name or 'the model'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if not has_subclass(module) and _seam(module) is None and samples_by_itself(module)
    ]
    if unserved:
        logger.warning(
            f"{', '.join(unserved)} sample by themselves, and keep it: they are no RPN or "
            "ROIHeads of Detectron2's, and do not call its subsample_labels"
        )


def _choose_mixin(name: str, module: nn.Module) -> type[SampledHead] | None:
    """The mixin that replaces what a user's subclass has not; None where nothing is left."""
    seam = _seam(module)
    if seam is None:
        return CopiedHead
    cls = own_class(module)
    overrides = [
        method for method in (seam.batch_method, seam.image_method) if _is_users(module, method)
    ]
    if overrides:
        logger.warning(
            f"{name or cls.__name__}: {cls.__name__} overrides {', '.join(overrides)}, "
            "which stays as it is"
        )
    if seam.image_method in overrides:
        return None
    return seam.image_mixin if overrides else seam.batch_mixin


def _is_users(module: nn.Module, method: str) -> bool:
    """Whether ``method`` is not Detectron2's: a subclass's, patched in, or the instance's own."""
    if method in vars(module):
        return True
    found = getattr(own_class(module), method)
    return not (is_stock(found) and found.__module__.startswith("detectron2.modeling."))

"""What users do to Detectron2's models: a table of small customisations, each of which shows.

A plant takes a model of ``models.MODELS`` and a ``pytest.MonkeyPatch``, and changes the model, one
of its parts, a class or a module of Detectron2's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional
from detectron2.layers import FrozenBatchNorm2d
from detectron2.modeling import anchor_generator, box_regression, poolers
from detectron2.modeling.anchor_generator import DefaultAnchorGenerator
from detectron2.modeling.box_regression import Box2BoxTransform
from detectron2.modeling.matcher import Matcher
from detectron2.modeling.meta_arch.rcnn import GeneralizedRCNN
from detectron2.modeling.poolers import ROIPooler
from detectron2.modeling.proposal_generator import proposal_utils, rpn
from detectron2.modeling.proposal_generator.rpn import RPN
from detectron2.modeling.roi_heads import (
    CascadeROIHeads,
    StandardROIHeads,
    cascade_rcnn,
    fast_rcnn,
    keypoint_head,
    mask_head,
    roi_heads,
)
from detectron2.modeling.roi_heads.fast_rcnn import FastRCNNOutputLayers
from detectron2.modeling.roi_heads.mask_head import MaskRCNNConvUpsampleHead
from detectron2.structures import BitMasks, Boxes, ImageList, Instances, Keypoints
from detectron2.structures import boxes as boxes_module
from torch import nn

RPN_PART, HEADS = "proposal_generator", "roi_heads"


class Plant(NamedTuple):
    """A customisation.

    Attributes:
        change: (model, monkeypatch) to nothing.
        models: of ``models.MODELS`` that it means something to.
        is_seen: a static step leaves something out, with a warning; otherwise it honours it.
        opts: settings of the model.
        is_of_model: (property) it concerns one model; otherwise it is planted once for all.
        may_come_later: (property) it means something after a sampler has been installed, too.
    """

    change: Callable[[Any, Any], None]
    models: tuple[str, ...] = ("faster_fpn",)
    is_seen: bool = True
    opts: tuple[Any, ...] = ()

    @property
    def is_of_model(self) -> bool:
        return not getattr(self.change, "is_global", False)

    @property
    def may_come_later(self) -> bool:
        return not getattr(self.change, "is_before_all", False)


# What replaces a function, given what it replaces.


def scaled(function: Any, factor: float = 1.5) -> Any:
    """Its result, a tensor or losses by name, times ``factor``."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if isinstance(result, dict):
            return {name: loss * factor for name, loss in result.items()}
        return result * factor

    return wrapper


def first_half(function: Any) -> Any:
    """Half of the Instances of every image in its result."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return halves(function(*args, **kwargs))

    return wrapper


def halves(images: list[Instances]) -> list[Instances]:
    return [image[: (len(image) + 1) // 2] for image in images]


def on(path: str, name: str, wrap: Callable[[Any], Any] = scaled) -> Callable[[Any, Any], None]:
    """Replaces a method of one object."""

    def change(model: Any, patch: Any) -> None:
        owner = find(model, path)
        patch.setitem(vars(owner), name, wrap(getattr(owner, name)))

    return change


def in_(owner: Any, name: str, wrap: Callable[[Any], Any] = scaled) -> Callable[[Any, Any], None]:
    """Replaces a method of a class, or what a module finds by a name."""

    def change(_: Any, patch: Any) -> None:
        patch.setattr(owner, name, wrap(getattr(owner, name)))

    change.is_global = True
    return change


def become(path: str, cls: type) -> Callable[[Any, Any], None]:
    """Gives an object another class; a module that has a sampler would lose it by that."""

    def change(model: Any, _: Any) -> None:
        find(model, path).__class__ = cls

    change.is_before_all = issubclass(cls, nn.Module)
    return change


def put(path: str, make: Callable[[Any], Any]) -> Callable[[Any, Any], None]:
    """Puts another object into an attribute."""

    def change(model: Any, patch: Any) -> None:
        parent, _, name = path.rpartition(".")
        owner = find(model, parent)
        setattr(owner, name, make(getattr(owner, name)))

    return change


def hook(path: str, kind: str, function: Callable[..., Any]) -> Callable[[Any, Any], None]:
    """Registers a hook of one module."""

    def change(model: Any, _: Any) -> None:
        getattr(find(model, path), f"register_{kind}")(function)

    return change


def find(model: Any, path: str) -> Any:
    return functools.reduce(getattr, path.split(".") if path else (), model)


# Classes of a user's own.


class IgnoringMatcher(Matcher):
    """No candidate is negative."""

    def __call__(self, quality: Any) -> Any:
        matches, labels = super().__call__(quality)
        labels[labels == 0] = -1
        return matches, labels


class OddTransform(Box2BoxTransform):
    def get_deltas(self, src: Any, target: Any) -> Any:
        return super().get_deltas(src, target) * 2 + 0.5


class OwnOutput(FastRCNNOutputLayers):
    def losses(self, predictions: Any, proposals: Any) -> Any:
        return {k: v * 2 for k, v in super().losses(predictions, proposals).items()}


class HalfLoss(RPN):
    def losses(self, *args: Any, **kwargs: Any) -> Any:
        return {name: loss * 0.5 for name, loss in super().losses(*args, **kwargs).items()}


class FewProposals(RPN):
    def predict_proposals(self, *args: Any, **kwargs: Any) -> Any:
        return halves(super().predict_proposals(*args, **kwargs))


class LooksAtBoxes(StandardROIHeads):
    def _forward_box(self, features: Any, proposals: Any) -> Any:
        losses = super()._forward_box(features, proposals)
        return {k: v * len(proposals[0]) for k, v in losses.items()}


class WideProposals(StandardROIHeads):
    """Looks at what it trains on."""

    def forward(self, images: Any, features: Any, proposals: Any, targets: Any = None) -> Any:
        for image in proposals:
            image.proposal_boxes.scale(0.9, 0.9)
        return super().forward(images, features, proposals, targets)


class OwnRCNN(GeneralizedRCNN):
    """A meta-architecture that edits the proposals before the heads see them."""

    def forward(self, batched_inputs: Any) -> Any:
        if not self.training:
            return super().forward(batched_inputs)
        images = self.preprocess_image(batched_inputs)
        truth = [x["instances"].to(self.device) for x in batched_inputs]
        features = self.backbone(images.tensor)
        proposals, losses = self.proposal_generator(images, features, truth)
        assert isinstance(proposals, list)
        proposals[0] = proposals[0][: (len(proposals[0]) + 1) // 2]
        for image in proposals:
            image.proposal_boxes.scale(0.95, 0.95)
        return self.roi_heads(images, features, [*proposals], truth)[1] | losses


class OwnImages(GeneralizedRCNN):
    def preprocess_image(self, batched_inputs: Any) -> Any:
        images = super().preprocess_image(batched_inputs)
        return ImageList(images.tensor.flip(3), images.image_sizes)


class OwnAnchors(DefaultAnchorGenerator):
    def _grid_anchors(self, grid_sizes: Any) -> Any:
        return [level + 1 for level in super()._grid_anchors(grid_sizes)]


class OwnPooler(ROIPooler):
    def forward(self, x: Any, box_lists: Any) -> Any:
        return super().forward(x, box_lists) * 2


class Centered(nn.Module):
    """Each row sees all others."""

    def forward(self, x: Any) -> Any:
        return x - x.mean(dim=0)


class CosineScores(nn.Linear):
    """Of few-shot detectors."""

    def forward(self, x: Any) -> Any:
        return 4 * nn.functional.normalize(x, dim=1) @ self.weight.T


class TwoFactors(nn.Linear):
    """An adapter, as fine-tuning puts them in the place of a layer."""

    def forward(self, x: Any) -> Any:
        return super().forward(x) * 1.25


class MeanNorm(FrozenBatchNorm2d):
    def forward(self, x: Any) -> Any:
        return super().forward(x) - x.mean()


def adapter(cls: type) -> Callable[[Any], Any]:
    """A linear layer of class ``cls`` with the weights of another."""

    def make(layer: Any) -> Any:
        new = cls(layer.in_features, layer.out_features)
        new.load_state_dict(layer.state_dict())
        return new

    return make


def behind(part: nn.Module) -> Callable[[Any], Any]:
    """A head with another layer behind it."""

    def make(head: Any) -> Any:
        head.append(part) if hasattr(head, "append") else head.add_module("own", part)
        return head

    return make


# Hooks.


def scale_result(factor: float) -> Any:
    return lambda _, __, result: result * factor


def scale_by_rows(_: Any, args: Any) -> Any:
    """Sees how many rows there are."""
    return (args[0] * (1 + len(args[0]) / 100), *args[1:])


def scale_gradient(_: Any, gradients: Any, __: Any) -> Any:
    return tuple(None if x is None else x * (1 + len(x) / 100) for x in gradients)


def shrink_proposals(_: Any, args: Any) -> Any:
    images, features, proposals, *rest = args
    assert isinstance(proposals, list)
    for image in proposals:
        image.proposal_boxes.scale(0.9, 0.9)
    return (images, features, proposals, *rest)


def fewer_proposals(_: Any, __: Any, result: Any) -> Any:
    proposals, losses = result
    return halves(proposals), losses


def global_hook(model: Any, patch: Any) -> None:
    """A hook of all modules; taken away with the other patches."""
    hooks = nn.modules.module._global_forward_hooks

    def forward_hook(module: Any, _: Any, result: Any) -> Any:
        if isinstance(module, FastRCNNOutputLayers):
            return tuple(x * (1 + len(x) / 100) for x in result)
        return None

    patch.setitem(hooks, 10_001, forward_hook)


global_hook.is_global = True


def shifted_clip(function: Any) -> Any:
    def clip(self: Any, box_size: Any) -> None:
        function(self, (box_size[0] - 4, box_size[1] - 4))

    return clip


def next_levels(function: Any) -> Any:
    return lambda *args, **kwargs: (function(*args, **kwargs) + 1).clamp(max=3)


def more(function: Any) -> Any:
    return lambda *args, **kwargs: function(*args, **kwargs) + 0.5


def first_cells(function: Any) -> Any:
    def to_heatmap(*args: Any) -> Any:
        cells, is_valid = function(*args)
        return cells * 0, is_valid

    return to_heatmap


def few_kept(function: Any) -> Any:
    return lambda *args, **kwargs: function(*args, **kwargs)[::2]


def flipped_masks(function: Any) -> Any:
    return lambda *args, **kwargs: ~function(*args, **kwargs)


def half_foreground(function: Any) -> Any:
    def select(proposals: Any, bg_label: int) -> Any:
        fg, masks = function(proposals, bg_label)
        for mask in masks:
            mask[mask.nonzero()[1::2]] = False
        return [image[::2] for image in fg], masks

    return select


def moved_grid(function: Any) -> Any:
    return lambda *args, **kwargs: tuple(x + 1 for x in function(*args, **kwargs))


def mirrored(function: Any) -> Any:
    def from_tensors(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        return function([image.flip(2) for image in tensors], *args, **kwargs)

    return from_tensors


def halved_labels(function: Any) -> Any:
    """Of what is not background, every second candidate is ignored."""

    def match(self: Any, quality: Any) -> Any:
        matches, labels = function(self, quality)
        odd = torch.arange(len(labels), device=labels.device) % 2 == 1
        return matches, labels.masked_fill((labels == 1) & odd, 0)

    return match


def doubled_scores(function: Any) -> Any:
    def run(*args: Any) -> Any:
        scores, deltas = function(*args)
        return scores * 2, deltas

    return run


def as_matcher(cls: type) -> Callable[[Any], Any]:
    def make(matcher: Any) -> Any:
        matcher.__class__ = cls
        return matcher

    return make


class HalfMatcher(Matcher):
    __call__ = halved_labels(Matcher.__call__)


def thresholds_down(model: Any, _: Any) -> None:
    matcher = model.roi_heads.proposal_matcher
    matcher.thresholds = [matcher.thresholds[0], 0.3, matcher.thresholds[-1]]


def set_to(path: str, value: Any) -> Callable[[Any, Any], None]:
    return put(path, lambda _: value)


FPN = ("faster_fpn", "mask_bitmaps", "mask_polygons", "keypoint")
MASKS = ("mask_bitmaps", "mask_polygons")
STANDARD = (*FPN, "cascade")
PREDICTOR, BOX_HEAD = f"{HEADS}.box_predictor", f"{HEADS}.box_head"
FROZEN = ("MODEL.RESNETS.NORM", "FrozenBN")

PLANTS: dict[str, Plant] = {
    # Matchers
    "anchor matcher": Plant(become(f"{RPN_PART}.anchor_matcher", IgnoringMatcher), STANDARD),
    "proposal matcher": Plant(become(f"{HEADS}.proposal_matcher", IgnoringMatcher), FPN),
    "matchers of a cascade": Plant(
        put(
            f"{HEADS}.proposal_matchers",
            lambda old: [old[0], *map(as_matcher(HalfMatcher), old[1:])],
        ),
        ("cascade",),
    ),
    "Matcher.__call__": Plant(in_(Matcher, "__call__", halved_labels), STANDARD),
    "Matcher.set_low_quality_matches_": Plant(
        in_(Matcher, "set_low_quality_matches_", lambda _: lambda *args: None), STANDARD
    ),
    "thresholds": Plant(thresholds_down, FPN, is_seen=False),
    # Overlaps
    "overlaps of anchors": Plant(in_(rpn, "pairwise_iou", lambda f: scaled(f, 0.5)), STANDARD),
    "overlaps of proposals": Plant(in_(roi_heads, "pairwise_iou", lambda f: scaled(f, 0.4)), FPN),
    "overlaps in a cascade": Plant(
        in_(cascade_rcnn, "pairwise_iou", lambda f: scaled(f, 0.5)), ("cascade",)
    ),
    "intersections": Plant(
        in_(boxes_module, "pairwise_intersection", lambda f: scaled(f, 0.5)), STANDARD
    ),
    # Box transforms
    "transform of the RPN": Plant(become(f"{RPN_PART}.box2box_transform", OddTransform), STANDARD),
    "transform of the heads": Plant(become(f"{PREDICTOR}.box2box_transform", OddTransform), FPN),
    "Box2BoxTransform.get_deltas": Plant(in_(Box2BoxTransform, "get_deltas"), STANDARD),
    "Box2BoxTransform.apply_deltas": Plant(
        in_(Box2BoxTransform, "apply_deltas", lambda f: scaled(f, 0.9)), STANDARD
    ),
    "get_deltas of one transform": Plant(
        on(f"{PREDICTOR}.box2box_transform", "get_deltas", more), FPN
    ),
    # Losses
    "losses of the predictor": Plant(on(PREDICTOR, "losses"), FPN),
    "FastRCNNOutputLayers.losses": Plant(in_(FastRCNNOutputLayers, "losses"), STANDARD),
    "FastRCNNOutputLayers.box_reg_loss": Plant(in_(FastRCNNOutputLayers, "box_reg_loss"), STANDARD),
    "box_reg_loss of the predictor": Plant(on(PREDICTOR, "box_reg_loss"), FPN),
    "fast_rcnn.cross_entropy": Plant(in_(fast_rcnn, "cross_entropy"), STANDARD),
    "rpn._dense_box_regression_loss": Plant(in_(rpn, "_dense_box_regression_loss"), STANDARD),
    "box_regression.smooth_l1_loss": Plant(in_(box_regression, "smooth_l1_loss"), STANDARD),
    "torch's binary_cross_entropy_with_logits": Plant(
        in_(torch.nn.functional, "binary_cross_entropy_with_logits"), STANDARD
    ),
    "RPN.losses": Plant(in_(RPN, "losses"), STANDARD),
    "a subclass's losses": Plant(become(RPN_PART, HalfLoss), STANDARD),
    "a predictor's class": Plant(become(PREDICTOR, OwnOutput), FPN),
    "weights of losses": Plant(
        set_to(f"{PREDICTOR}.loss_weight", {"loss_cls": 0.5, "loss_box_reg": 3.0}),
        FPN,
        is_seen=False,
    ),
    "beta": Plant(set_to(f"{RPN_PART}.smooth_l1_beta", 0.5), STANDARD, is_seen=False),
    # Proposals
    "rpn.find_top_rpn_proposals": Plant(in_(rpn, "find_top_rpn_proposals", first_half), STANDARD),
    "proposal_utils.batched_nms": Plant(in_(proposal_utils, "batched_nms", few_kept), STANDARD),
    "predict_proposals of the RPN": Plant(on(RPN_PART, "predict_proposals", first_half), STANDARD),
    "a subclass's proposals": Plant(become(RPN_PART, FewProposals), STANDARD),
    "pre_nms_topk": Plant(
        set_to(f"{RPN_PART}.pre_nms_topk", {True: 20, False: 20}), STANDARD, False
    ),
    "Boxes.clip": Plant(in_(Boxes, "clip", shifted_clip), STANDARD),
    "Boxes.area": Plant(in_(Boxes, "area", lambda f: scaled(f, 2.0)), STANDARD),
    "a forward hook of the RPN": Plant(
        hook(RPN_PART, "forward_hook", fewer_proposals), STANDARD, is_seen=False
    ),
    "a forward pre-hook of the heads": Plant(
        hook(HEADS, "forward_pre_hook", shrink_proposals), STANDARD, is_seen=False
    ),
    "a meta-architecture": Plant(become("", OwnRCNN), STANDARD),
    "truth not appended": Plant(set_to(f"{HEADS}.proposal_append_gt", False), STANDARD, False),
    # Poolers
    "a pooler's class": Plant(become(f"{HEADS}.box_pooler", OwnPooler), STANDARD),
    "ROIPooler.forward": Plant(in_(ROIPooler, "forward"), STANDARD),
    "levels of boxes": Plant(in_(poolers, "assign_boxes_to_levels", next_levels), STANDARD),
    "a hook of the pooler": Plant(
        hook(f"{HEADS}.box_pooler", "forward_hook", scale_result(2.0)), STANDARD
    ),
    # Box heads
    "a layer that sees all rows": Plant(put(BOX_HEAD, behind(Centered())), FPN),
    "dropout": Plant(put(BOX_HEAD, behind(nn.Dropout(0.5))), FPN),
    "a hook of the box head": Plant(
        hook(f"{BOX_HEAD}.fc1", "forward_pre_hook", scale_by_rows), FPN
    ),
    "a hook of the predictor": Plant(hook(PREDICTOR, "forward_pre_hook", scale_by_rows), FPN),
    "a backward hook": Plant(hook(f"{BOX_HEAD}.fc2", "full_backward_hook", scale_gradient), FPN),
    "a global hook": Plant(global_hook, FPN),
    "cosine scores": Plant(put(f"{PREDICTOR}.cls_score", adapter(CosineScores)), FPN),
    "an adapter": Plant(put(f"{BOX_HEAD}.fc1", adapter(TwoFactors)), FPN),
    "forward of a layer": Plant(on(f"{BOX_HEAD}.fc1", "forward"), FPN),
    "a subclass's _forward_box": Plant(become(HEADS, LooksAtBoxes), FPN),
    "a subclass's forward": Plant(become(HEADS, WideProposals), FPN),
    "_forward_box of the heads": Plant(on(HEADS, "_forward_box"), STANDARD),
    "StandardROIHeads._forward_box": Plant(in_(StandardROIHeads, "_forward_box"), FPN),
    "CascadeROIHeads._run_stage": Plant(
        in_(CascadeROIHeads, "_run_stage", doubled_scores), ("cascade",)
    ),
    # Mask and keypoint heads
    "forward of the mask head": Plant(on(f"{HEADS}.mask_head", "forward"), MASKS),
    "layers of the mask head": Plant(on(f"{HEADS}.mask_head", "layers"), MASKS),
    "MaskRCNNConvUpsampleHead.layers": Plant(in_(MaskRCNNConvUpsampleHead, "layers"), MASKS),
    "a hook of the mask head": Plant(
        hook(f"{HEADS}.mask_head", "forward_pre_hook", scale_by_rows), MASKS
    ),
    "mask_head.mask_rcnn_loss": Plant(in_(mask_head, "mask_rcnn_loss"), MASKS),
    "BitMasks.crop_and_resize": Plant(
        in_(BitMasks, "crop_and_resize", flipped_masks), ("mask_bitmaps",)
    ),
    "select_foreground_proposals": Plant(
        in_(roi_heads, "select_foreground_proposals", half_foreground), MASKS
    ),
    "a hook of the mask pooler": Plant(
        hook(f"{HEADS}.mask_pooler", "forward_hook", scale_result(2.0)), MASKS
    ),
    "keypoint_head.keypoint_rcnn_loss": Plant(
        in_(keypoint_head, "keypoint_rcnn_loss"), ("keypoint",)
    ),
    "forward of the keypoint head": Plant(on(f"{HEADS}.keypoint_head", "forward"), ("keypoint",)),
    "Keypoints.to_heatmap": Plant(in_(Keypoints, "to_heatmap", first_cells), ("keypoint",)),
    # One feature map
    "a norm that sees all rows": Plant(
        become(f"{HEADS}.res5.0.conv1.norm", MeanNorm), ("faster_c4",), opts=FROZEN
    ),
    "_shared_roi_transform": Plant(on(HEADS, "_shared_roi_transform"), ("faster_c4",), opts=FROZEN),
    # Images and anchors
    "preprocess_image": Plant(become("", OwnImages), STANDARD),
    "ImageList.from_tensors": Plant(
        in_(ImageList, "from_tensors", lambda f: staticmethod(mirrored(f))), STANDARD
    ),
    "an anchor generator": Plant(become(f"{RPN_PART}.anchor_generator", OwnAnchors), STANDARD),
    "_create_grid_offsets": Plant(
        in_(anchor_generator, "_create_grid_offsets", moved_grid), STANDARD
    ),
    "a hook of the RPN's head": Plant(
        hook(f"{RPN_PART}.rpn_head.conv", "forward_hook", scale_result(1.1)),
        STANDARD,
        is_seen=False,
    ),
    "a hook of the backbone": Plant(
        hook("backbone.fpn_lateral2", "forward_hook", scale_result(1.1)), STANDARD, is_seen=False
    ),
}

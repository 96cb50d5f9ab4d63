"""The model's own part of a training step without host-device synchronisation.

Its inputs, and the border between the RPN and the ROI heads: what is padded passes it where nobody
else looks; everyone else is given Detectron2's lists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from detectron2.structures import ImageList, Instances
from detectron2.utils.events import get_event_storage
from torch import Tensor, nn

from .images import batch_images, batch_size, move_inputs
from .padded import PaddedProposals, as_instances
from .static_part import takes_step
from .static_roi_heads import StaticHeads
from .static_rpn import StaticRPN
from .stock import has_hooks
from .subclass import SampledHead

if TYPE_CHECKING:
    from detectron2.modeling.meta_arch.rcnn import GeneralizedRCNN, ProposalNetwork
else:
    GeneralizedRCNN = ProposalNetwork = object

Losses = dict[str, Tensor]


class StaticModel(SampledHead):
    """What an R-CNN and an RPN alone have in common."""

    def _batch(self, inputs: list[dict[str, Any]]) -> ImageList:
        """The images, which are on the device, normalized and side by side."""
        images = [x["image"] for x in inputs]
        constraints = getattr(self.backbone, "padding_constraints", None)
        size = batch_size(images, self.backbone.size_divisibility, constraints)
        batch = batch_images(images, self.pixel_mean, self.pixel_std, size)
        return ImageList(batch, [(image.shape[-2], image.shape[-1]) for image in images])


class StaticRCNN(StaticModel, GeneralizedRCNN):
    """Detectron2's ``GeneralizedRCNN``; inference stays Detectron2's."""

    def forward(self, batched_inputs: list[dict[str, Any]]) -> Any:
        """As in Detectron2."""
        if not self.training or not takes_step(self):
            return super().forward(batched_inputs)
        inputs = move_inputs(batched_inputs, self.device)
        truth = [x["instances"] for x in inputs] if "instances" in inputs[0] else None
        images = self._batch(inputs)
        features = self.backbone(images.tensor)
        proposals, losses = self._propose(inputs, images, features, truth)
        of_heads = self._train_heads(images, features, proposals, truth)
        if self.vis_period > 0 and get_event_storage().iter % self.vis_period == 0:
            self.visualize_training(batched_inputs, as_instances(proposals))
        return of_heads | losses

    def _propose(
        self,
        inputs: list[dict[str, Any]],
        images: ImageList,
        features: dict[str, Tensor],
        truth: list[Instances] | None,
    ) -> tuple[Any, Losses]:
        rpn = self.proposal_generator
        if rpn is None:
            assert "proposals" in inputs[0]
            return [x["proposals"] for x in inputs], {}
        if truth is not None and passes_padding(rpn, StaticRPN) and takes_step(rpn, truth):
            padded: tuple[PaddedProposals, Losses] = rpn.static_step(images, features, truth)
            return padded
        listed: tuple[list[Instances], Losses] = rpn(images, features, truth)
        return listed

    def _train_heads(
        self,
        images: ImageList,
        features: dict[str, Tensor],
        proposals: Any,
        truth: list[Instances] | None,
    ) -> Losses:
        heads = self.roi_heads
        if truth and passes_padding(heads, StaticHeads) and takes_step(heads, truth, proposals):
            _, losses = heads.static_step(features, proposals, truth)
        else:
            _, losses = heads(images, features, as_instances(proposals), truth)
        return dict(losses)


class StaticProposalNetwork(StaticModel, ProposalNetwork):
    """Detectron2's ``ProposalNetwork``, a model that is an RPN alone."""

    def forward(self, batched_inputs: list[dict[str, Any]]) -> Any:
        """As in Detectron2."""
        rpn = self.proposal_generator
        key = next((key for key in ("instances", "targets") if key in batched_inputs[0]), "")
        if not (self.training and key and passes_padding(rpn, StaticRPN) and takes_step(self)):
            return super().forward(batched_inputs)
        inputs = move_inputs(batched_inputs, self.device)
        truth = [x[key] for x in inputs]
        images = self._batch(inputs)
        features = self.backbone(images.tensor)
        if takes_step(rpn, truth):
            return rpn.static_step(images, features, truth)[1]
        return rpn(images, features, truth)[1]


def passes_padding(module: nn.Module, static: type) -> bool:
    """Whether nobody sees what goes into the module and what comes out of it."""
    return isinstance(module, static) and not has_hooks(module)

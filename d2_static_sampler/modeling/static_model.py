"""The model's own part of a training step without host-device synchronisation: its inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from detectron2.structures import ImageList

from ..static_step.images import batch_images, batch_size, move_inputs
from .subclass import SampledHead

if TYPE_CHECKING:
    from detectron2.modeling.meta_arch.rcnn import GeneralizedRCNN, ProposalNetwork
else:
    GeneralizedRCNN = ProposalNetwork = object


class StaticRCNN(SampledHead, GeneralizedRCNN):
    """Moves images and ground truth in training without waiting; inference stays Detectron2's."""

    def _batch(self, batched_inputs: list[dict[str, Any]]) -> ImageList:
        images = [x["image"] for x in batched_inputs]
        constraints = getattr(self.backbone, "padding_constraints", None)
        size = batch_size(images, self.backbone.size_divisibility, constraints)
        batch = batch_images(images, self.pixel_mean, self.pixel_std, size)
        sizes = [(image.shape[-2], image.shape[-1]) for image in images]
        return ImageList(batch, sizes)

    def forward(self, batched_inputs: list[dict[str, Any]]) -> Any:
        """As in Detectron2."""
        if self.training:
            batched_inputs = move_inputs(batched_inputs, self.device)
        return super().forward(batched_inputs)

    def preprocess_image(self, batched_inputs: list[dict[str, Any]]) -> ImageList:
        """As in Detectron2."""
        return (
            self._batch(batched_inputs)
            if self.training
            else super().preprocess_image(batched_inputs)
        )


class StaticProposalNetwork(SampledHead, ProposalNetwork):
    """The same for a model that is an RPN alone."""

    _batch = StaticRCNN._batch

    def forward(self, batched_inputs: list[dict[str, Any]]) -> Any:
        """As in Detectron2."""
        if not self.training:
            return super().forward(batched_inputs)
        inputs = move_inputs(batched_inputs, self.device)
        images = self._batch(inputs)
        key = "instances" if "instances" in inputs[0] else "targets"
        truth = [x[key] for x in inputs] if key in inputs[0] else None
        _, losses = self.proposal_generator(images, self.backbone(images.tensor), truth)
        return losses

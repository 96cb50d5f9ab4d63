"""Boxes of a batch in tensors of one shape, that anyone may read as Detectron2's Instances.

B images, T slots for the proposals of an image.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from detectron2.structures import Boxes, Instances
from torch import Tensor


class LazyInstances(Sequence[Instances]):
    """A list of Instances that is made when somebody looks into it: then the host waits."""

    def __init__(self, num_images: int) -> None:
        self._num_images = num_images
        self._instances: list[Instances] | None = None

    def make_instances(self) -> list[Instances]:
        """The Instances of each image, of their true lengths."""
        raise NotImplementedError

    @property
    def instances(self) -> list[Instances]:
        """What :meth:`make_instances` makes, once."""
        if self._instances is None:
            self._instances = self.make_instances()
        return self._instances

    def __len__(self) -> int:
        return self._num_images

    @overload
    def __getitem__(self, index: int) -> Instances: ...

    @overload
    def __getitem__(self, index: slice) -> list[Instances]: ...

    def __getitem__(self, index: int | slice) -> Instances | list[Instances]:
        return self.instances[index]

    def __iter__(self) -> Iterator[Instances]:
        return iter(self.instances)


class PaddedProposals(LazyInstances):
    """What the RPN proposes.

    Attributes:
        boxes: (B, T, 4) float32; beyond their number anything that lies in the image.
        logits: (B, T) floating.
        num_boxes: (B,) int64.
        image_sizes: B times (height, width).
    """

    def __init__(
        self, boxes: Tensor, logits: Tensor, num_boxes: Tensor, image_sizes: list[tuple[int, int]]
    ) -> None:
        super().__init__(len(image_sizes))
        self.boxes, self.logits, self.num_boxes = boxes, logits, num_boxes
        self.image_sizes = image_sizes

    def make_instances(self) -> list[Instances]:
        """With the fields of Detectron2's ``find_top_rpn_proposals``."""
        return [
            Instances(
                size,
                proposal_boxes=Boxes(self.boxes[i, :count]),
                objectness_logits=self.logits[i, :count],
            )
            for i, (size, count) in enumerate(
                zip(self.image_sizes, self.num_boxes.tolist(), strict=True)
            )
        ]

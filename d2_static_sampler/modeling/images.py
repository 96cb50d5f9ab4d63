"""Images and their ground truth to the device and into one batch, without waiting.

B images of C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from detectron2.structures import BitMasks, Boxes, Instances, Keypoints, RotatedBoxes
from torch import Tensor
from torch.nn.functional import pad

from .transfers import to_device

# Of one tensor each. A subclass may move in a way of its own, or become one of these by it.
_WRAPPERS = (BitMasks, Boxes, Keypoints, RotatedBoxes)
_MOVED = ("image", "instances", "targets", "proposals")


def move_inputs(inputs: list[dict[str, Any]], device: torch.device) -> list[dict[str, Any]]:
    """A model's inputs with the tensors that training needs on ``device``; others as they are."""
    return [
        {k: _move(v, device) if k in _MOVED else v for k, v in image.items()} for image in inputs
    ]


def batch_images(
    images: Sequence[Tensor], mean: Tensor, std: Tensor, size: tuple[int, int]
) -> Tensor:
    """Normalize images and put them into the upper left corners of one batch.

    Args:
        images: B times (C, Hi, Wi), any real type.
        mean, std: (C, 1, 1) float.
        size: H and W of the batch, at least those of each image.

    Returns:
        (B, C, H, W) float; 0 beyond an image.
    """
    if all(image.shape == images[0].shape for image in images):
        batch = (torch.stack(list(images)) - mean) / std
        height, width = batch.shape[-2:]
        return pad(batch, [0, size[1] - width, 0, size[0] - height]).contiguous()
    batch = mean.new_zeros((len(images), *images[0].shape[:-2], *size))
    for place, image in zip(batch, images, strict=True):
        place[..., : image.shape[-2], : image.shape[-1]] = (image - mean) / std
    return batch


def batch_size(
    images: Sequence[Tensor], divisibility: int, constraints: dict[str, int] | None
) -> tuple[int, int]:
    """Height and width of a batch of these images, as Detectron2's ``ImageList`` has it.

    Args:
        images: B times (C, Hi, Wi).
        divisibility: both are a multiple of it, if it is above 1.
        constraints: a backbone's ``padding_constraints``: "size_divisibility", which goes before
            ``divisibility``, and "square_size", the side of a square instead.
    """
    constraints = constraints or {}
    divisibility = constraints.get("size_divisibility", divisibility)
    square = constraints.get("square_size", 0)
    sizes = [square or max(image.shape[dim] for image in images) for dim in (-2, -1)]
    height, width = (-(-n // divisibility) * divisibility if divisibility > 1 else n for n in sizes)
    return height, width


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return to_device(value, device)
    if type(value) is not Instances:
        return value.to(device) if hasattr(value, "to") else value
    fields = {name: _move_field(field, device) for name, field in value.get_fields().items()}
    return Instances(value.image_size, **fields)


def _move_field(field: Any, device: torch.device) -> Any:
    if isinstance(field, Tensor):
        return to_device(field, device)
    if type(field) in _WRAPPERS:
        # Their own copy to a device waits.
        is_there = field.tensor.device == device
        return field if is_there else type(field)(to_device(field.tensor, device))
    return field.to(device) if hasattr(field, "to") else field

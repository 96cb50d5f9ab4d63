"""What the inputs of some models have beside boxes, classes and masks."""

from __future__ import annotations

from typing import Any

import torch
from detectron2.structures import Boxes, Instances, Keypoints, RotatedBoxes

NUM_KEYPOINTS = 4


def add_keypoints(item: Any, size: int, _: int) -> None:
    truth = item["instances"]
    points = torch.rand(len(truth), NUM_KEYPOINTS, 3)
    boxes = truth.gt_boxes.tensor[:, None]
    points[..., :2] = boxes[..., :2] + points[..., :2] * (boxes[..., 2:] - boxes[..., :2])
    points[..., 2] = 2  # visible
    truth.gt_keypoints = Keypoints(points)


def add_proposals(item: Any, size: int, i: int) -> None:
    """0, 1 and 700 proposals in turn, half of them near a ground-truth box where there is one."""
    count = (0, 1, 700)[i % 3]
    corner = torch.rand(count, 2) * size * 0.6
    boxes = torch.cat([corner, corner + torch.rand(count, 2) * size * 0.3 + 4], dim=1)
    if len(truth := item["instances"]):
        near = truth.gt_boxes.tensor[torch.randint(len(truth), (count // 2,))]
        boxes[: count // 2] = near + torch.rand(count // 2, 4)
    item["proposals"] = Instances(
        (size, size), proposal_boxes=Boxes(boxes), objectness_logits=torch.rand(count)
    )


def add_angles(item: Any, size: int, _: int) -> None:
    truth = item["instances"]
    low, high = truth.gt_boxes.tensor.split(2, dim=1)
    angle = torch.rand(len(truth), 1) * 90
    truth.gt_boxes = RotatedBoxes(torch.cat([(low + high) / 2, high - low, angle], dim=1))


EXTRAS = {"keypoints": add_keypoints, "proposals": add_proposals, "angles": add_angles}

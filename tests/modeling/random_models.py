"""Random small models, inputs and customisations, each from a seed."""

from __future__ import annotations

import math
from random import Random
from typing import Any, NamedTuple

import torch
from detectron2.structures import Boxes

from tests.modeling.customised import FROZEN, PLANTS, Plant
from tests.modeling.models import HAS_POINT_REND, MODELS, TinyModel

KINDS = (
    *("faster_fpn", "faster_c4", "faster_dc5", "mask_polygons", "mask_bitmaps", "keypoint"),
    *("cascade", "rpn_only", "precomputed", "own_classes"),
    *(("point_rend",) if HAS_POINT_REND else ()),
)
RPN, HEADS, BOX, MASK = (
    f"MODEL.{x}." for x in ("RPN", "ROI_HEADS", "ROI_BOX_HEAD", "ROI_MASK_HEAD")
)
BOX_LOSSES = ("smooth_l1", "giou", "diou", "ciou")
# Settings that any model may have, a list of choices for each.
SETTINGS: dict[str, tuple[Any, ...]] = {
    RPN + "BBOX_REG_LOSS_TYPE": BOX_LOSSES,
    RPN + "SMOOTH_L1_BETA": (0.0, 0.3),
    RPN + "BBOX_REG_WEIGHTS": ((1.0, 1.0, 1.0, 1.0), (1.5, 2.0, 0.5, 0.7)),
    RPN + "LOSS_WEIGHT": (1.0, 0.25),
    RPN + "BOUNDARY_THRESH": (-1, 0, 16),
    RPN + "IOU_LABELS": ([0, -1, 1], [-1, 0, 1], [-1, -1, 1], [0, -1, -1]),
    RPN + "IOU_THRESHOLDS": ([0.3, 0.7], [0.1, 0.2]),
    RPN + "BATCH_SIZE_PER_IMAGE": (0, 1, 32, 3000),
    RPN + "POSITIVE_FRACTION": (0.0, 0.29, 0.5, 1.0),
    RPN + "PRE_NMS_TOPK_TRAIN": (1, 40, 2000),
    RPN + "POST_NMS_TOPK_TRAIN": (1, 30, 2000),
    RPN + "NMS_THRESH": (0.0, 0.5, 0.9),
    HEADS + "BATCH_SIZE_PER_IMAGE": (1, 16, 600),
    HEADS + "POSITIVE_FRACTION": (0.0, 0.25, 1.0),
    HEADS + "PROPOSAL_APPEND_GT": (True, False),
    HEADS + "IOU_LABELS": ([0, 1], [-1, 1], [-1, -1], [1, 0]),
    BOX + "BBOX_REG_LOSS_TYPE": BOX_LOSSES,
    BOX + "SMOOTH_L1_BETA": (0.0, 0.3),
    BOX + "TRAIN_ON_PRED_BOXES": (False, True),
    BOX + "POOLER_SAMPLING_RATIO": (0, 2),
    BOX + "POOLER_TYPE": ("ROIAlignV2", "ROIAlign", "ROIPool"),
    BOX + "NORM": ("", "GN", "BN"),
    "MODEL.PROPOSAL_GENERATOR.MIN_SIZE": (0, 10),
    "MODEL.RESNETS.NORM": ("BN", "FrozenBN"),
    MASK + "CLS_AGNOSTIC_MASK": (False, True),
    MASK + "NORM": ("", "GN", "BN"),
    "MODEL.ROI_KEYPOINT_HEAD.NORMALIZE_LOSS_BY_VISIBLE_KEYPOINTS": (True, False),
    "MODEL.ROI_KEYPOINT_HEAD.MIN_KEYPOINTS_PER_IMAGE": (0, 1),
}
# What such a choice needs besides.
NEEDS = {
    BOX + "NORM GN": (BOX + "NUM_CONV", 1, BOX + "CONV_DIM", 32),
    BOX + "NORM BN": (BOX + "NUM_CONV", 1, BOX + "CONV_DIM", 8),
    MASK + "NORM GN": (MASK + "CONV_DIM", 32),
}


class OwnBoxes(Boxes):
    """A user's own."""

    def area(self) -> torch.Tensor:
        return super().area() * 0.5


class Case(NamedTuple):
    """A model to be built, its inputs and what a user does to it."""

    seed: int
    kind: str
    opts: tuple[Any, ...]
    num_gt: tuple[int, ...]
    changes: tuple[str, ...]
    plants: tuple[str, ...]
    is_planted_later: bool

    @property
    def tiny(self) -> TinyModel:
        return MODELS[self.kind]()

    def batch(self) -> Any:
        """The inputs; equal for equal cases."""
        random = Random(self.seed)
        batch = self.tiny.batch(self.num_gt, seed=self.seed)
        for name in sorted(self.changes, key=list(CHANGES).index):
            CHANGES[name](batch, random)
        return batch


def random_case(seed: int) -> Case:
    """The same case for the same seed."""
    random = Random(seed)
    kind = random.choice(KINDS)
    opts: list[Any] = []
    for key in random.sample(sorted(SETTINGS), random.choice((0, 1, 2, 4))):
        value = random.choice(SETTINGS[key])
        opts += [key, value, *NEEDS.get(f"{key} {value}", ())]
    usable = [name for name, plant in PLANTS.items() if _fits(plant, kind)]
    plants = random.sample(usable, min(len(usable), random.choice((0, 1, 1, 2))))
    for name in plants:
        opts += PLANTS[name].opts
    is_later = random.random() < 0.5 and all(PLANTS[name].may_come_later for name in plants)
    counts = [random.choice((0, 0, 1, 2, 3, 5, 9, 40)) for _ in range(random.randint(1, 4))]
    changes = random.sample(sorted(CHANGES), random.choice((0, 0, 1, 1, 2)))
    return Case(seed, kind, tuple(opts), tuple(counts), tuple(changes), tuple(plants), is_later)


def _fits(plant: Plant, kind: str) -> bool:
    # A plant for C4 needs a ResNet without statistics.
    return kind in plant.models and (plant.opts == FROZEN or not plant.opts)


# What is odd in a batch.


def cut(batch: Any, random: Random) -> None:
    """Images of other sizes, that need padding."""
    for item in batch:
        height, width = random.choice(((33, 64), (64, 50), (40, 40), (64, 64)))
        item["image"] = item["image"][:, :height, :width]
        truth = item["instances"]
        masks = truth.has("gt_masks") and getattr(truth.gt_masks, "tensor", None)
        if isinstance(masks, torch.Tensor):
            truth.gt_masks.tensor = masks[:, :height, :width]
        for name in ("instances", "proposals"):
            if name in item:
                item[name]._image_size = (height, width)
        truth.gt_boxes.clip((height, width))


def _some_image(batch: Any, random: Random) -> Any:
    return random.choice(batch)["instances"]


def _without(field: str, everywhere: bool) -> Any:
    def change(batch: Any, random: Random) -> None:
        images = [item["instances"] for item in batch]
        for image in images if everywhere else [random.choice(images)]:
            if image.has(field):
                image.remove(field)

    return change


def _with_box(box: tuple[float, ...]) -> Any:
    def change(batch: Any, random: Random) -> None:
        image = _some_image(batch, random)
        if len(image):
            image.gt_boxes.tensor[0] = torch.tensor(box)

    return change


def class_of_background(batch: Any, random: Random) -> None:
    image = _some_image(batch, random)
    image.gt_classes[:1] = 3  # tests.helpers.NUM_CLASSES


def ignored_class(batch: Any, random: Random) -> None:
    _some_image(batch, random).gt_classes[:1] = -1


def own_boxes(batch: Any, random: Random) -> None:
    image = _some_image(batch, random)
    image.gt_boxes = OwnBoxes(image.gt_boxes.tensor)


def own_field(batch: Any, random: Random) -> None:
    for item in batch:
        item["instances"].gt_weights = torch.rand(len(item["instances"]))


def all_equal(batch: Any, random: Random) -> None:
    for item in batch:
        item["instances"].gt_boxes.tensor[:] = torch.tensor([8.0, 8, 40, 40])


def as_bytes(batch: Any, random: Random) -> None:
    for item in batch:
        item["image"] = item["image"].to(torch.uint8)


def tiny_images(batch: Any, random: Random) -> None:
    for item in batch:
        item["image"] = item["image"][:, :32, :32]
        item["instances"].gt_boxes.clip((32, 32))


INF, NAN = math.inf, math.nan
# In the order in which they are made.
CHANGES: dict[str, Any] = {
    "cut": cut,
    "tiny images": tiny_images,
    "class of background": class_of_background,
    "class -1": ignored_class,
    "no masks in an image": _without("gt_masks", False),
    "no masks": _without("gt_masks", True),
    "no classes in an image": _without("gt_classes", False),
    "no keypoints in an image": _without("gt_keypoints", False),
    "infinite": _with_box((20.0, 20, INF, 40)),
    "not a number": _with_box((20.0, NAN, 30, 40)),
    "inverted": _with_box((40.0, 20, 20, 40)),
    "no area": _with_box((20.0, 20, 20, 40)),
    "outside": _with_box((-20.0, -10, 90, 40)),
    "whole image": _with_box((0.0, 0, 64, 64)),
    "boxes of one's own": own_boxes,
    "a field of one's own": own_field,
    "equal boxes": all_equal,
    "bytes": as_bytes,
}

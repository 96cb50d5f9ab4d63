"""Checks the content of a COCO-format file: knows JSON and folders, nothing of Detectron2."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Collection
from typing import Any

from PIL import Image

from .coco_shapes import check_keypoints, check_segmentation

# Reading the header of every image of a large set would take minutes.
_SIZES_CHECKED = 1000
_SECTIONS = ("images", "annotations", "categories")


def check_coco(coco: Any, path: str, image_root: str) -> None:
    """Raise ValueError or FileNotFoundError with one line where Detectron2 would stumble.

    coco: the parsed JSON; path: where it came from, for the messages
    image_root: the folder that every image's "file_name" starts from

    Refused: missing sections; no image or no category; ids that are missing, repeated or of mixed
    types; references to ids that do not exist; an image without name or size, or whose file is
    missing or (of the first thousand) of another size; a box that is not [x, y, width, height] in
    finite numbers with sizes >= 0; "ignore"; a segmentation that is neither empty nor polygons of
    finite numbers nor an RLE of its image; keypoints that are not a list of numbers.

    Left to Detectron2, as COCO's own files need it: a box of width or height 0, a box that leaves
    the image (clipped), an annotation without a valid polygon, images without annotations. How
    many annotations that leaves for training: see check_training.
    """
    _check_sections(coco, path)
    category_ids = _unique_ids(coco["categories"], "categories", path)
    for category in coco["categories"]:
        _require(category, "name", str, f"{path}: category {category['id']}")
    _unique_ids(coco["images"], "images", path)
    images = {image["id"]: image for image in coco["images"]}
    for image in images.values():
        _check_image(image, f"{path}: image {image['id']}")
    _unique_ids(coco["annotations"], "annotations", path)
    for annotation in coco["annotations"]:
        where = f"{path}: annotation {annotation['id']}"
        _check_reference(annotation, "image_id", images, "images", where)
        _check_reference(annotation, "category_id", category_ids, "categories", where)
        _check_flags(annotation, where)
        _check_box(annotation.get("bbox"), where)
        check_segmentation(annotation.get("segmentation"), images[annotation["image_id"]], where)
        check_keypoints(annotation.get("keypoints"), where)
    _check_image_files(coco["images"], path, image_root)
    _check_image_sizes(coco["images"][:_SIZES_CHECKED], path, image_root)


def warn_of_empty_boxes(annotations: list[dict[str, Any]], path: str) -> None:
    """Count the boxes of width or height 0 in one warning."""
    empty = [a["id"] for a in annotations if a["bbox"][2] == 0 or a["bbox"][3] == 0]
    if empty:
        logging.getLogger(__name__).warning(
            "%s: %d boxes have width or height 0 (first: annotation %s); "
            "Detectron2 leaves them out of training",
            *(path, len(empty), empty[0]),
        )


def _check_sections(coco: Any, path: str) -> None:
    if not isinstance(coco, dict):
        raise ValueError(f"{path}: must hold a JSON object, not a {type(coco).__name__}")
    for section in _SECTIONS:
        if section not in coco:
            raise ValueError(f"{path}: has no {section!r}; COCO format needs {_SECTIONS}")
        entries = coco[section]
        if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
            raise ValueError(f"{path}: {section!r} must be a list of objects")
        if not entries and section != "annotations":
            raise ValueError(f"{path}: {section!r} is empty")


def _unique_ids(entries: list[dict[str, Any]], section: str, path: str) -> set[Any]:
    """The ids of one section. All int, or all str: Detectron2 sorts them."""
    ids: set[Any] = set()
    for position, entry in enumerate(entries):
        value = entry.get("id")
        if not isinstance(value, int | str) or isinstance(value, bool):
            raise ValueError(f"{path}: {section}[{position}] has id {value!r}, not a number")
        if value in ids:
            raise ValueError(f"{path}: id {value!r} appears twice in {section!r}")
        ids.add(value)
    if len({type(value) for value in ids}) > 1:
        raise ValueError(f"{path}: the ids in {section!r} are partly numbers, partly text")
    return ids


def _require(entry: dict[str, Any], key: str, kind: type, where: str) -> None:
    value = entry.get(key)
    if not isinstance(value, kind) or isinstance(value, bool) or not value:
        raise ValueError(f"{where}: {key!r} is {value!r}, must be a {kind.__name__}")


def _check_image(image: dict[str, Any], where: str) -> None:
    _require(image, "file_name", str, where)
    for side in ("height", "width"):
        _require(image, side, int, where)
        if image[side] <= 0:
            raise ValueError(f"{where}: {side!r} is {image[side]}, must be positive")


def _check_reference(
    annotation: dict[str, Any], key: str, ids: Collection[Any], section: str, where: str
) -> None:
    value = annotation.get(key)
    if isinstance(value, list | dict) or value not in ids:
        raise ValueError(f"{where}: {key} {value!r} is not among the ids in {section!r}")


def _check_flags(annotation: dict[str, Any], where: str) -> None:
    if annotation.get("iscrowd", 0) not in (0, 1):
        raise ValueError(f"{where}: iscrowd is {annotation['iscrowd']!r}, must be 0 or 1")
    if annotation.get("ignore", 0) != 0:
        raise ValueError(f"{where}: 'ignore' is not supported by Detectron2, use iscrowd")


def _check_box(box: Any, where: str) -> None:
    numbers = isinstance(box, list) and all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in box
    )
    if not numbers or len(box) != 4 or not all(math.isfinite(value) for value in box):
        raise ValueError(f"{where}: bbox {box!r} is not four finite numbers")
    if box[2] < 0 or box[3] < 0:
        raise ValueError(f"{where}: bbox {box!r} has a negative size; it is [x, y, width, height]")


def _check_image_files(images: list[dict[str, Any]], path: str, image_root: str) -> None:
    names = [image["file_name"] for image in images]
    missing = [name for name in names if not os.path.isfile(os.path.join(image_root, name))]
    if missing:
        raise FileNotFoundError(
            f"{path}: {len(missing)} of {len(names)} image files are missing under {image_root}, "
            f"first {missing[0]}"
        )


def _check_image_sizes(images: list[dict[str, Any]], path: str, image_root: str) -> None:
    for image in images:
        with Image.open(os.path.join(image_root, image["file_name"])) as file:
            size = file.size
        # Either way round: an EXIF tag may turn the image.
        if sorted(size) != sorted((image["width"], image["height"])):
            raise ValueError(
                f"{path}: image {image['id']} is {image['width']}x{image['height']} there, but "
                f"{image['file_name']} is {size[0]}x{size[1]}"
            )

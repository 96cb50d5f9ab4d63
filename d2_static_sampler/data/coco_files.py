"""Registers one's own COCO-format files by two paths, after checking them from end to end.

Detectron2 reads the annotations when the loader is built and the images during training, so a
wrong path or id shows late, or as a KeyError without the file's name. Here it shows at once.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import register_coco_instances

from .coco_checks import check_coco, warn_of_empty_boxes
from .coco_evaluation import check_evaluation
from .coco_training import check_training
from .keypoint_names import keypoint_metadata
from .needs import Needs


def register_coco_files(
    name: str,
    annotation_file: str,
    image_root: str,
    *,
    needs: Needs | None = None,
    for_evaluation: bool = False,
) -> None:
    """Register COCO-format files as data set `name`, for DATASETS.TRAIN or DATASETS.TEST.

    annotation_file: the JSON file with "images", "annotations" and "categories"
    image_root: the folder that the images' "file_name" starts from
    needs: what the model reads of the annotations. Then those that remain for training are
        counted and checked, too, and the metadata of keypoints are filled
    for_evaluation: what COCO evaluation reads is checked, instead of what remains for training

    Fills thing_classes (ordered by category id) and evaluator_type "coco". Registering the same
    name with the same paths again does nothing. Raises FileNotFoundError or ValueError with one
    line that names the path and the problem; nothing is registered then. What is checked, and
    what is left to Detectron2's tolerance: see check_coco, check_training, check_evaluation and
    keypoint_metadata.
    """
    annotation_file, image_root = os.path.abspath(annotation_file), os.path.abspath(image_root)
    if _registered_already(name, annotation_file, image_root):
        return
    if not os.path.isfile(annotation_file):
        raise FileNotFoundError(f"{annotation_file}: no such annotation file")
    if not os.path.isdir(image_root):
        raise FileNotFoundError(f"{image_root}: no such folder of images")
    coco = _read_json(annotation_file)
    check_coco(coco, annotation_file, image_root)
    metadata = _checked_metadata(coco, annotation_file, needs, for_evaluation)
    register_coco_instances(name, metadata, annotation_file, image_root)


def _checked_metadata(
    coco: dict[str, Any], path: str, needs: Needs | None, for_evaluation: bool
) -> dict[str, Any]:
    categories = sorted(coco["categories"], key=lambda category: category["id"])
    metadata = {"thing_classes": [category["name"] for category in categories]}
    if needs and needs.num_keypoints is not None:
        # Images of an evaluation are not flipped.
        flips = needs.flips and not for_evaluation
        metadata |= keypoint_metadata(categories, replace(needs, flips=flips), path)
    if for_evaluation:
        check_evaluation(coco["annotations"], path, needs or Needs())
    elif needs:
        check_training(coco, path, needs)
    else:
        warn_of_empty_boxes(coco["annotations"], path)
    return metadata


def _registered_already(name: str, annotation_file: str, image_root: str) -> bool:
    if name not in DatasetCatalog:
        return False
    metadata = MetadataCatalog.get(name)
    paths = [metadata.get("json_file"), metadata.get("image_root")]
    known = [os.path.abspath(path) if path else None for path in paths]
    if known != [annotation_file, image_root]:
        raise ValueError(
            f"data set {name!r} is already registered with {known[0]} and {known[1]}: "
            f"choose another name for {annotation_file} and {image_root}"
        )
    return True


def _read_json(path: str) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except ValueError as error:  # also text that is not UTF-8
        raise ValueError(f"{path}: not a JSON file: {error}") from error

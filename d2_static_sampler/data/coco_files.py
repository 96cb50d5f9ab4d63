"""Registers one's own COCO-format files by two paths, after checking them from end to end.

Detectron2 reads the annotations when the loader is built and the images during training, so a
wrong path or id shows late, or as a KeyError without the file's name. Here it shows at once.
"""

from __future__ import annotations

import json
import os
from typing import Any

from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import register_coco_instances

from .coco_checks import check_coco


def register_coco_files(
    name: str, annotation_file: str, image_root: str, *, for_evaluation: bool = False
) -> None:
    """Register COCO-format files as data set `name`, for DATASETS.TRAIN or DATASETS.TEST.

    annotation_file: the JSON file with "images", "annotations" and "categories"
    image_root: the folder that the images' "file_name" starts from
    for_evaluation: the annotations need "area" too, which COCO evaluation reads

    Fills thing_classes (ordered by category id) and evaluator_type "coco". Registering the same
    name with the same paths again does nothing. Raises FileNotFoundError or ValueError with one
    line that names the path and the problem; nothing is registered then. What is checked, and
    what is left to Detectron2's tolerance: see check_coco.
    """
    annotation_file, image_root = os.path.abspath(annotation_file), os.path.abspath(image_root)
    if _registered_already(name, annotation_file, image_root):
        return
    if not os.path.isfile(annotation_file):
        raise FileNotFoundError(f"{annotation_file}: no such annotation file")
    if not os.path.isdir(image_root):
        raise FileNotFoundError(f"{image_root}: no such folder of images")
    coco = _read_json(annotation_file)
    check_coco(coco, annotation_file, image_root, for_evaluation=for_evaluation)
    categories = sorted(coco["categories"], key=lambda category: category["id"])
    register_coco_instances(name, {}, annotation_file, image_root)
    MetadataCatalog.get(name).thing_classes = [category["name"] for category in categories]


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

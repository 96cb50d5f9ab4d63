"""Checks that COCO evaluation can read the annotations of a file, before hours of training."""

from __future__ import annotations

from typing import Any

from .coco_training import refuse
from .needs import Needs


def check_evaluation(annotations: list[dict[str, Any]], path: str, needs: Needs) -> None:
    """Raise ValueError, in one line, where pycocotools would stumble.

    It reads "area", "iscrowd" and an id other than 0 of every annotation, crowd included; with
    masks a segmentation, with keypoints "num_keypoints" and 3 numbers for each keypoint.
    """
    for annotation in annotations:
        area, number = annotation.get("area"), annotation["id"]
        if type(area) not in (int, float) or not isinstance(number, int) or not number:
            raise ValueError(
                f"{path}: annotation {number}: COCO evaluation needs an 'area' (it is {area!r}), "
                "and a number as id other than 0"
            )
    missing = [a for a in annotations if "iscrowd" not in a]
    problem = "have no 'iscrowd', which COCO evaluation reads: add it, 0 for a single object"
    refuse(missing, annotations, path, problem)
    if needs.mask_format is not None:
        bad = [a for a in annotations if not _has_mask(a.get("segmentation"))]
        problem = "have no 'segmentation' of three points or more, which COCO evaluation reads"
        refuse(bad, annotations, path, problem)
    if needs.num_keypoints is not None:
        _check_keypoints(annotations, path, needs.num_keypoints)


def _has_mask(segmentation: Any) -> bool:
    # pycocotools decides by the first polygon: up to four numbers are a box to it, or nothing.
    return bool(segmentation) and (isinstance(segmentation, dict) or len(segmentation[0]) > 4)


def _check_keypoints(annotations: list[dict[str, Any]], path: str, num_keypoints: int) -> None:
    if not annotations:
        raise ValueError(f"{path}: COCO evaluation of keypoints needs at least 1 annotation")
    bad = [a for a in annotations if len(a.get("keypoints") or []) != 3 * num_keypoints]
    problem = (
        f"have no 'keypoints' of 3 x {num_keypoints} numbers (3 x MODEL.ROI_KEYPOINT_HEAD."
        "NUM_KEYPOINTS), which COCO evaluation reads"
    )
    refuse(bad, annotations, path, problem)
    bad = [a for a in annotations if not isinstance(a.get("num_keypoints"), int)]
    problem = "have no 'num_keypoints', which COCO evaluation reads: how many are visible"
    refuse(bad, annotations, path, problem)

"""Which annotations of a COCO file Detectron2 trains on, and where it would fail on one.

Follows release 0.6 and today's main: load_coco_json, get_detection_dataset_dicts, DatasetMapper.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from operator import mul
from typing import Any

import numpy as np
import numpy.typing as npt

from .coco_shapes import rle_runs
from .needs import Needs

Annotation = dict[str, Any]

# What Detectron2's filter_empty_instances calls empty, in pixels.
_BOX_THRESHOLD = 1e-5
# Farther from a line, in pixels, a point makes a polygon that is not flat.
_FLAT_THRESHOLD = 1e-3


def check_training(coco: dict[str, Any], path: str, needs: Needs) -> None:
    """Raise ValueError where nothing remains to train on, or the training would fail.

    coco: the content of a file that has passed check_coco

    One warning tells how many annotations do not remain, and why:

    - crowd, a segmentation without a polygon of three points, a box of no size inside the image,
      images with too few visible keypoints, an RLE without a pixel: Detectron2 leaves them out;
    - a flat polygon, where masks are read: Detectron2 leaves it out with INPUT.MASK_FORMAT
      bitmask; with polygon its mask is trained towards nothing.
    """
    annotations = coco["annotations"]
    images = {image["id"]: image for image in coco["images"]}
    left_out: dict[str, list[Any]] = defaultdict(list)
    read = _read_annotations(annotations, path, needs, left_out)
    if needs.mask_format is not None:
        _check_masks(read, path, needs.mask_format)
    if needs.num_keypoints is not None:
        _check_lengths(read, path, needs.num_keypoints)
    has_box = _has_box(read, images)
    for annotation, is_good in zip(read, has_box, strict=True):
        if not is_good:
            left_out["with a box of no size inside the image"].append(annotation["id"])
        elif needs.mask_format is not None and _is_empty(annotation["segmentation"]):
            left_out["with a mask of no area"].append(annotation["id"])
    _report(left_out, len(annotations), path)


def has_polygon(segmentation: Any) -> bool:
    """Whether a list of polygons has one that Detectron2 keeps: three points or more."""
    return any(_is_kept(polygon) for polygon in segmentation)


def refuse(bad: list[Annotation], among: list[Annotation], path: str, problem: str) -> None:
    """Raise ValueError where there are bad annotations, with their number and the first."""
    if bad:
        raise ValueError(
            f"{path}: {len(bad)} of {len(among)} annotations (first: {bad[0]['id']}) {problem}; "
            f"{len(among) - len(bad)} remain without them"
        )


def _read_annotations(
    annotations: list[Annotation], path: str, needs: Needs, left_out: dict[str, list[Any]]
) -> list[Annotation]:
    """Those that DatasetMapper gets to see; the ids of the others go to left_out."""
    loaded = []
    for annotation in annotations:
        segmentation = annotation.get("segmentation")
        if segmentation and isinstance(segmentation, list) and not has_polygon(segmentation):
            left_out["without a polygon of three points"].append(annotation["id"])
        else:
            loaded.append(annotation)
    least = needs.min_keypoints if needs.num_keypoints is not None else 0
    visible = _visible_keypoints(loaded, path) if least > 0 else Counter()
    read = []
    for annotation in loaded:
        if annotation.get("iscrowd", 0):
            left_out["crowd"].append(annotation["id"])
        elif visible[annotation["image_id"]] < least:
            reason = f"in images of fewer than {least} visible keypoints"
            left_out[reason].append(annotation["id"])
        else:
            read.append(annotation)
    return read


def _visible_keypoints(loaded: list[Annotation], path: str) -> Counter[Any]:
    """Visible keypoints by image id; those of crowd annotations count, as in Detectron2."""
    nulls = [a for a in loaded if "keypoints" in a and a["keypoints"] is None]
    refuse(nulls, loaded, path, "have 'keypoints' null: write 3 zeros for each keypoint")
    visible: Counter[Any] = Counter()
    for annotation in loaded:
        flags = annotation.get("keypoints", [])[2::3]
        visible[annotation["image_id"]] += sum(flag > 0 for flag in flags)
    return visible


def _check_masks(read: list[Annotation], path: str, mask_format: str) -> None:
    missing = [a for a in read if not a.get("segmentation")]
    problem = "have no 'segmentation', which MODEL.MASK_ON reads: add it, or set that to False"
    refuse(missing, read, path, problem)
    if mask_format == "polygon":
        rles = [a for a in read if isinstance(a["segmentation"], dict)]
        refuse(rles, read, path, "have an RLE, not polygons: set INPUT.MASK_FORMAT bitmask")


def _check_lengths(read: list[Annotation], path: str, num_keypoints: int) -> None:
    missing = [a for a in read if a.get("keypoints") is None]
    problem = "have no 'keypoints', which MODEL.KEYPOINT_ON reads: write 3 zeros for each keypoint"
    refuse(missing, read, path, problem)
    others = [a for a in read if len(a["keypoints"]) != 3 * num_keypoints]
    if others:
        problem = (
            f"have other than 3 x {num_keypoints} numbers in 'keypoints' (the first "
            f"{len(others[0]['keypoints'])}): MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS is "
            f"{num_keypoints}"
        )
        refuse(others, read, path, problem)


def _has_box(read: list[Annotation], images: dict[Any, dict[str, Any]]) -> npt.NDArray[np.bool_]:
    """Whether the part of each box inside its image has a size."""
    boxes = np.array([a["bbox"] for a in read], dtype=np.float64).reshape(-1, 2, 2)
    shapes = [images[a["image_id"]] for a in read]
    sizes = np.array([(s["width"], s["height"]) for s in shapes]).reshape(-1, 2)
    # float32, as Detectron2's boxes: at 5000 the next number is 5000.0005.
    begin = np.clip(boxes[:, 0], 0, sizes).astype(np.float32)
    end = np.clip(boxes[:, 0] + boxes[:, 1], 0, sizes).astype(np.float32)
    return np.all(end - begin > _BOX_THRESHOLD, axis=1)


def _is_empty(segmentation: Any) -> bool:
    if isinstance(segmentation, dict):
        runs = rle_runs(segmentation["counts"])
        return runs is None or not runs[1::2].any()
    return all(_is_flat(polygon) for polygon in segmentation if _is_kept(polygon))


def _is_kept(polygon: list[float]) -> bool:
    return len(polygon) >= 6 and len(polygon) % 2 == 0


def _is_flat(polygon: list[float]) -> bool:
    """Whether all points lie on one line."""
    xs, ys = polygon[::2], polygon[1::2]
    # An area is the quick way out; without one the outline may still cross itself.
    twice_area = sum(map(mul, xs, ys[1:] + ys[:1])) - sum(map(mul, ys, xs[1:] + xs[:1]))
    if abs(twice_area) > 1:
        return False
    from_first = [(x - xs[0], y - ys[0]) for x, y in zip(xs, ys, strict=True)]
    dx, dy = max(from_first, key=lambda point: abs(point[0]) + abs(point[1]))
    limit = _FLAT_THRESHOLD * float(np.hypot(dx, dy))
    return all(abs(dx * y - dy * x) <= limit for x, y in from_first)


def _report(left_out: dict[str, list[Any]], total: int, path: str) -> None:
    remaining = total - sum(map(len, left_out.values()))
    others = [f"{len(ids)} {why} (first: {ids[0]})" for why, ids in left_out.items()]
    text = f"{path}: {remaining} of {total} annotations remain for training"
    if others:
        text += f"; the others: {', '.join(others)}"
    if not remaining:
        raise ValueError(text)
    if others:
        logging.getLogger(__name__).warning("%s", text)

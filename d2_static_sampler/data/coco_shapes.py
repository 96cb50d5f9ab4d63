"""Checks the segmentation and the keypoints of a COCO annotation: their types, not their meaning.

Detectron2 reads both when it loads a file, whether the model uses them or not.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt


def check_segmentation(segmentation: Any, image: dict[str, Any], where: str) -> None:
    """Raise ValueError unless it is missing or empty, a list of polygons, or an RLE of the image.

    A polygon may have any number of coordinates here: Detectron2 leaves those out that have
    fewer than three points.
    """
    if not segmentation:
        return
    if isinstance(segmentation, dict):
        _check_rle(segmentation, image, where)
    elif not isinstance(segmentation, list) or not all(_are_numbers(p) for p in segmentation):
        raise ValueError(
            f"{where}: 'segmentation' is {_short(segmentation)}, must be a list of polygons, each "
            "a list [x, y, x, y, ...] of finite numbers, or an RLE {'counts': ..., 'size': ...}"
        )


def check_keypoints(keypoints: Any, where: str) -> None:
    """Raise ValueError unless it is missing or a list of numbers; NaN counts as not labelled."""
    is_list = isinstance(keypoints, list) and set(map(type, keypoints)) <= {int, float}
    if keypoints is not None and not is_list:
        raise ValueError(
            f"{where}: 'keypoints' is {_short(keypoints)}, must be a list [x, y, visibility, ...] "
            "of numbers"
        )


def rle_runs(counts: Any) -> npt.NDArray[np.int64] | None:
    """The run lengths of an RLE: background, mask, background, ... None where it is not one.

    counts: a list of numbers, or COCO's compressed text
    """
    if isinstance(counts, list):
        is_valid = set(map(type, counts)) <= {int, float} and all(0 <= c < 2**32 for c in counts)
        return np.array(counts).astype(np.int64) if is_valid else None
    if not isinstance(counts, str) or not counts.isascii():
        return None
    return _decompress(np.frombuffer(counts.encode(), np.uint8).astype(np.int64) - 48)


def _decompress(digits: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
    """Runs in groups of 5 bits, lowest first, bit 5: goes on, bit 4 of the last: negative."""
    is_last = (digits & 32) == 0
    if not digits.size or not is_last[-1] or digits.min() < 0 or digits.max() > 63:
        return None
    ends = np.flatnonzero(is_last)
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if lengths.max() > 7:  # 32 bits need no more
        return None
    place = np.arange(digits.size) - np.repeat(starts, lengths)
    runs = np.add.reduceat((digits & 31) << (5 * place), starts)
    runs -= np.where(digits[ends] & 16, 1 << (5 * lengths), 0)
    # From the fourth run on, the difference to the run before the last.
    runs[1::2] = np.cumsum(runs[1::2])
    runs[2::2] = np.cumsum(runs[2::2])
    return runs if runs.min() >= 0 else None


def _check_rle(rle: dict[str, Any], image: dict[str, Any], where: str) -> None:
    size = [image["height"], image["width"]]
    if rle.get("size") != size or set(map(type, rle["size"])) != {int}:
        raise ValueError(
            f"{where}: the RLE in 'segmentation' has size {_short(rle.get('size'))}, its image "
            f"is {size} (height, width)"
        )
    runs = rle_runs(rle.get("counts"))
    if runs is None or runs.sum() != size[0] * size[1]:
        raise ValueError(
            f"{where}: the RLE in 'segmentation' has counts {_short(rle.get('counts'))}, which "
            f"are not the runs of {size[0]}x{size[1]} pixels"
        )


def _are_numbers(polygon: Any) -> bool:
    is_list = isinstance(polygon, list) and set(map(type, polygon)) <= {int, float}
    return is_list and all(map(math.isfinite, polygon))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

"""Writes the "shapes" data set as a folder in COCO format, whole or not at all.

    shapes/train/shapes_train_000001.png ...   shapes/annotations/shapes_train.json
    shapes/val/shapes_val_000001.png ...       shapes/annotations/shapes_val.json
    shapes/spec.json                           what was asked for

PNG, because its pixels are the same on every machine; it decodes in under 1 ms at 160x160.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from iopath.common.file_io import file_lock  # type: ignore[import-untyped]
from PIL import Image
from tqdm import tqdm

from .shapes_draw import Shape, draw_image
from .shapes_spec import CLASS_NAMES, SPLITS, ShapesSpec

SPEC_FILE = "spec.json"
_OWN_FILE = re.compile(
    r"(train|val)/shapes_\1_\d{6,}\.png|annotations/shapes_(train|val)\.json|spec\.json"
)


def annotation_file(folder: Path, split: str) -> Path:
    """The COCO annotations of split "train" or "val"."""
    return folder / "annotations" / f"shapes_{split}.json"


def image_name(split: str, index: int) -> str:
    """File name of image index (from 0), whose COCO id is index + 1."""
    return f"shapes_{split}_{index + 1:06d}.png"


def write_shapes(folder: Path, spec: ShapesSpec | None = None) -> None:
    """Make sure that folder holds a complete data set; write it if it does not.

    spec: what it must hold. None takes a complete set as it is, and writes ShapesSpec() otherwise.

    The set is written to a folder beside and renamed at the end, under a lock that dies with its
    process: a killed run leaves nothing that is taken for complete, and of several processes one
    writes while the others wait. Raises ValueError where another spec's set is there, and
    FileExistsError where files are that this function does not write. Neither is ever deleted.
    """
    folder = folder.resolve()  # a link to another disk: write there
    if _is_complete(folder, spec):
        return
    with file_lock(str(folder)):
        if _is_complete(folder, spec):
            return
        _refuse_foreign_files(folder)
        _remove_leftovers(folder)
        part = folder.with_name(f".{folder.name}.part-{uuid.uuid4().hex}")
        try:
            _write_all(part, spec or _written_spec(folder) or ShapesSpec())
            if folder.exists():
                shutil.rmtree(folder)
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)


def _is_complete(folder: Path, spec: ShapesSpec | None) -> bool:
    """Whether every file of its own spec is there; ValueError if that is not the one asked for."""
    written = _written_spec(folder)
    if written is None:
        return False
    if spec is not None and spec != written:
        raise ValueError(
            f"{folder} holds {written}, not {spec}: delete it or choose another data folder"
        )
    return _expected_files(written) <= set(_files(folder))


def _written_spec(folder: Path) -> ShapesSpec | None:
    """The spec beside the images; None where there is none, or an unreadable one."""
    try:
        numbers = json.loads((folder / SPEC_FILE).read_text(encoding="utf-8"))
        return ShapesSpec.from_dict(numbers)
    except (OSError, json.JSONDecodeError, KeyError, TypeError):
        return None
    except ValueError as error:
        raise ValueError(
            f"{folder / SPEC_FILE}: {error}; delete {folder} to write it anew"
        ) from error


def _expected_files(spec: ShapesSpec) -> set[str]:
    images = {f"{s}/{image_name(s, i)}" for s in SPLITS for i in range(spec.num_images(s))}
    return images | {f"annotations/shapes_{split}.json" for split in SPLITS} | {SPEC_FILE}


def _files(folder: Path) -> Iterator[str]:
    """Every file below folder, as a path relative to it with forward slashes."""
    for parent, _, names in os.walk(folder):
        below = Path(parent).relative_to(folder)
        prefix = "" if below == Path() else f"{below.as_posix()}/"
        yield from (prefix + name for name in names)


def _refuse_foreign_files(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is not a folder: the shapes data set cannot be written")
    foreign = sorted(name for name in _files(folder) if not _OWN_FILE.fullmatch(name))
    if foreign:
        raise FileExistsError(
            f"{folder} holds {len(foreign)} files that are not the shapes data set's, first "
            f"{foreign[0]}: move them or choose another data folder"
        )


def _remove_leftovers(folder: Path) -> None:
    """Delete what killed runs left; the lock is held, so nobody is writing there."""
    for part in folder.parent.glob(f".{folder.name}.part-*"):
        shutil.rmtree(part, ignore_errors=True)


def _write_all(folder: Path, spec: ShapesSpec) -> None:
    total = sum(spec.num_images(split) for split in SPLITS)
    text = "drawing the shapes data set"
    with tqdm(total=total, desc=text, unit="image", mininterval=1.0) as progress:
        for split in SPLITS:
            (folder / split).mkdir(parents=True)
            coco = _coco_header()
            for index in range(spec.num_images(split)):
                pixels, shapes = draw_image(spec, split, index)
                name = image_name(split, index)
                Image.fromarray(pixels).save(folder / split / name, compress_level=1)
                coco["images"].append(_coco_image(name, index, spec.size))
                _add_coco_annotations(coco["annotations"], shapes, image_id=index + 1)
                progress.update()
            _write_json(annotation_file(folder, split), coco)
    _write_json(folder / SPEC_FILE, spec.as_dict())


def _coco_header() -> dict[str, Any]:
    return {
        "info": {"description": "d2_static_sampler's built-in shapes data set"},
        "licenses": [],
        "categories": [
            {"id": i, "name": name, "supercategory": "shape"}
            for i, name in enumerate(CLASS_NAMES, start=1)
        ],
        "images": [],
        "annotations": [],
    }


def _coco_image(name: str, index: int, size: int) -> dict[str, Any]:
    return {"id": index + 1, "file_name": name, "height": size, "width": size}


def _add_coco_annotations(annotations: list[Any], shapes: list[Shape], image_id: int) -> None:
    """Box, outline and area are the whole shape's, also where a later shape covers it."""
    for shape in shapes:
        x0, y0 = shape.polygon.min(axis=0)
        x1, y1 = shape.polygon.max(axis=0)
        annotations.append(
            {
                "id": len(annotations) + 1,
                "image_id": image_id,
                "category_id": shape.category + 1,
                "bbox": [round(float(v), 2) for v in (x0, y0, x1 - x0, y1 - y0)],
                "segmentation": [[round(float(v), 2) for v in shape.polygon.reshape(-1)]],
                "area": round(_polygon_area(shape.polygon), 2),
                "iscrowd": 0,
            }
        )


def _polygon_area(polygon: np.ndarray) -> float:
    x, y = polygon.T
    return float(abs(x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")

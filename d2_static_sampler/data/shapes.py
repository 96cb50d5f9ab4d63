"""The built-in "shapes" data set under Detectron2's names: `shapes_train` and `shapes_val`.

Images of 1 to 8 filled circles, squares and triangles on a textured background, and a few
without any object: enough to train and evaluate a detector in a few minutes on a CPU. The files
are drawn at the first use, never at the registration.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import load_coco_json

from .shapes_files import annotation_file, write_shapes
from .shapes_spec import CLASS_NAMES, SPLITS, ShapesSpec


def shapes_folder(root: str | os.PathLike[str] | None = None) -> Path:
    """Where the data set lies: root / "shapes", absolute.

    root: None means what DETECTRON2_DATASETS says at this moment, by default "datasets".
    """
    data_folder = os.getenv("DETECTRON2_DATASETS", "datasets") if root is None else root
    return Path(os.path.abspath(os.path.expanduser(data_folder))) / "shapes"


def register_shapes(root: str | os.PathLike[str] | None = None) -> None:
    """Register `shapes_train` and `shapes_val`; neither needs the files nor writes them.

    May be called again: the names then point to the root of the last call. A name that
    somebody else has registered stays theirs, with a warning.
    """
    folder = shapes_folder(root)
    for split in SPLITS:
        name = f"shapes_{split}"
        if name not in DatasetCatalog:
            _register_split(folder, split)
        elif not _is_own(DatasetCatalog[name]):
            logging.getLogger(__name__).warning(
                "data set %s is already registered by other code: it is used as it is", name
            )
        elif DatasetCatalog[name].folder != folder:
            DatasetCatalog.remove(name)
            MetadataCatalog.remove(name)  # detectron2 refuses to change a value in place
            _register_split(folder, split)


def ensure_shapes(
    root: str | os.PathLike[str] | None = None, spec: ShapesSpec | None = None
) -> Path:
    """Write the data set if it is not there yet, point the names to it, return its folder.

    Call it before COCOEvaluator is built: that reads the annotation file by itself.
    spec: what the folder must hold; None accepts any complete set, and by default writes
    ShapesSpec(). Errors: see write_shapes. Safe to call from several processes at once.
    """
    folder = shapes_folder(root)
    write_shapes(folder, spec)
    register_shapes(root)
    return folder


@dataclass(frozen=True)
class _ShapesLoader:
    """What DatasetCatalog calls: writes the files if need be, then reads the annotations."""

    folder: Path
    split: str

    def __call__(self) -> list[dict[str, Any]]:
        write_shapes(self.folder)
        json_file = str(annotation_file(self.folder, self.split))
        image_root = str(self.folder / self.split)
        return load_coco_json(json_file, image_root, f"shapes_{self.split}")


def _is_own(loader: Any) -> bool:
    # By name: importlib.reload makes another class of the same name.
    kind = type(loader)
    return (kind.__module__, kind.__qualname__) == (__name__, _ShapesLoader.__qualname__)


def _register_split(folder: Path, split: str) -> None:
    name = f"shapes_{split}"
    DatasetCatalog.register(name, _ShapesLoader(folder, split))
    MetadataCatalog.get(name).set(
        thing_classes=list(CLASS_NAMES),
        evaluator_type="coco",
        json_file=str(annotation_file(folder, split)),
        image_root=str(folder / split),
    )

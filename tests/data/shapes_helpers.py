"""The small data set of the tests, and what is in it."""

import hashlib

from pycocotools.coco import COCO

from d2_static_sampler.data import ShapesSpec

SMALL = ShapesSpec(num_train=30, num_val=20, size=64, empty_fraction=0.1)


def contents(folder):
    """Relative path -> hash of every file."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def annotations(root, split):
    return COCO(str(root / "shapes" / "annotations" / f"shapes_{split}.json"))

"""The built-in "shapes" data set, and checked registration of one's own COCO files.

Importing this package registers `shapes_train` and `shapes_val`, as Detectron2 does with its own.
"""

from .coco_files import register_coco_files
from .needs import Needs
from .shapes import ensure_shapes, register_shapes, shapes_folder
from .shapes_spec import ShapesSpec

__all__ = [
    "Needs",
    "ShapesSpec",
    "ensure_shapes",
    "register_coco_files",
    "register_shapes",
    "shapes_folder",
]

register_shapes()

"""What the built-in "shapes" data set holds: its numbers, checked before anything is drawn."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

CLASS_NAMES = ("circle", "square", "triangle")
SPLITS = ("train", "val")
# Part of the written spec: raise it whenever the same numbers would draw other images.
DRAWING_VERSION = 1


@dataclass(frozen=True)
class ShapesSpec:
    """Size and seed of the data set. Equal specs give equal pixels and equal annotations.

    num_train, num_val: images in a split, at least 1
    size: height and width of every image, pixels, at least 32
    max_objects: each image that is not empty has 1 to this many shapes drawn, at least 1
    empty_fraction: share of images without any object, in [0, 1); spread evenly, not by chance
    seed: at least 0

    Raises TypeError or ValueError with the name of the field, its value and what is allowed.
    """

    num_train: int = 2000
    num_val: int = 200
    size: int = 160
    max_objects: int = 8
    empty_fraction: float = 0.04
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse wrong values here, before any file is written."""
        minima = {"num_train": 1, "num_val": 1, "size": 32, "max_objects": 1, "seed": 0}
        for field, minimum in minima.items():
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"ShapesSpec.{field} = {value!r}: must be an int")
            if value < minimum:
                raise ValueError(f"ShapesSpec.{field} = {value}: must be at least {minimum}")
        fraction = self.empty_fraction
        if not isinstance(fraction, int | float) or isinstance(fraction, bool):
            raise TypeError(f"ShapesSpec.empty_fraction = {fraction!r}: must be a number")
        if not 0 <= fraction < 1:
            raise ValueError(f"ShapesSpec.empty_fraction = {fraction}: must be in [0, 1)")

    def num_images(self, split: str) -> int:
        """Images in split "train" or "val"."""
        return {"train": self.num_train, "val": self.num_val}[split]

    def is_empty(self, index: int) -> bool:
        """Whether image index (from 0) of a split has no object: every 25th at 0.04."""
        fraction = self.empty_fraction
        return int((index + 1) * fraction) > int(index * fraction)

    def as_dict(self) -> dict[str, Any]:
        """The numbers as they are written beside the images."""
        return {"drawing_version": DRAWING_VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, numbers: dict[str, Any]) -> ShapesSpec:
        """The inverse of as_dict. ValueError where another version drew the images."""
        fields = dict(numbers)
        version = fields.pop("drawing_version")
        if version != DRAWING_VERSION:
            raise ValueError(f"drawing_version {version}: this version draws {DRAWING_VERSION}")
        return cls(**fields)

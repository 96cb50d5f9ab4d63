"""What a training or an evaluation reads of annotations, besides boxes and categories."""

from __future__ import annotations

from dataclasses import dataclass

_MASK_FORMATS = ("polygon", "bitmask")


@dataclass(frozen=True)
class Needs:
    """What a model reads of annotations besides boxes and categories.

    mask_format: INPUT.MASK_FORMAT with MODEL.MASK_ON; None: masks are not read
    num_keypoints: MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS with MODEL.KEYPOINT_ON; None: not read
    min_keypoints: MODEL.ROI_KEYPOINT_HEAD.MIN_KEYPOINTS_PER_IMAGE, where keypoints are read
    flips: whether images are flipped horizontally in training (INPUT.RANDOM_FLIP "horizontal")

    Raises ValueError, in one line, for another mask format and for numbers out of range.
    """

    mask_format: str | None = None
    num_keypoints: int | None = None
    min_keypoints: int = 0
    flips: bool = False

    def __post_init__(self) -> None:
        """Refuse wrong values before a file is read."""
        if self.mask_format not in (None, *_MASK_FORMATS):
            raise ValueError(
                f"INPUT.MASK_FORMAT is {self.mask_format!r}; choose one of: "
                f"{', '.join(_MASK_FORMATS)}"
            )
        if self.num_keypoints is not None and self.num_keypoints < 1:
            raise ValueError(
                f"MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS is {self.num_keypoints}; at least 1"
            )

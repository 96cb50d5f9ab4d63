"""tools/train_net.py and the arguments of a small run."""

from __future__ import annotations

from pathlib import Path

from tests.helpers import NARROW

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "train_net.py"
CONFIG = str(ROOT / "configs" / "quick" / "faster_rcnn_R_18_FPN_shapes.yaml")
SMALL = [
    "SOLVER.IMS_PER_BATCH", "2",
    "SOLVER.MAX_ITER", "10",
    "INPUT.MIN_SIZE_TRAIN", "(64,)",
    "INPUT.MIN_SIZE_TEST", "64",
    "DATASETS.TEST", "()",
    "MODEL.DEVICE", "cpu",
    *NARROW,
]  # fmt: skip

"""What a device may have code of its own for, an operator of torch a file.

Each has a body in torch, which runs on any device in fixed shapes and is what all else must equal
bit for bit; kernels for devices that have a faster way; and a fake, for whoever knows shapes alone.
torch's dispatcher chooses. Nothing in here imports Detectron2.
"""

from . import matching_cpu, sampling_cpu  # noqa: F401  They register their kernels.
from .matching import MatchRule, match_boxes
from .nms import nms_topk
from .operator import BODIES, OPERATORS
from .pooling import roi_align_levels
from .sampling import SampleRequest, pick_ranks, sample_by_rank

__all__ = [
    "BODIES",
    "OPERATORS",
    "MatchRule",
    "SampleRequest",
    "match_boxes",
    "nms_topk",
    "pick_ranks",
    "roi_align_levels",
    "sample_by_rank",
]

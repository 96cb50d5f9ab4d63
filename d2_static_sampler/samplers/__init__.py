"""Label samplers: a batch of label rows in, one :class:`LabelSample` out.

Nothing in here knows a detection model; torch, NumPy and fvcore are all it needs.
"""

from .balanced import sample_balanced
from .compiled import CompiledSampler, Drawing
from .naive import NaiveSampler
from .registry import LABEL_SAMPLER_REGISTRY, LabelSampler, build_label_sampler
from .sample import LabelSample
from .static import StaticSampler, subsample_labels
from .words import draw_words, seeded_words

__all__ = [
    "LABEL_SAMPLER_REGISTRY",
    "CompiledSampler",
    "Drawing",
    "LabelSample",
    "LabelSampler",
    "NaiveSampler",
    "StaticSampler",
    "build_label_sampler",
    "draw_words",
    "sample_balanced",
    "seeded_words",
    "subsample_labels",
]

"""The phases inside a training step of Detectron2: where one begins, and what runs in each.

- match: labelling the anchors and the proposals, without the sampling
- sample: the sampling alone, Detectron2's or an installed sampler's
- loss: the losses of every head
- pooler: cutting the features of the regions out
- nms: choosing the RPN's proposals
- logging: what goes to the event storage, or to the figures that the static step defers. Where
  Detectron2 reads a figure in the function that computes it (``.item()`` in a loss), reading it
  belongs to that function's phase.
- other: everything else, such as the backbone

Phases nest; what runs belongs to the innermost one.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from detectron2.modeling.poolers import ROIPooler
from detectron2.modeling.proposal_generator import rpn, rrpn
from detectron2.modeling.roi_heads import fast_rcnn, keypoint_head, mask_head, roi_heads
from detectron2.utils.events import EventStorage
from torch import nn
from torch.profiler import record_function

from ..engine.step_timer import Measured, replaced
from ..modeling import has_static_step, static_cascade, static_masks, static_roi_heads
from ..modeling.deferred import deferred_metrics
from .op_counter import DataDependentOp, count_data_dependent_ops

OTHER = "other"
PHASES = ("match", "sample", "loss", "pooler", "nms", "logging", OTHER)

# Functions that Detectron2's modules, and those of the static step, find by these names.
_FUNCTIONS = (
    (rpn, "subsample_labels", "sample"),
    (roi_heads, "subsample_labels", "sample"),
    (rpn, "find_top_rpn_proposals", "nms"),
    (rrpn, "find_top_rrpn_proposals", "nms"),
    (mask_head, "mask_rcnn_loss", "loss"),
    (keypoint_head, "keypoint_rcnn_loss", "loss"),
    (fast_rcnn, "_log_classification_stats", "logging"),
    (static_roi_heads, "pool_rois", "pooler"),
    (static_cascade, "pool_rois", "pooler"),
    (static_masks, "mask_targets", "loss"),
    (static_masks, "mask_loss_mean", "loss"),
    (static_masks, "mask_stats", "loss"),
    (static_masks, "keypoint_heatmap", "loss"),
    (static_masks, "keypoint_loss", "loss"),
)
# Methods of any module in the model.
_METHODS = {
    "label_and_sample_anchors": "match",
    "label_and_sample_proposals": "match",
    "_match_and_label_boxes": "match",  # the later stages of a cascade
    "label_anchors": "match",  # a dense detector
    "losses": "loss",
    "visualize_training": "logging",
    # Of the static step.
    "label_and_sample_batch": "match",
    "label_and_sample_regions": "match",
    "next_regions": "match",
    "label_sample_and_lose": "match",  # compiled: one graph
    "output_losses": "loss",
    "propose": "nms",
}
STEP = "step"  # the range around all phases of a step
_SYNCHRONIZATIONS = {"cudaDeviceSynchronize", "cudaEventSynchronize", "cudaStreamSynchronize"}


class StepPhases:
    """Knows in which phase a model is, while :meth:`watch` wraps the borders of its phases.

    Args:
        trace: make every stretch of a phase a range of ``torch.profiler`` too. Not under a
            counter of operations, which would count the ranges.
    """

    def __init__(self, *, trace: bool = False) -> None:
        self._trace = trace
        self._stack = [OTHER]

    @property
    def current(self) -> str:
        """The innermost phase at this moment."""
        return self._stack[-1]

    @contextlib.contextmanager
    def span(self, phase: str) -> Iterator[None]:
        """What runs inside belongs to ``phase``."""
        self._stack.append(phase)
        try:
            with record_function(phase) if self._trace else contextlib.nullcontext():
                yield
        finally:
            self._stack.pop()

    @contextlib.contextmanager
    def watch(self, model: nn.Module, storage: EventStorage) -> Iterator[None]:
        """Follow ``model``, which logs to ``storage``, until the context ends."""
        with contextlib.ExitStack() as wrappers:
            for owner, name, phase in _borders(model, storage):
                function = self._within(phase, getattr(owner, name))
                wrappers.enter_context(replaced(owner, name, function))
            yield

    def _within(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return Measured(function, functools.partial(self.span, phase))


def _borders(model: nn.Module, storage: EventStorage) -> Iterator[tuple[Any, str, str]]:
    """Owner and name of every function at the border of a phase, and the phase."""
    yield from _FUNCTIONS
    for module in model.modules():
        for name, phase in _METHODS.items():
            if inspect.isroutine(getattr(module, name, None)):
                yield module, name, phase
        if "_label_sampler" in vars(module):
            yield module, "_label_sampler", "sample"
        if isinstance(module, ROIPooler):
            yield module, "forward", "pooler"
    for name in dir(storage):
        if name.startswith("put_"):
            yield storage, name, "logging"
    if has_static_step(model):
        for name in ("put", "check", "flush"):
            yield deferred_metrics(storage), name, "logging"


class count_ops_by_phase(count_data_dependent_ops):
    """Counts operations as its base does, and keeps the phase of each.

    Attributes:
        ops: how often each operation ran in each phase, by (phase, name).
        issued: (phase, operation) of those that depend on data, in their order.
    """

    def __init__(self, phases: StepPhases) -> None:
        super().__init__()
        self.ops: Counter[tuple[str, str]] = Counter()
        self.issued: list[tuple[str, DataDependentOp]] = []
        self._phases = phases

    def record(self, name: str, data_dependent: DataDependentOp | None) -> None:
        """Count one operation in the current phase."""
        super().record(name, data_dependent)
        self.ops[self._phases.current, name] += 1
        if data_dependent:
            self.issued.append((self._phases.current, data_dependent))


def count_waits(events: list[dict[str, Any]]) -> dict[str, Counter[str]]:
    """Where a step waited for the device, from the events of a Chrome trace of torch.profiler.

    Returns:
        "synchronizations" of a stream, a device or an event, and "copies" from the device to the
        host, each a count by phase. Only what the host asked for within the range ``STEP``.
    """
    ranges = [event for event in events if event.get("cat") == "user_annotation"]
    copies = {
        event["args"]["correlation"]
        for event in events
        if event.get("cat") == "gpu_memcpy" and "DtoH" in event["name"]
    }
    waits: dict[str, Counter[str]] = {"synchronizations": Counter(), "copies": Counter()}
    for call in events:
        if call.get("cat") not in ("cuda_runtime", "cuda_driver"):
            continue
        is_copy = call.get("args", {}).get("correlation") in copies
        if is_copy or call["name"] in _SYNCHRONIZATIONS:
            around = [each for each in ranges if _contains(each, call["ts"])]
            if any(each["name"] == STEP for each in around):
                waits["copies" if is_copy else "synchronizations"][_innermost(around)] += 1
    return waits


def _contains(range_: dict[str, Any], moment: float) -> bool:
    return range_["ts"] <= moment <= range_["ts"] + range_["dur"]


def _innermost(ranges: list[dict[str, Any]]) -> str:
    phases = [(each["ts"], -each["dur"], each["name"]) for each in ranges if each["name"] in PHASES]
    return max(phases)[2] if phases else OTHER

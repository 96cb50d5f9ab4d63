"""Times the phases of a training step, whoever samples the labels.

The timer wraps the functions at the borders of the phases while a step runs, and takes every
wrapper away when it ends: between steps the model can be copied or saved as ever.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from detectron2.modeling.proposal_generator import rpn
from detectron2.modeling.roi_heads import roi_heads
from torch import nn

from ..modeling.stock import WRAPPED
from .clock import HostClock, clock_for

# These and "other" add up to the total.
PHASES = ("data", "forward", "backward", "optimizer")
# These lie inside the forward: the whole labelling of a head, and the sampling in it.
PARTS = ("rpn_label", "rpn_sample", "roi_label", "roi_sample")
# Methods of a head, each within a part.
_LABELLING = {
    "label_and_sample_anchors": "rpn_label",
    "label_and_sample_proposals": "roi_label",
    # Of the static step; compiled, the RPN's is in one graph with its losses.
    "label_and_sample_batch": "rpn_label",
    "label_sample_and_lose": "rpn_label",
    "label_and_sample_regions": "roi_label",
}


@dataclass
class StepTimes:
    """The moments of one step; read by :meth:`milliseconds` when they are past.

    Attributes:
        spans: start and end of every stretch of a phase or part.
        images: how many images the model was given.
    """

    clock: HostClock
    start: Any = None
    end: Any = None
    images: int = 0
    spans: dict[str, list[tuple[Any, Any]]] = field(default_factory=lambda: defaultdict(list))
    _phase: str | None = None
    _phase_end: Any = None

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time what runs inside; a phase within a phase belongs to the outer one."""
        is_phase = name in PHASES
        if is_phase and self._phase:
            yield
            return
        start = self.clock.mark()
        if name == "forward":
            self.spans["data"].append((self._phase_end or self.start, start))
        self._phase = name if is_phase else self._phase
        try:
            yield
        finally:
            end = self.clock.mark()
            self.spans[name].append((start, end))
            if is_phase:
                self._phase, self._phase_end = None, end

    def milliseconds(self) -> dict[str, float]:
        """``<name>_ms`` of every phase, of other, of the total and of every part."""
        total = round(self.clock.elapsed_ms(self.start, self.end), 3)
        times = {f"{name}_ms": self._sum(name) for name in PHASES}
        times["other_ms"] = round(total - sum(times.values()), 3)
        times["total_ms"] = total
        return times | {f"{name}_ms": self._sum(name) for name in PARTS}

    def _sum(self, name: str) -> float:
        return round(sum(self.clock.elapsed_ms(*span) for span in self.spans[name]), 3)


class StepTimer:
    """Times one step after another of a model and its optimizer.

    Args:
        model: in training; wrapped for data-parallel training or not.
        optimizer: steps its parameters.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.clock = clock_for(next(model.parameters()).device)
        self._heads = [
            module
            for module in model.modules()
            if any(hasattr(module, method) for method in _LABELLING)
        ]

    @contextlib.contextmanager
    def step(self) -> Iterator[StepTimes]:
        """Time what runs inside as one step. Data is what comes just before each forward."""
        times = StepTimes(self.clock)
        with contextlib.ExitStack() as wrappers:
            self._wrap_all(times, wrappers)
            times.start = self.clock.mark()
            yield times
            times.end = self.clock.mark()

    def _wrap_all(self, times: StepTimes, wrappers: contextlib.ExitStack) -> None:
        def wrap(owner: Any, name: str, span: str) -> None:
            function = _timed(getattr(owner, name), span, times)
            wrappers.enter_context(replaced(owner, name, function))

        forward = _counting_forward(self.model.forward, times)
        wrappers.enter_context(replaced(self.model, "forward", forward))
        wrap(torch.autograd, "backward", "backward")  # what Tensor.backward calls
        wrap(self.optimizer, "step", "optimizer")
        # Detectron2's own sampling, which its heads find by this name.
        wrap(rpn, "subsample_labels", "rpn_sample")
        wrap(roi_heads, "subsample_labels", "roi_sample")
        for module in self._heads:
            # Here, since the classes of a model in training are not those of one in evaluation.
            spans = {name: span for name, span in _LABELLING.items() if hasattr(module, name)}
            for name, span in spans.items():
                wrap(module, name, span)
            if "_label_sampler" in vars(module):
                head = next(iter(spans.values())).removesuffix("_label")
                wrap(module, "_label_sampler", f"{head}_sample")


class Measured:
    """A callable that is measured: whatever else it has is there as ever.

    Args:
        function: what is called.
        span: makes the context of each call.
    """

    def __init__(
        self, function: Any, span: Callable[[], contextlib.AbstractContextManager]
    ) -> None:
        setattr(self, WRAPPED, function)
        self._span = span

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result."""
        with self._span():
            return getattr(self, WRAPPED)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)[WRAPPED], name)


def _timed(function: Callable[..., Any], span: str, times: StepTimes) -> Callable[..., Any]:
    return Measured(function, functools.partial(times.span, span))


def _counting_forward(forward: Callable[..., Any], times: StepTimes) -> Callable[..., Any]:
    timed = _timed(forward, "forward", times)

    @functools.wraps(forward)
    def counting(*args: Any, **kwargs: Any) -> Any:
        batch = next(iter((*args, *kwargs.values())), None)
        times.images += len(batch) if isinstance(batch, list | tuple) else 0
        return timed(*args, **kwargs)

    setattr(counting, WRAPPED, forward)
    return counting


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Bind ``owner.name`` to ``value``, past any ``__setattr__`` of an instance, and back."""
    unset = object()
    before = vars(owner).get(name, unset)
    object.__setattr__(owner, name, value)
    try:
        yield
    finally:
        if before is unset:
            object.__delattr__(owner, name)
        else:
            object.__setattr__(owner, name, before)

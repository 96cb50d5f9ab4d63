"""What torch.compile makes of samplers and of the static step: graphs, and what is in them."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..engine.step_timer import replaced
from .step_phases import StepPhases, count_ops_by_phase


class CapturedGraphs:
    """The graphs that are captured for Inductor while :meth:`watch` looks on.

    Those of compiled samplers, and of a compiled static step.

    A graph's operations are counted in a run of the captured graph itself, on the inputs of its
    first call.

    Attributes:
        counts: one count of operations for each graph that has been called, in order.
        num_captured: how many graphs were captured.
        num_breaks: how often torch.compile broke a graph.
    """

    def __init__(self) -> None:
        self.counts: list[count_ops_by_phase] = []
        self.num_captured = 0
        self.num_breaks = 0

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Look at every graph that is captured until the context ends."""
        lookup_backend = torch._dynamo.lookup_backend

        def lookup(name: str) -> Callable[..., Any]:
            return functools.partial(self._compile, lookup_backend(name))

        before = _graph_breaks()
        with replaced(torch._dynamo, "lookup_backend", lookup):
            yield
        self.num_breaks += _graph_breaks() - before

    def _compile(
        self,
        compiler: Callable[..., Any],
        graph: torch.fx.GraphModule,
        inputs: list[Any],
        **options: Any,
    ) -> Callable[..., Any]:
        self.num_captured += 1
        captured = copy.deepcopy(graph)  # a compiler may change the one it is given
        compiled = compiler(graph, inputs, **options)
        is_counted = False

        def run(*args: Any) -> Any:
            nonlocal is_counted
            if not is_counted:
                is_counted = True
                self.counts.append(_count(captured, args))
            return compiled(*args)

        return run


def _graph_breaks() -> int:
    return torch._dynamo.utils.counters["graph_break"].total()


def _count(graph: torch.fx.GraphModule, args: tuple[Any, ...]) -> count_ops_by_phase:
    with count_ops_by_phase(StepPhases()) as count:
        graph(*args)
    return count

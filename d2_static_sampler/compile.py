"""Functions through ``torch.compile``: few graphs for all sizes, and eager where that fails."""

from __future__ import annotations

import contextlib
import itertools
import logging
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

logger = logging.getLogger(f"detectron2.{__name__}")
_numbers = itertools.count()

Function = Callable[..., Any]


class CompiledFunction:
    """A function of constants and tensors, compiled once for each set of constants.

    Every call is one graph without a break. Where compiling fails (no C++ compiler, say), it warns
    once and goes on without.

    Args:
        function: of hashable constants, then of tensors.
        name: of what runs it, for logs.
        options: of Inductor.

    Attributes:
        num_graphs: how many graphs have been compiled so far.
        is_eager: True after a failure to compile.
    """

    def __init__(
        self, function: Function, *, name: str, options: Mapping[str, Any] | None = None
    ) -> None:
        self._function = function
        self._name = name
        self._options = dict(options or {})
        self._reset()

    def _reset(self) -> None:
        self.num_graphs = 0
        self.is_eager = False
        self._compiled: dict[Hashable, Function] = {}
        self._marked: set[Hashable] = set()

    def __getstate__(self) -> dict[str, Any]:
        # Compiled functions cannot be pickled or copied; a copy compiles its own.
        return {name: vars(self)[name] for name in ("_function", "_name", "_options")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset()

    def __call__(self, constants: Any, *tensors: Tensor) -> Any:
        """The function's result."""
        # Under a dispatch mode, a counter of operations say, torch compiles nothing: no failure.
        if self.is_eager or torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
            return self._function(constants, *tensors)
        try:
            result = self._run(constants, tensors)
            if not self.num_graphs:
                self._give_up("it is switched off in this process")
            return result
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler fails in many ways
            self._give_up((str(error).strip() or type(error).__name__).splitlines()[0])
            return self._function(constants, *tensors)

    def _run(self, constants: Any, tensors: Sequence[Tensor]) -> Any:
        if constants not in self._compiled:
            self._compiled[constants] = torch.compile(
                _bind(self._function, constants), backend=self._inductor, fullgraph=True
            )
        self._mark(constants, tensors)
        with _usual_modes(tensors[0].device):
            return self._compiled[constants](*map(_ordinary, tensors))

    def _mark(self, constants: Any, tensors: Sequence[Tensor]) -> None:
        """Without these marks a second size would compile another graph.

        A size that the function needs to know, as the four of a box, is found by torch and stays.
        """
        key = constants, tensors[0].shape[0] == 1
        if key not in self._marked:
            self._marked.add(key)
            for tensor in tensors:
                for dim, size in enumerate(tensor.shape):
                    if size > 1:
                        torch._dynamo.maybe_mark_dynamic(tensor, dim)

    def _inductor(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Function:
        # torch has no public name for the backend that a backend of one's own, which counts the
        # graphs, hands on to.
        inductor: Any = torch._dynamo.lookup_backend("inductor")
        compiled: Function = inductor(graph, inputs, config_patches=self._options)
        self.num_graphs += 1
        logger.info(f"Compiled graph {self.num_graphs} of {self._name}")
        return compiled

    def _give_up(self, reason: str) -> None:
        self.is_eager = True
        logger.warning(
            f"{self._name} runs uncompiled from here on, because torch.compile failed: {reason} "
            "(it needs a C++ compiler on PATH or in CXX, Triton on CUDA, and a cache folder that "
            "can be written)"
        )


@contextlib.contextmanager
def _usual_modes(device: torch.device) -> Iterator[None]:
    """Neither inference mode nor autocast: a graph is valid for one state of them only."""
    with contextlib.ExitStack() as modes:
        if torch.is_inference_mode_enabled():
            modes.enter_context(torch.inference_mode(False))
            modes.enter_context(torch.no_grad())
        if torch.is_autocast_enabled(device.type):
            modes.enter_context(torch.autocast(device.type, enabled=False))
        yield


def _ordinary(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_inference() else tensor


def _bind(function: Function, constants: Any) -> Function:
    def bound(*tensors: Tensor) -> Any:
        return function(constants, *tensors)

    # torch.compile counts recompilations a code object, and remembers by file, line and name
    # which sizes changed: a copy with a name of its own learns nothing of other functions.
    code = bound.__code__.replace(co_name=f"bound_{next(_numbers)}")
    return types.FunctionType(code, globals(), code.co_name, None, bound.__closure__)

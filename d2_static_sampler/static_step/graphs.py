"""Functions of the static step through ``torch.compile``."""

from __future__ import annotations

import itertools
import logging
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

logger = logging.getLogger(__name__)
_numbers = itertools.count()

# The overlap of two boxes is cheap to compute again from what is in a cache already: without this
# the compiler writes the overlaps of all boxes with all ground truth to memory. Much higher limits
# would unroll the sampler's chains as well.
_OPTIONS = {
    "realize_reads_threshold": 32,
    "realize_opcount_threshold": 128,
    "realize_acc_reads_threshold": 32,
}

Compiled = Callable[..., Any]


class Graphs:
    """A function of constants and tensors, compiled once for each set of constants.

    Every call is one graph without a break. Where compiling fails it warns once and goes on
    without; so it does under a dispatch mode, such as a counter of operations.

    Args:
        function: of hashable constants, then of tensors.
        dynamic: for each tensor, the dimensions whose sizes change from call to call.

    Attributes:
        num_graphs: how many graphs have been compiled so far.
        is_eager: True after a failure to compile.
    """

    def __init__(self, function: Compiled, dynamic: Sequence[Sequence[int]]) -> None:
        self._function = function
        self._dynamic = dynamic
        self._reset()

    def _reset(self) -> None:
        self.num_graphs = 0
        self.is_eager = False
        self._compiled: dict[Any, Compiled] = {}
        self._marked: set[Any] = set()

    def __getstate__(self) -> dict[str, Any]:
        # Compiled functions cannot be pickled or copied; a copy compiles its own.
        return {"_function": self._function, "_dynamic": self._dynamic}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def __call__(self, constants: Any, *tensors: Tensor) -> Any:
        """The function's result."""
        if self.is_eager or torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
            return self._function(constants, *tensors)
        try:
            return self._run(constants, tensors)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler fails in many ways
            self.is_eager = True
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            logger.warning(f"{self._name} runs uncompiled from here on: {reason}")
            return self._function(constants, *tensors)

    def _run(self, constants: Any, tensors: Sequence[Tensor]) -> Any:
        if constants not in self._compiled:
            self._compiled[constants] = torch.compile(
                _bind(self._function, constants), backend=self._inductor, fullgraph=True
            )
        self._mark(constants, tensors)
        # One graph, whatever the caller's autocast.
        with torch.autocast(tensors[0].device.type, enabled=False):
            return self._compiled[constants](*tensors)

    def _mark(self, constants: Any, tensors: Sequence[Tensor]) -> None:
        """Without these marks a second size would compile another graph."""
        key = constants, tensors[0].shape[0] == 1
        if key not in self._marked:
            self._marked.add(key)
            for tensor, dims in zip(tensors, self._dynamic, strict=True):
                for dim in dims:
                    if tensor.shape[dim] > 1:
                        torch._dynamo.maybe_mark_dynamic(tensor, dim)

    def _inductor(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Compiled:
        compiled: Any = compile_fx(graph, inputs, config_patches=_OPTIONS)
        self.num_graphs += 1
        logger.info(f"Compiled graph {self.num_graphs} of {self._name}")
        return compiled

    @property
    def _name(self) -> str:
        return getattr(self._function, "__name__", "a function")


def compile_fx(graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
    """Inductor's, which takes seconds to import: when the first graph is compiled."""
    from torch._inductor.compile_fx import compile_fx as of_inductor

    return of_inductor(graph, inputs, **options)


def _bind(function: Compiled, constants: Any) -> Compiled:
    def bound(*tensors: Tensor) -> Any:
        return function(constants, *tensors)

    # torch.compile counts recompilations a code object, and remembers by file, line and name
    # which sizes changed: a copy with a name of its own learns nothing of other functions.
    code = bound.__code__.replace(co_name=f"bound_{next(_numbers)}")
    return types.FunctionType(code, globals(), code.co_name, None, bound.__closure__)

"""The compiled sampler: the static one, with all but its counting through ``torch.compile``.

What is compiled is the many small operations of a selection's ``take``. Counting the labels stays
eager: on a CPU, Inductor's code for it takes three times as long. Ranks on a CPU are not compiled
at all: NumPy takes half of the graph's time, and as long where batches are large.
"""

from __future__ import annotations

import functools
import itertools
import logging
import types
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .registry import LABEL_SAMPLER_REGISTRY
from .request import SampleRequest
from .sample import LabelSample
from .selection import Form
from .static import StaticSampler

logger = logging.getLogger(__name__)

Taken = tuple[Tensor, Tensor, Tensor]
_numbers = itertools.count()


class CompiledSampler(StaticSampler):
    """The static sampler through ``torch.compile``: equal samples from equal words.

    Compiles at its first calls, where it is not NumPy that selects: one graph for batches of one
    and one for all larger ones, for each ``num_samples`` and ``positive_fraction``. Where
    compiling fails (no C++ compiler, say) it warns once and goes on as the static sampler. A
    dispatch mode, such as a counter of operations, sees the static sampler too. A change of the
    process's number of threads or of its default device compiles anew.

    Attributes:
        num_graphs: how many graphs have been compiled so far.
        is_eager: True after a failure to compile.
    """

    def __init__(self, select: str = "auto", *, use_numpy: bool = True) -> None:
        super().__init__(select, use_numpy=use_numpy)
        self.num_graphs = 0
        self.is_eager = False
        self._compiled: dict[tuple[int, int, bool], tuple[Form, Callable[..., Taken]]] = {}
        self._called: set[tuple[Callable[..., Taken], bool]] = set()

    def __getstate__(self) -> dict[str, Any]:
        # Compiled functions cannot be pickled or copied; a copy compiles its own.
        names = "select", "use_numpy", "is_eager"
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        CompiledSampler.__init__(self, state["select"], use_numpy=state["use_numpy"])
        self.is_eager = state["is_eager"]

    def _take(
        self, form: Form, labels: Tensor, words: Tensor, request: SampleRequest
    ) -> LabelSample:
        if self._is_for_numpy(form, labels, words):
            _say_once("Labels on a CPU are sampled in NumPy: there is nothing to compile")
        elif not (self.is_eager or torch.compiler.is_compiling() or is_in_torch_dispatch_mode()):
            try:
                sample = self._run_compiled(form, labels, words, request)
                if self.num_graphs:
                    return sample
                self._give_up("it is switched off in this process")
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a compiler fails in many ways
                self._give_up((str(error).strip() or type(error).__name__).splitlines()[0])
        return super()._take(form, labels, words, request)

    def _run_compiled(
        self, form: Form, labels: Tensor, words: Tensor, request: SampleRequest
    ) -> LabelSample:
        # One graph for all: of one layout, whatever the caller's modes.
        with _usual_modes(labels.device), torch.no_grad():
            form, compiled = self._compile(form, request)
            members = form.of(labels, request.background)
            inputs = [words.clone(memory_format=torch.contiguous_format), *vars(members).values()]
            if (compiled, len(labels) == 1) not in self._called:
                self._called.add((compiled, len(labels) == 1))
                _mark_dynamic(inputs, form.words_batch_dim)
            index, num_pos, num_neg = compiled(*inputs)
            return LabelSample(index, num_pos.squeeze(1), num_neg.squeeze(1))

    def _give_up(self, reason: str) -> None:
        self.is_eager = True
        logger.warning(
            "IMPL 'compiled' runs as 'static' from here on, because torch.compile failed: "
            f"{reason} (it needs a C++ compiler on PATH or in CXX, Triton on CUDA, and a cache "
            "folder that can be written)"
        )

    def _compile(self, form: Form, request: SampleRequest) -> tuple[Form, Callable[..., Taken]]:
        key = request.num_samples, request.quota, request.fill
        if key not in self._compiled:
            # The form of the first call stays: another one would be another graph.
            self._compiled[key] = (
                form,
                torch.compile(_taker(form, request), backend=self._inductor, fullgraph=True),
            )
        return self._compiled[key]

    def _inductor(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        compiled = torch._dynamo.lookup_backend("inductor")(graph, inputs)
        self.num_graphs += 1
        logger.info(f"Compiled graph {self.num_graphs} of the label sampler")
        return compiled


@functools.cache
def _say_once(message: str) -> None:
    logger.info(message)


def _taker(form: Form, request: SampleRequest) -> Callable[..., Taken]:
    def take(words: Tensor, *members: Tensor) -> Taken:
        index, is_padding, num_pos, num_neg = form(*members).take(words, request)
        return index.masked_fill(is_padding, 0), num_pos, num_neg

    # torch.compile counts recompilations a code object, and remembers by file, line and name
    # which sizes changed: a copy with a name of its own learns nothing of other samplers.
    code = take.__code__.replace(co_name=f"take_{next(_numbers)}")
    return types.FunctionType(code, globals(), code.co_name, None, take.__closure__)


def _mark_dynamic(inputs: list[Tensor], words_batch_dim: int) -> None:
    """Without these marks a second batch size or N would compile a second graph."""
    words, *members = inputs
    torch._dynamo.maybe_mark_dynamic(words, words_batch_dim)
    for value in (words, *members) if words_batch_dim == 0 else members:
        torch._dynamo.maybe_mark_dynamic(value, 0)
        if value.shape[1] > 1:
            torch._dynamo.maybe_mark_dynamic(value, 1)


def _usual_modes(device: torch.device) -> ExitStack | nullcontext[None]:
    """Neither inference mode nor autocast: a graph is valid for one state of them only."""
    inference, autocast = torch.is_inference_mode_enabled(), torch.is_autocast_enabled(device.type)
    if not (inference or autocast):
        return nullcontext()
    modes = ExitStack()
    modes.enter_context(torch.inference_mode(False))
    modes.enter_context(torch.autocast(device.type, enabled=False))
    return modes


@LABEL_SAMPLER_REGISTRY.register()
def compiled(select: str = "auto", *, use_numpy: bool = True) -> CompiledSampler:
    """``IMPL: compiled``."""
    return CompiledSampler(select, use_numpy=use_numpy)

"""The compiled sampler: the static one, with its arithmetic through ``torch.compile``.

What is compiled is :func:`~.selection.pick_ranks`: many small operations on (B, K) tensors. Its
shapes do not depend on N, so that no image size ever compiles again. Counting and searching the
labels stay eager: on a CPU, Inductor's code for them takes about eight times as long.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from .registry import LABEL_SAMPLER_REGISTRY
from .selection import pick_ranks
from .static import StaticSampler

logger = logging.getLogger(__name__)


class CompiledSampler(StaticSampler):
    """The static sampler through ``torch.compile``: equal samples from equal words.

    Compiles at its first calls: one graph for batches of one and one for all larger ones, for
    each ``num_samples`` and ``positive_fraction``. Where compiling fails (no C++ compiler, say)
    it warns once and goes on as the static sampler.

    Attributes:
        num_graphs: how many graphs have been compiled so far.
        is_eager: True after a failure to compile.
    """

    def __init__(self) -> None:
        self.num_graphs = 0
        self.is_eager = False
        self._compiled: dict[tuple[int, int], Callable[..., tuple[Tensor, Tensor, Tensor]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Compiled functions cannot be pickled or copied; a copy compiles its own.
        return {"is_eager": self.is_eager}

    def __setstate__(self, state: dict[str, Any]) -> None:
        CompiledSampler.__init__(self)
        self.is_eager = state["is_eager"]

    def _pick_ranks(
        self, words: Tensor, counts: Tensor, quota: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not self.is_eager:
            try:
                picked = self._run_compiled(words, counts, quota)
                if self.num_graphs:
                    return picked
                self._give_up("torch.compile is switched off in this process")
            except Exception as error:  # a compiler fails in many ways; no fault of the data's
                self._give_up((str(error).strip() or type(error).__name__).splitlines()[0])
        return pick_ranks(words, counts, quota)

    def _run_compiled(
        self, words: Tensor, counts: Tensor, quota: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        # One graph for all: of one layout, whatever the caller's autocast and inference mode.
        with torch.inference_mode(False), torch.no_grad(), _no_autocast(words.device):
            words = words.clone(memory_format=torch.contiguous_format)
            counts = counts.clone(memory_format=torch.contiguous_format)
            # Without these marks a second batch size would compile a second graph.
            torch._dynamo.maybe_mark_dynamic(words, 1)
            torch._dynamo.maybe_mark_dynamic(counts, 1)
            return self._compile(words.shape[-1], quota)(words, counts)

    def _give_up(self, reason: str) -> None:
        self.is_eager = True
        logger.warning(
            "IMPL 'compiled' runs as 'static' from here on, because torch.compile failed: "
            f"{reason} (it needs a C++ compiler on PATH or in CXX, Triton on CUDA, and a cache "
            "folder that can be written)"
        )

    def _compile(
        self, num_samples: int, quota: int
    ) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
        key = num_samples, quota
        if key not in self._compiled:
            self._compiled[key] = torch.compile(
                _with_quota(quota), backend=self._inductor, fullgraph=True
            )
        return self._compiled[key]

    def _inductor(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        compiled = torch._dynamo.lookup_backend("inductor")(graph, inputs)
        self.num_graphs += 1
        logger.info(f"Compiled graph {self.num_graphs} of the label sampler")
        return compiled


def _with_quota(quota: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    def pick_ranks_of_quota(words: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return pick_ranks(words, counts, quota)

    # torch.compile counts recompilations a code object: a copy has a count of its own, so that
    # many samplers in one process do not use up the limit together.
    code = pick_ranks_of_quota.__code__.replace()
    return types.FunctionType(code, globals(), code.co_name, None, pick_ranks_of_quota.__closure__)


def _no_autocast(device: torch.device) -> torch.autocast | nullcontext[None]:
    # A graph is valid for one autocast state only; integers are the same in each.
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


@LABEL_SAMPLER_REGISTRY.register()
def compiled() -> CompiledSampler:
    """``IMPL: compiled``."""
    return CompiledSampler()

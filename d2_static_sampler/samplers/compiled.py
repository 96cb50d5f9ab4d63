"""The compiled sampler: the static one's body through ``torch.compile``.

By default labels of a CPU are not compiled by rank: the operator's kernel takes half of the graph's
time, and as long where batches are large.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from ..compile import CompiledFunction
from ..ops import sample_by_rank
from ..ops.sampling import Members, Sample, SampleRequest, choose_members, sample_with
from .registry import LABEL_SAMPLER_REGISTRY
from .sample import LabelSample
from .static import StaticSampler
from .topk import sample_keys_in_torch

logger = logging.getLogger(f"detectron2.{__name__}")


@dataclass(frozen=True)
class Drawing:
    """A static sampling as one function of tensors, for a graph.

    Attributes:
        select: "rank" or "topk".
        members: for ranks the form of the members, whatever the number of candidates: another one
            would be another graph; None for the operator.
        request: how many of each class to draw.
    """

    select: str
    members: Members | None
    request: SampleRequest

    def __call__(self, labels: Tensor, words: Tensor) -> LabelSample:
        """Sample (B, N) labels, B, N and K >= 1."""
        return LabelSample(*draw(self, labels, words))


def draw(drawing: Drawing, labels: Tensor, words: Tensor) -> Sample:
    """Index and counts of the sample of (B, N) labels."""
    if drawing.select == "topk":
        return sample_keys_in_torch(labels, words, *drawing.request)
    if drawing.members is None:
        index, num_pos, num_neg = sample_by_rank(labels, words, *drawing.request)
        return index, num_pos, num_neg
    return sample_with(drawing.members, labels, words, drawing.request)


class CompiledSampler(StaticSampler):
    """The static sampler through ``torch.compile``: equal samples from equal words.

    Compiles at its first calls: one graph for batches of one and one for all larger ones, for each
    ``num_samples`` and ``positive_fraction``. Where compiling fails it warns once and goes on
    uncompiled.

    Args:
        select: as of the static sampler.
        compiles_cpu: whether labels of a CPU are compiled by rank, too.
    """

    def __init__(self, select: str = "auto", *, compiles_cpu: bool = False) -> None:
        super().__init__(select)
        if not isinstance(compiles_cpu, bool):
            raise TypeError(f"compiles_cpu must be True or False, not {compiles_cpu!r}")
        self._compiles_cpu = compiles_cpu
        self._drawings: dict[tuple[SampleRequest, bool], Drawing] = {}
        self._draw = CompiledFunction(draw, name="IMPL 'compiled'")

    @property
    def num_graphs(self) -> int:
        """How many graphs have been compiled so far."""
        return self._draw.num_graphs

    @property
    def is_eager(self) -> bool:
        """Whether compiling has failed."""
        return self._draw.is_eager

    def drawing(self, labels: Tensor, request: SampleRequest) -> Drawing:
        """What is compiled for such a request; the first call's number of candidates decides.

        Args:
            labels: (B, N), or anything of that shape on their device.
            request: how many of each class to draw.
        """
        by_kernel = self._is_for_kernel(labels)
        if (request, by_kernel) not in self._drawings:
            has_form = not (by_kernel or self.select == "topk")
            members = choose_members(labels.shape[1], request.num_samples) if has_form else None
            self._drawings[request, by_kernel] = Drawing(self.select, members, request)
        return self._drawings[request, by_kernel]

    def _sample(self, labels: Tensor, words: Tensor, request: SampleRequest) -> LabelSample:
        if self._is_for_kernel(labels):
            if not torch.compiler.is_compiling():
                _say_once("Labels on a CPU are sampled by its kernel: there is nothing to compile")
            return super()._sample(labels, words, request)
        # A trace keeps the operator, which serves other sizes than the example's.
        if labels.numel() == 0 or request.num_samples == 0 or torch.jit.is_tracing():
            return super()._sample(labels, words, request)
        drawing = self.drawing(labels, request)
        # Compiled for one layout, whatever the caller's.
        with torch.no_grad():
            return LabelSample(*self._draw(drawing, labels.contiguous(), words.contiguous()))

    def _is_for_kernel(self, labels: Tensor) -> bool:
        is_by_rank = self.select != "topk" and not self._compiles_cpu
        return is_by_rank and labels.device.type == "cpu"


@functools.cache
def _say_once(message: str) -> None:
    logger.info(message)


@LABEL_SAMPLER_REGISTRY.register()
def compiled(select: str = "auto", *, compiles_cpu: bool = False) -> CompiledSampler:
    """``IMPL: compiled``."""
    return CompiledSampler(select, compiles_cpu=compiles_cpu)

"""Selection by rank on a CPU, in NumPy: for the same words the same sample as anywhere else.

A CPU waits for nothing. Shapes may depend on the data here, and what costs is the number of small
operations: on a few hundred numbers one of NumPy's takes a tenth of torch's time.

B rows, N candidates, K slots. The members of a row are its P positives followed by its Q
negatives, each in the order of their indices; a rank is a place among them.
"""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ..operations import operation
from ..request import SampleRequest
from .host_members import HostBlocks, HostTable
from .host_ranks import pick_ranks

HostForm = type[HostTable] | type[HostBlocks]


def is_on_host(labels: Tensor, words: Tensor) -> bool:
    """Whether these can be handed to NumPy: a CPU's plain memory, with nobody looking on.

    Who traces, transforms, fakes or counts operations wants those of every other device.
    """
    return (
        labels.device.type == "cpu"
        and type(labels) is Tensor
        and type(words) is Tensor
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not torch._C._are_functorch_transforms_active()
        and not is_in_torch_dispatch_mode()
    )


def choose_host_form(num_candidates: int, num_samples: int) -> HostForm:
    """The form of the members for rows of N candidates and K slots.

    A table costs 10 bytes of writing a candidate, blocks cost 2 and the search of one block a
    slot: they break even at 64 to 128 candidates a slot. Measured in docs/benchmarks.
    """
    return HostTable if num_candidates < 64 * num_samples else HostBlocks


def take_on_host(
    form: HostForm, labels: Tensor, words: Tensor, request: SampleRequest
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw the sample of each of the (B, N) rows, B, N and K >= 1.

    Args:
        form: of the members.
        labels: integer or bool; -1 = ignore.
        words: (2, B, K) int64, non-negative.
        request: how many of each class to draw.

    Returns:
        (B, K) int64 candidates, 0 in padding; (B,) int64 number of positives; (B,) int64 number
        of negatives.
    """
    label = _array(labels.view(torch.uint8) if labels.dtype == torch.bool else labels)
    members = form.of(label, request.background)
    positives, total = members.positives, members.total
    num_pos, num_neg = request.split(positives, total - positives)
    ranks = pick_ranks(_array(words), positives, total, num_pos)
    index = members.find(ranks)
    index *= ranks < total
    counts = (torch.from_numpy(num[:, 0]) for num in (num_pos, num_neg))
    return torch.from_numpy(index), next(counts), next(counts)


def _take_in_graph(
    labels: Tensor,
    words: Tensor,
    num_samples: int,
    quota: int,
    background: int | None,
    fill: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    form = choose_host_form(labels.shape[1], num_samples)
    request = SampleRequest(num_samples, quota, background, fill)
    return take_on_host(form, labels, words, request)


# In a graph on a CPU all of take_on_host is one operation; arguments and results as there.
take_in_graph = operation(
    "take_labels",
    _take_in_graph,
    device_types="cpu",
    schema="(Tensor labels, Tensor words, SymInt num_samples, SymInt quota, SymInt? background, "
    "bool fill) -> (Tensor, Tensor, Tensor)",
)


@take_in_graph.register_fake
def _(labels: Tensor, words: Tensor, num_samples: int, *_: object) -> tuple[Tensor, ...]:
    index = words.new_empty((labels.shape[0], num_samples))
    return index, words.new_empty((labels.shape[0],)), words.new_empty((labels.shape[0],))


def pick_ranks_on_host(words: Tensor, *counts: Tensor) -> Tensor:
    """:func:`.ranks.pick_ranks` in NumPy."""
    return torch.from_numpy(pick_ranks(*map(_array, (words, *counts))))


def _array(tensor: Tensor) -> NDArray[Any]:
    # Its memory holds other numbers than a tensor with torch's negative bit, or one of zeros only.
    return tensor.numpy(force=True)

"""The sampler inside ``torch.jit.trace``, ``torch.func.vmap`` and torch's other transforms.

They know neither ``out=`` nor a view of another type, and a trace would keep the shapes of its
example. Both take an operation of torch as it is: here all of a sample is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .operations import operation
from .request import SampleRequest
from .selection import is_on_host, pick_ranks, pick_ranks_on_host


def is_transformed() -> bool:
    """Whether a trace, or a transform of torch.func, looks at this call."""
    if torch.compiler.is_compiling():
        return False
    # The second is private: torch.func has no such question.
    return torch.jit.is_tracing() or torch._C._are_functorch_transforms_active()


def _sample(
    labels: Tensor,
    words: Tensor,
    num_samples: int,
    quota: int,
    background: int | None,
    fill: bool,
    by_keys: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from .static import StaticSampler  # which calls this one

    sampler = StaticSampler("topk" if by_keys else "rank")
    form = sampler.form(labels.shape[1], num_samples)
    request = SampleRequest(num_samples, quota, background, fill)
    sample = sampler._sample(form, labels, words, request)
    # An operation must not return two views of one tensor.
    return sample.index, sample.num_pos.clone(), sample.num_neg.clone()


# All of a sample of (B, N) labels; by_keys: with select "topk", whose words are keys.
sample_as_one = operation(
    "sample_labels",
    _sample,
    schema="(Tensor labels, Tensor words, SymInt num_samples, SymInt quota, SymInt? background, "
    "bool fill, bool by_keys) -> (Tensor, Tensor, Tensor)",
)


@sample_as_one.register_fake
def _(labels: Tensor, words: Tensor, num_samples: int, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows = labels.shape[0]
    shapes = (rows, num_samples), (rows,), (rows,)
    index, num_pos, num_neg = (labels.new_empty(shape, dtype=torch.int64) for shape in shapes)
    return index, num_pos, num_neg


@sample_as_one.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], labels: Tensor, words: Tensor, *request: Any) -> Any:
    """The (V, B, N) labels of V calls are V * B rows; so are their words."""
    labels = _leading(labels, in_dims[0], info.batch_size)
    words = _leading(words, in_dims[1], info.batch_size)
    by_keys = request[-1]
    # (V, B, N), or (V, 2, B, K), of which the rows are the dimension before the last.
    rows = words if by_keys else words.transpose(0, 1)
    rows = rows.flatten(0, 1) if by_keys else rows.flatten(1, 2)
    taken = sample_as_one(labels.flatten(0, 1), rows, *request)
    return tuple(value.unflatten(0, labels.shape[:2]) for value in taken), (0, 0, 0)


def _shuffle(words: Tensor, positives: Tensor, total: Tensor, num_pos: Tensor) -> Tensor:
    shuffle: Callable[..., Tensor]
    shuffle = pick_ranks_on_host if is_on_host(positives, words) else pick_ranks
    return shuffle(words, positives, total, num_pos)


# As :func:`.selection.pick_ranks`.
pick_ranks_as_one = operation(
    "pick_ranks",
    _shuffle,
    schema="(Tensor words, Tensor positives, Tensor total, Tensor num_pos) -> Tensor",
)


@pick_ranks_as_one.register_fake
def _(words: Tensor, *_: Tensor) -> Tensor:
    return words.new_empty(words.shape[1:])


@pick_ranks_as_one.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], words: Tensor, *counts: Tensor) -> tuple[Tensor, int]:
    words = _leading(words, in_dims[0], info.batch_size).transpose(0, 1)
    rows = [
        _leading(count, dim, info.batch_size).flatten(0, 1)
        for count, dim in zip(counts, in_dims[1:], strict=True)
    ]
    order = pick_ranks_as_one(words.flatten(1, 2), *rows)
    return order.unflatten(0, words.shape[1:3]), 0


def _leading(value: Tensor, dim: int | None, size: int) -> Tensor:
    """``value`` with the dimension of the calls first; repeated where all have the same."""
    return value.expand(size, *value.shape) if dim is None else value.movedim(dim, 0)

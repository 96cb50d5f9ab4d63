"""Selection by random keys and top-k, as other samplers do it.

B rows, N candidates, K slots. It draws N random keys a row where ranks draw 2 K words, in less
than half of the operations. Exact up to ties of keys, which have 31 bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.operator import operator
from ..ops.sampling import SCHEMA, Sample, SampleRequest, classes_of, leading, no_sample

_KEY_BITS = 31
_MAX_KEY = (1 << _KEY_BITS) - 1


def draw_keys(
    shape: tuple[int, ...], *, device: torch.device, generator: torch.Generator | None = None
) -> Tensor:
    """Draw keys of ``shape``, int32 and above 0."""
    return torch.randint(1, _MAX_KEY, shape, dtype=torch.int32, device=device, generator=generator)


def sample_keys_in_torch(
    labels: Tensor,
    keys: Tensor,
    num_samples: int,
    quota: int,
    background: int | None,
    fill: bool,
) -> Sample:
    """The body of :data:`sample_by_keys`."""
    if labels.numel() == 0 or num_samples == 0:
        return no_sample(labels, num_samples)
    if keys.dtype == torch.int64:
        keys = ((keys >> _KEY_BITS) & _MAX_KEY).clamp(min=1).to(torch.int32)
    request = SampleRequest(num_samples, quota, background, fill)
    n, k = keys.shape[1], num_samples
    member = torch.stack(classes_of(labels, background), dim=1).to(torch.int8)
    positive, negative = member.unbind(1)
    # One row for both classes: positives above 0, negatives below, ignored candidates at 0.
    key = keys * (positive - negative)
    highest = key.topk(min(k if fill else quota, n), dim=1).indices
    lowest = key.topk(min(k, n), dim=1, largest=False).indices

    # What is valid follows from the counts, whatever keys have been drawn.
    counts = member.sum(2, dtype=torch.int32)  # int64 takes thrice as long
    num_pos, num_neg = request.split(*counts.long()[..., None].unbind(1))
    slot = torch.arange(k, device=key.device)
    column = torch.where(slot < num_pos, slot, slot + (highest.shape[1] - num_pos))
    picks = torch.cat([highest, lowest], 1)
    index = picks.gather(1, column.clamp(max=picks.shape[1] - 1))
    index = index.masked_fill(slot >= num_pos + num_neg, 0)
    return index, num_pos.squeeze(1), num_neg.squeeze(1)


# As :data:`..ops.sample_by_rank`, but that the random input is a key for each candidate: (B, N)
# int32 above 0, or int64 words that hold them.
sample_by_keys = operator("sample_by_keys", sample_keys_in_torch, SCHEMA)


@sample_by_keys.register_fake
def _(labels: Tensor, keys: Tensor, num_samples: int, *_: Any) -> Sample:
    return no_sample(labels, num_samples)


@sample_by_keys.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], labels: Tensor, keys: Tensor, *request: Any) -> Any:
    """The (V, B, N) labels of V calls are V * B rows; so are their keys."""
    labels = leading(labels, in_dims[0], info.batch_size)
    keys = leading(keys, in_dims[1], info.batch_size)
    sample = sample_by_keys(labels.flatten(0, 1), keys.flatten(0, 1), *request)
    return tuple(value.unflatten(0, labels.shape[:2]) for value in sample), (0, 0, 0)

"""Checks shared by every sampler: what may be asked for, in which form."""

from __future__ import annotations

import operator
from numbers import Real

import torch
from torch import Tensor

from ..ops.sampling import IGNORE, SampleRequest


def check_request(
    labels: Tensor, num_samples: int, positive_fraction: float, bg_label: int
) -> SampleRequest:
    """Check a sampler's arguments and resolve them to counts.

    Args:
        labels: (N,) or (B, N) integer or bool.
        num_samples: at least 0.
        positive_fraction: in [0, 1].
        bg_label: any integer but -1, which marks ignored candidates.

    Raises:
        TypeError: labels that are not integers or bool; a number or label that is no integer.
        ValueError: any other argument outside its range.
    """
    num_samples = _integer("num_samples", num_samples)
    bg_label = _integer("bg_label", bg_label)
    if labels.dtype.is_floating_point or labels.dtype.is_complex:
        raise TypeError(f"labels must be integers or bool, not {labels.dtype}")
    if labels.dim() not in (1, 2):
        raise ValueError(f"labels must have shape (N,) or (B, N), not {tuple(labels.shape)}")
    if num_samples < 0:
        raise ValueError(f"num_samples must be at least 0, not {num_samples}")
    if not isinstance(positive_fraction, Real):
        raise TypeError(f"positive_fraction must be a number, not {positive_fraction!r}")
    if not 0 <= positive_fraction <= 1:
        raise ValueError(f"positive_fraction must be in [0, 1], not {positive_fraction}")
    if bg_label == IGNORE:
        raise ValueError("bg_label must not be -1: that label marks ignored candidates")
    # Python's int of Python's product: a float32 product gives other counts (100 * 0.29).
    quota = int(num_samples * positive_fraction)
    return SampleRequest(num_samples, quota, bg_label if _fits(bg_label, labels.dtype) else None)


def check_words(words: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Check that ``words`` is int64, of this shape and on this device."""
    if words.dtype != torch.int64 or tuple(words.shape) != shape or words.device != device:
        raise ValueError(
            f"words must be int64 of shape {shape} on {device}, "
            f"not {words.dtype} of shape {tuple(words.shape)} on {words.device}"
        )


def _integer(name: str, value: int) -> int:
    try:
        return int(operator.index(value))
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {value!r}") from None


def _fits(value: int, dtype: torch.dtype) -> bool:
    if dtype == torch.bool:
        return value in (0, 1)
    limits = torch.iinfo(dtype)
    return limits.min <= value <= limits.max

"""The only randomness of a sample: words, uniform integers on [0, 2**62).

Drawn from a torch generator, or computed from (seed, rank, head, call): the computed ones are
the same on every device and need no state but the number of the call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

WORD_BITS = 62
_MASK64 = (1 << 64) - 1
# SplitMix64, Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
_GAMMA = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31


def draw_words(
    shape: Sequence[int], *, device: torch.device, generator: torch.Generator | None = None
) -> Tensor:
    """Draw words of ``shape``, int64, from ``generator`` or the device's global generator."""
    return torch.randint(
        1 << WORD_BITS, tuple(shape), dtype=torch.int64, device=device, generator=generator
    )


def seeded_words(
    shape: Sequence[int], *, device: torch.device, seed: int, rank: int, head: int, call: int
) -> Tensor:
    """Compute the words of one call: ``shape``, int64, equal on every device.

    Args:
        shape: of the result.
        device: where the words are computed.
        seed: ``MODEL.SAMPLER.SEED``.
        rank: of the process.
        head: which of the model's samplers calls.
        call: how many calls this head made before.
    """
    key = 0
    for part in (seed, rank, head, call):
        key = _mix_int((key + _GAMMA) ^ part & _MASK64)
    count = torch.Size(shape).numel()
    z = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _signed(_GAMMA)
    z = z + _signed(key)
    for shift, factor in _MIX:
        z = (z ^ _logical_shift(z, shift)) * _signed(factor)
    z = z ^ _logical_shift(z, _LAST_SHIFT)
    return _logical_shift(z, 64 - WORD_BITS).view(tuple(shape))


def _mix_int(z: int) -> int:
    z &= _MASK64
    for shift, factor in _MIX:
        z = (z ^ z >> shift) * factor & _MASK64
    return z ^ z >> _LAST_SHIFT


def _logical_shift(z: Tensor, bits: int) -> Tensor:
    # int64's own shift repeats the sign bit.
    return (z >> bits) & ((1 << 64 - bits) - 1)


def _signed(z: int) -> int:
    return z - (1 << 64) if z >> 63 else z

"""Seeded words: uniform 62-bit integers that depend on every part of their key."""

from __future__ import annotations

import itertools

import pytest
import torch

from d2_static_sampler.samplers import seeded_words

CPU = torch.device("cpu")


def words(shape=(2, 3, 64), **key):
    key = {"seed": 1, "rank": 0, "head": 0, "call": 0} | key
    return seeded_words(shape, device=CPU, **key)


def test_repeat_and_differ_by_every_part_of_the_key():
    assert torch.equal(words(), words())
    keys = itertools.product((0, 1, 2**62), (0, 1), (0, 1), (0, 1, 10**6))
    streams = {
        tuple(words(seed=s, rank=r, head=h, call=c).flatten().tolist()) for s, r, h, c in keys
    }
    assert len(streams) == 3 * 2 * 2 * 3


def test_range_shape_and_type():
    drawn = words((2, 5, 1000))
    assert drawn.shape == (2, 5, 1000)
    assert drawn.dtype == torch.int64
    assert drawn.min() >= 0
    assert drawn.max() < 1 << 62


@pytest.mark.parametrize("bit", range(62))
def test_every_bit_is_fair(bit):
    """False alarm below 1e-6 a bit: five standard deviations of 200,000 fair coins."""
    ones = (words((200_000,)) >> bit & 1).sum().item()
    assert abs(ones - 100_000) < 5 * (200_000**0.5) / 2


def test_first_value_is_fixed():
    """A seed means the same samples in later versions."""
    assert words((2,), seed=7).tolist() == [1075929144627964895, 3557139223782735461]

"""Which ranks to take, in NumPy: :mod:`.ranks` for a CPU."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def pick_ranks(words: Ints, positives: Ints, total: Ints, num_pos: Ints) -> Ints:
    """:func:`.ranks.pick_ranks` of arrays, with the same arguments and result."""
    _, rows, num_slots = words.shape
    slot = np.arange(num_slots)
    row = num_slots * np.arange(rows)[:, None]
    negative = slot - num_pos
    is_neg = negative >= 0
    place = np.where(is_neg, negative + positives, slot)
    room = np.maximum(np.where(is_neg, total, positives) - place, 1)
    word = np.where(is_neg, words[1].take(np.maximum(negative, 0) + row), words[0])
    return _shuffle(place, word % room + place)


def _shuffle(place: Ints, target: Ints) -> Ints:
    """What each step takes, where step i swaps ``place[i]`` and ``target[i]``, both (B, K)."""
    rows, num_steps = place.shape
    # As in ranks.py, but that a key ends in its touch, which a mask finds again.
    bits = (2 * num_steps - 1).bit_length()
    touch = np.arange(2 * num_steps)
    key = np.empty((rows, 2 * num_steps), np.int64)
    key[:, 0::2], key[:, 1::2] = place, target
    key <<= bits
    key |= touch
    key.sort(axis=1)
    gap = np.zeros_like(key)  # the first has nothing before it
    np.subtract(key[:, 1:], key[:, :-1], out=gap[:, 1:])
    key &= (1 << bits) - 1
    row = num_steps * np.arange(rows)[:, None]
    key += 2 * row
    back = np.empty_like(key)
    back.reshape(-1)[key.ravel()] = gap.ravel()
    back *= back <= touch  # a gap of more touches than there were means another place

    wrote = ((touch - back) >> 1).reshape(rows, num_steps, 2)
    wrote += row[:, :, None]
    found = place.take(_roots(wrote[:, :, 0]))
    return np.where(back[:, 1::2] > 0, found.take(wrote[:, :, 1]), target)


def _roots(pointer: Ints) -> Ints:
    """Follow pointers to earlier steps, as places in all of the (B, K) steps, to their ends."""
    while True:
        further = pointer.take(pointer)
        if np.array_equal(further, pointer):
            return pointer
        pointer = further

"""Sampling by rank on a CPU, in NumPy: for the same words the same sample as anywhere else.

A CPU waits for nothing. Shapes may depend on the data here, and what costs is the number of small
operations: on a few hundred numbers one of NumPy's takes a tenth of torch's time.

B rows, N candidates, K slots; P positives and Q negatives of a row, which are its members in this
order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .sampling import IGNORE, Sample, SampleRequest, no_sample, pick_ranks, sample_by_rank

Ints = NDArray[np.int64]
Labels = NDArray[Any]  # of any type of integer
Flags = NDArray[np.bool_]
Words = NDArray[np.uint64]

_WORD = np.dtype("<u8")  # whose lowest byte is the first in memory
_ONES, _HIGH = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)  # of each byte
# [8 * byte + i]: which bit of the byte is its i-th that is set.
_NTH_BIT = np.argsort(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") ^ 1,
    axis=1,
    kind="stable",
).ravel()


@sample_by_rank.register_kernel("cpu")
def _(
    labels: Tensor,
    words: Tensor,
    num_samples: int,
    quota: int,
    background: int | None,
    fill: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    if labels.numel() == 0 or num_samples == 0:
        return no_sample(labels, num_samples)
    members = choose_members(labels.shape[1], num_samples)
    return sample_with(members, labels, words, SampleRequest(num_samples, quota, background, fill))


def sample_with(
    form: type[CpuTable] | type[CpuBlocks], labels: Tensor, words: Tensor, request: SampleRequest
) -> Sample:
    """The kernel with one form of the members; B, N and K are at least 1."""
    label = _array(labels.view(torch.uint8) if labels.dtype == torch.bool else labels)
    members = form.of(label, request.background)
    positives, total = members.positives, members.total
    num_pos, num_neg = request.split(positives, total - positives)
    ranks = _pick(_array(words), positives, total, num_pos)
    found = members.find(ranks)
    found *= ranks < total
    counts = (torch.from_numpy(num[:, 0]) for num in (num_pos, num_neg))
    return torch.from_numpy(found), next(counts), next(counts)


@pick_ranks.register_kernel("cpu")
def _(words: Tensor, positives: Tensor, total: Tensor, num_pos: Tensor) -> Tensor:
    return torch.from_numpy(_pick(*map(_array, (words, positives, total, num_pos))))


def choose_members(num_candidates: int, num_samples: int) -> type[CpuTable] | type[CpuBlocks]:
    """The form of the members for rows of N candidates and K slots.

    A table costs 10 bytes of writing a candidate, blocks cost 2 and the search of one block a
    slot: they break even at 64 to 128 candidates a slot. Measured in docs/benchmarks.
    """
    return CpuTable if num_candidates < 64 * num_samples else CpuBlocks


@dataclass
class CpuTable:
    """The members of all rows, one after the other.

    Attributes:
        places: (members of all rows,) int64, where each stands in the (B, 2, N) flags.
        start: (B, 1) int64, the first member of a row.
        positives: (B, 1) int64, P.
        total: (B, 1) int64, P + Q.
        n: N.
    """

    places: Ints
    start: Ints
    positives: Ints
    total: Ints
    n: int

    @classmethod
    def of(cls, label: Labels, background: int | None) -> CpuTable:
        """List the members of (B, N) labels."""
        rows, n = label.shape
        flags = np.empty((rows, 2, n), np.bool_)
        used, negative = flags[:, 0], flags[:, 1]
        _write_flags(label, background, used, negative)
        np.greater(used, negative, out=used)
        places = np.flatnonzero(flags)
        edge = places.searchsorted(np.arange(0, flags.size + 1, n))[:, None]
        start = edge[:-1:2]
        return cls(places, start, edge[1::2] - start, edge[2::2] - start, n)

    def find(self, ranks: Ints) -> Ints:
        """The candidates with these (B, K) ranks; meaningless for ranks of P + Q or more."""
        if len(self.places) == 0:
            return np.zeros_like(ranks)
        return self.places.take(ranks + self.start, mode="clip") % self.n


@dataclass
class CpuBlocks:
    """The members of all rows as bits, counted by blocks of 64: for long rows.

    Attributes:
        words: (B, 2, M) uint64, M = ceil(N / 64): a row's positives, then its negatives; the
            lowest bit of a word is the first candidate of its block.
        ends: (B, 2, M) int64, how many members of all rows stand up to the end of each block.
        start: (B, 1) int64, the first member of a row.
    """

    words: Words
    ends: Ints
    start: Ints

    @classmethod
    def of(cls, label: Labels, background: int | None) -> CpuBlocks:
        """Count the members of (B, N) labels."""
        rows, n = label.shape
        words = np.zeros((rows, 2, -(-n // 64)), _WORD)
        count = np.empty(words.shape, np.int64)
        flags = np.empty((2, n), np.bool_)
        for row in range(rows):  # one after the other, they stay in a core's cache
            _write_flags(label[row], background, *flags)
            packed = np.packbits(flags, axis=1, bitorder="little")
            words[row].view(np.uint8)[:, : packed.shape[1]] = packed
            words[row, 0] &= ~words[row, 1]
            count[row] = _count_bits(words[row])
        ends = count.cumsum().reshape(words.shape)
        start = np.append(0, ends[:-1, 1, -1])[:, None]
        return cls(words, ends, start)

    @property
    def positives(self) -> Ints:
        """(B, 1) int64, P."""
        return self.ends[:, 0, -1:] - self.start

    @property
    def total(self) -> Ints:
        """(B, 1) int64, P + Q."""
        return self.ends[:, 1, -1:] - self.start

    def find(self, ranks: Ints) -> Ints:
        """See :meth:`CpuTable.find`."""
        rank = ranks + self.start
        block = self.ends.ravel().searchsorted(rank, side="right")
        word = self.words.take(block, mode="clip")
        upto = _count_upto_bytes(word)
        rank -= self.ends.take(block, mode="clip")
        rank = rank.view(np.uint64) + (upto >> 56)  # in the block
        # A byte's high bit tells whether so many members stand in the block up to its end.
        is_before = (rank * _ONES | _HIGH) - upto & _HIGH
        shift = (is_before >> 7) * _ONES >> 56 << 3
        rank -= (upto << 8) >> shift & 255
        nth = (((word >> shift) & 255) << 3) + rank
        bit = _NTH_BIT.take(nth.view(np.int64), mode="clip")  # older NumPy takes no uint64
        return (block % self.words.shape[2] << 6) + shift.view(np.int64) + bit


def _write_flags(label: Labels, background: int | None, used: Flags, negative: Flags) -> None:
    """Write which labels are not ignored, and which of them are of the background."""
    np.not_equal(label, np.array(IGNORE).astype(label.dtype), out=used)
    if background is None:
        negative[...] = False
    else:
        np.equal(label, background, out=negative)


def _count_upto_bytes(words: Words) -> Words:
    """Byte i of a result: how many bits are set in the bytes 0 to i of its word."""
    words = words - (words >> 1 & 0x5555555555555555)
    words = (words & 0x3333333333333333) + (words >> 2 & 0x3333333333333333)
    return (words + (words >> 4) & 0x0F0F0F0F0F0F0F0F) * _ONES


def _count_bits(words: Words) -> NDArray[Any]:
    if hasattr(np, "bitwise_count"):  # since NumPy 2
        return np.bitwise_count(words)
    return _count_upto_bytes(words) >> 56


def _pick(words: Ints, positives: Ints, total: Ints, num_pos: Ints) -> Ints:
    """:data:`.sampling.pick_ranks` of arrays."""
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
    # As in sampling.py, but that a key ends in its touch, which a mask finds again.
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


def _array(tensor: Tensor) -> NDArray[Any]:
    # Its memory holds other numbers than a tensor with torch's negative bit, or one of zeros only.
    return tensor.numpy(force=True)

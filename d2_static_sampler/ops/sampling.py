"""Sampling by rank: K random ranks a row and class, and the candidates that have them.

B rows, N candidates, K slots, W candidates a block, M = ceil(N / W) blocks a class. The members
of a row are its P positives followed by its Q negatives, each in the order of their indices; a
rank is a place among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .operator import operator

IGNORE = -1
BLOCK_WIDTH = 96  # the running counts of a block are bytes

Counts = TypeVar("Counts", Tensor, NDArray[np.int64])
Sample = tuple[Tensor, Tensor, Tensor]


class SampleRequest(NamedTuple):
    """How many of which class to draw from each row.

    Attributes:
        num_samples: K, the number of slots a row.
        quota: the most positives a row may have, ``int(num_samples * positive_fraction)``.
        background: the label of a negative, or None where no label of that type can have it.
        fill: whether positives take the slots that negatives are too few for.
    """

    num_samples: int
    quota: int
    background: int | None
    fill: bool = False

    def split(self, positives: Counts, negatives: Counts) -> tuple[Counts, Counts]:
        """How many positives and how many negatives are drawn of so many."""
        quota = (self.num_samples - negatives).clip(min=self.quota) if self.fill else self.quota
        num_pos = positives.clip(max=quota)
        return num_pos, negatives.clip(max=self.num_samples - num_pos)


@dataclass
class MemberTable:
    """The members of each row, written out in order: for rows that are short against K.

    Attributes:
        candidates: (B, N + 1) int64, the candidate of each rank below P + Q, from column 1 on.
        positives: (B, 1) int64, P.
        total: (B, 1) int64, P + Q.
    """

    candidates: Tensor
    positives: Tensor
    total: Tensor

    @classmethod
    def of(cls, labels: Tensor, background: int | None) -> MemberTable:
        """Write out the members of (B, N) labels, N >= 1."""
        rows, n = labels.shape
        member = torch.cat(classes_of(labels, background), dim=1)
        ends = member.cumsum(1)
        positives, total = ends[:, n - 1 : n].clone(), ends[:, 2 * n - 1 :].clone()
        # One more than its rank for a member, 0 for all else: nobody reads column 0.
        column = ends.mul_(member)
        candidate = torch.arange(n, device=labels.device).repeat(2).expand(rows, -1)
        return cls(ends.new_empty((rows, n + 1)).scatter_(1, column, candidate), positives, total)

    def find(self, ranks: Tensor) -> Tensor:
        """The candidates with these (B, K) ranks; meaningless for ranks of P + Q or more."""
        return self.candidates.gather(1, (ranks + 1).clamp(max=self.candidates.shape[1] - 1))


@dataclass
class MemberBlocks:
    """The members of each row, counted by blocks: for long rows.

    Attributes:
        member: (B, 2M, W) uint8, 1 for a member: the blocks of the positives, then those of the
            negatives.
        ends: (B, 2M) int64, how many members stand in a row up to the end of each block.
    """

    member: Tensor
    ends: Tensor

    @classmethod
    def of(cls, labels: Tensor, background: int | None) -> MemberBlocks:
        """Count the members of (B, N) labels, N >= 1."""
        rows, n = labels.shape
        gap = -n % BLOCK_WIDTH
        planes = torch.stack(classes_of(labels, background), dim=1).to(torch.uint8)
        member = torch.nn.functional.pad(planes, (0, gap)).view(rows, -1, BLOCK_WIDTH)
        # Of a byte's range: W is below 128.
        count = member.sum(2, dtype=torch.uint8)
        return cls(member, count.cumsum(1, dtype=torch.int64))

    @property
    def positives(self) -> Tensor:
        """(B, 1) int64, P."""
        return self.ends.narrow(1, self.ends.shape[1] // 2 - 1, 1)

    @property
    def total(self) -> Tensor:
        """(B, 1) int64, P + Q."""
        return self.ends.narrow(1, -1, 1)

    def find(self, ranks: Tensor) -> Tensor:
        """See :meth:`MemberTable.find`."""
        num_blocks = self.ends.shape[1]
        block = torch.searchsorted(self.ends, ranks, right=True).clamp(max=num_blocks - 1)
        member = self.member.gather(1, block[..., None].expand(-1, -1, BLOCK_WIDTH))
        running = member.cumsum(2, dtype=torch.uint8)
        # Negative: counted back from the end of the block. In uint8 both wrap around alike.
        rank = (ranks - self.ends.gather(1, block)).to(torch.uint8) + running[..., -1]
        place = torch.searchsorted(running, rank[..., None], right=True).squeeze(2)
        return place + block.remainder(num_blocks // 2) * BLOCK_WIDTH


Members = type[MemberTable] | type[MemberBlocks]


def choose_members(num_candidates: int, num_samples: int) -> Members:
    """The form of the members for rows of N candidates and K slots.

    A table costs about 26 bytes of writing a candidate, blocks cost 3 and the search of one block
    a slot: they break even at 8 to 16 candidates a slot. Measured in docs/benchmarks.
    """
    return MemberTable if num_candidates < 16 * num_samples else MemberBlocks


def classes_of(labels: Tensor, background: int | None) -> tuple[Tensor, Tensor]:
    """(B, N) bool each: which candidates are positive, which are negative."""
    labels = labels.view(torch.uint8) if labels.dtype == torch.bool else labels
    is_used = labels != IGNORE
    if background is None:
        return is_used, torch.zeros_like(is_used)
    is_negative = labels == background
    return is_used > is_negative, is_negative


def sample_with(members: Members, labels: Tensor, words: Tensor, request: SampleRequest) -> Sample:
    """:data:`sample_by_rank` with one form of the members; B, N and K are at least 1."""
    found = members.of(labels, request.background)
    positives, total = found.positives, found.total
    num_pos, num_neg = request.split(positives, total - positives)
    ranks = pick_in_torch(words, positives, total, num_pos)
    index = found.find(ranks).masked_fill(ranks >= total, 0)
    return index, num_pos.squeeze(1), num_neg.squeeze(1)


def sample_in_torch(
    labels: Tensor,
    words: Tensor,
    num_samples: int,
    quota: int,
    background: int | None,
    fill: bool,
) -> Sample:
    """The body of :data:`sample_by_rank`."""
    if labels.numel() == 0 or num_samples == 0:
        return no_sample(labels, num_samples)
    members = choose_members(labels.shape[1], num_samples)
    request = SampleRequest(num_samples, quota, background, fill)
    return sample_with(members, labels, words, request)


def no_sample(labels: Tensor, num_samples: int) -> Sample:
    """The sample where there is no row, no candidate or no slot."""
    index = labels.new_zeros((labels.shape[0], num_samples), dtype=torch.int64)
    none = labels.new_zeros((labels.shape[0],), dtype=torch.int64)
    return index, none, none.clone()


def pick_in_torch(words: Tensor, positives: Tensor, total: Tensor, num_pos: Tensor) -> Tensor:
    """The body of :data:`pick_ranks`."""
    touch = torch.arange(2 * words.shape[-1], device=words.device)
    slot = touch.narrow(0, 0, words.shape[-1])
    negative = slot - num_pos  # which negative a slot is; below 0 for a positive
    is_neg = negative >= 0
    # Beyond the last negative a slot stands alone behind everything, and swaps with itself.
    place = torch.where(is_neg, negative + positives, slot)
    room = (torch.where(is_neg, total, positives) - place).clamp(min=1)
    pos_word, neg_words = words
    word = torch.where(is_neg, neg_words.gather(1, negative.clamp(min=0)), pos_word)
    return _shuffle(place, word.remainder(room) + place, touch)


def _shuffle(place: Tensor, target: Tensor, touch: Tensor) -> Tensor:
    """What each step of the shuffle takes, (B, K): step i swaps ``place[i]`` and ``target[i]``.

    ``touch`` is 0 .. 2K - 1. A target is its step's own place or a later one, so that no step
    aims behind itself.
    """
    num_steps = place.shape[1]
    # Step i touches its own place as touch 2i and its target as touch 2i + 1. Sorted by what
    # they touch, then by time, each touch stands behind the one that it depends on.
    touched = torch.stack([place, target], dim=2).flatten(1)
    key, order = torch.sort(torch.add(touch, touched, alpha=2 * num_steps), dim=1)
    gap = (key - key.roll(1, dims=1)).clamp(min=0)  # the first has nothing before it
    back = order.scatter(1, order, gap)
    # A gap of more touches than there were means another place. (masked_fill takes four times as
    # long here: the processor cannot predict its branches.)
    back = back * (back <= touch)
    wrote = ((touch - back) >> 1).view(-1, num_steps, 2)
    wrote_place, wrote_target = wrote.unbind(2)

    found = place.gather(1, _roots(wrote_place))
    # The last step with this target left there what it had found at its own place.
    is_first = back.view(-1, num_steps, 2).select(2, 1) == 0
    return torch.where(is_first, target, found.gather(1, wrote_target))


def _roots(pointer: Tensor) -> Tensor:
    """Follow (B, K) pointers to earlier steps to their ends, by pointer doubling.

    What stands at a step's place when the step begins was put there by the latest writer, which
    had found it at its own place: so it is what stood at the place of the root at first.
    """
    for _ in range((pointer.shape[-1] - 1).bit_length()):
        pointer = pointer.gather(1, pointer)
    return pointer


SCHEMA = (
    "(Tensor labels, Tensor words, SymInt num_samples, SymInt quota, SymInt? background, "
    "bool fill) -> (Tensor, Tensor, Tensor)"
)

# Draw the sample of each of the (B, N) rows.
#
# labels: (B, N) integer or bool; -1 = ignore.
# words: (2, B, K) int64, non-negative; the first for the positives, the second for the negatives.
# The rest: of a SampleRequest.
#
# Returns (B, K) int64 candidates, 0 in padding; (B,) int64 number of positives; (B,) int64 number
# of negatives.
sample_by_rank = operator("sample_by_rank", sample_in_torch, SCHEMA)


@sample_by_rank.register_fake
def _(labels: Tensor, words: Tensor, num_samples: int, *_: Any) -> Sample:
    return no_sample(labels, num_samples)


@sample_by_rank.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], labels: Tensor, words: Tensor, *request: Any) -> Any:
    """The (V, B, N) labels of V calls are V * B rows; so are their (V, 2, B, K) words."""
    labels = leading(labels, in_dims[0], info.batch_size)
    words = leading(words, in_dims[1], info.batch_size).transpose(0, 1)
    sample = sample_by_rank(labels.flatten(0, 1), words.flatten(1, 2), *request)
    return tuple(value.unflatten(0, labels.shape[:2]) for value in sample), (0, 0, 0)


# Pick the places of a row's sample: so many positives, then negatives.
#
# Both classes of a row stand in one virtual array: its positives at places 0 .. P-1, its negatives
# at P .. P+Q-1. A Fisher-Yates shuffle of either class swaps, in step i, the content of the step's
# own place with that of a random later place; what it takes from there is the pick. For the same
# words this is exactly what a sequential shuffle picks, so that uniform words make every ordered
# sample equally likely (up to the modulo's (P+Q) * 2**-62).
#
# words: (2, B, K) int64, non-negative.
# positives, total: (B, 1) int64, P and P + Q.
# num_pos: (B, 1) int64, how many positives to pick, at most P and K.
#
# Returns (B, K) int64 places; P + Q or more in the slots that no negative is left for.
pick_ranks = operator(
    "pick_ranks",
    pick_in_torch,
    "(Tensor words, Tensor positives, Tensor total, Tensor num_pos) -> Tensor",
)


@pick_ranks.register_fake
def _(words: Tensor, *_: Tensor) -> Tensor:
    return words.new_empty(words.shape[1:])


@pick_ranks.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], words: Tensor, *counts: Tensor) -> tuple[Tensor, int]:
    words = leading(words, in_dims[0], info.batch_size).transpose(0, 1)
    rows = [
        leading(count, dim, info.batch_size).flatten(0, 1)
        for count, dim in zip(counts, in_dims[1:], strict=True)
    ]
    return pick_ranks(words.flatten(1, 2), *rows).unflatten(0, words.shape[1:3]), 0


def leading(value: Tensor, dim: int | None, size: int) -> Tensor:
    """``value`` with the dimension of a vmap's calls first; repeated where all have the same."""
    return value.expand(size, *value.shape) if dim is None else value.movedim(dim, 0)

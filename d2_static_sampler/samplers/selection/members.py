"""Which candidate has a rank.

B rows, N candidates, K slots, W candidates a block, M = ceil(N / W) blocks a class. The members
of a row are its P positives followed by its Q negatives, each in the order of their indices; a
rank is a place among them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .planes import byte_type, plane_words, write_membership

# Multiplying by this adds the eight bytes of a word into its highest byte. A sum stays below
# 128, so that no sign bit is touched.
_ADD_BYTES = 0x0101010101010101
BLOCK_WIDTH = 120


@dataclass
class MemberTable:
    """The members of each row, written out in order: for rows that are short against K.

    Attributes:
        candidates: (B, N) int64, the candidate of each rank below P + Q.
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
        member = labels.new_empty((rows, 2, n), dtype=byte_type(labels))
        write_membership(*member.unbind(1), labels, background)
        member = member.view(rows, 2 * n)
        ends = member.cumsum(1)
        # One more than its rank for a member, 0 for all else: nobody reads column 0.
        column = ends * member
        candidate = torch.arange(n, device=labels.device).repeat(2).expand_as(column)
        table = ends.new_empty((rows, n + 1)).scatter_(1, column, candidate)
        return cls(table.narrow(1, 1, n), ends.narrow(1, n - 1, 1), ends.narrow(1, -1, 1))

    def find(self, ranks: Tensor) -> Tensor:
        """The candidates with these (B, K) ranks; meaningless for ranks of P + Q or more."""
        return self.candidates.gather(1, ranks.clamp(max=self.candidates.shape[1] - 1))


@dataclass
class MemberBlocks:
    """The members of each row, counted by blocks: for long rows.

    Takes 2 bytes a candidate, 32 a block and 2 W a slot.

    Attributes:
        words: (B, 2M, W / 8) int64, a byte a candidate, 1 for a member: the blocks of the
            positives, then those of the negatives. Valid until this thread's next call.
        ends: (B, 2M) int64, how many members stand in a row up to the end of each block.
    """

    words: Tensor
    ends: Tensor

    @classmethod
    def of(
        cls, labels: Tensor, background: int | None, *, width: int = BLOCK_WIDTH
    ) -> MemberBlocks:
        """Count the members of (B, N) labels, N >= 1, by blocks of W, a multiple of 8 below 128."""
        words = plane_words(labels, background, width)
        # Eight candidates an addition: the bytes of a sum hold up to W / 8 each.
        counts = words.sum(2).mul_(_ADD_BYTES).bitwise_right_shift_(56)
        return cls(words, counts.cumsum(1))

    @property
    def positives(self) -> Tensor:
        """(B, 1) int64, P."""
        return self.ends.narrow(1, self.ends.shape[1] // 2 - 1, 1)

    @property
    def total(self) -> Tensor:
        """(B, 1) int64, P + Q."""
        return self.ends.narrow(1, -1, 1)

    def find(self, ranks: Tensor) -> Tensor:
        """The candidates with these (B, K) ranks; meaningless for ranks of P + Q or more."""
        num_blocks, width = self.ends.shape[1], 8 * self.words.shape[2]
        block = torch.searchsorted(self.ends, ranks, right=True).clamp_(max=num_blocks - 1)
        words = self.words.gather(1, block.unsqueeze(2).expand(-1, -1, width // 8))
        running = words.view(torch.uint8).flatten(0, 1).cumsum(1, dtype=torch.uint8)
        # Negative: counted back from the end of the block. In uint8 both wrap around alike.
        rank = (ranks - self.ends.gather(1, block)).to(torch.uint8).view(-1, 1)
        rank.add_(running.narrow(1, -1, 1))
        place = torch.searchsorted(running, rank, right=True).view_as(block)
        return place.add_(block.remainder_(num_blocks // 2), alpha=width)


Members = MemberTable | MemberBlocks


def choose_members(num_candidates: int, num_samples: int) -> type[MemberTable] | type[MemberBlocks]:
    """The form that is faster for rows of N candidates and K slots."""
    return MemberTable if num_candidates < 8 * num_samples else MemberBlocks

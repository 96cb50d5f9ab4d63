"""Selection by rank: K random ranks a row and class, and the candidates that have them.

B rows, N candidates, K slots, W candidates a block, M = ceil(N / W) blocks a class. The members
of a row are its P positives followed by its Q negatives, each in the order of their indices; a
rank is a place among them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..request import SampleRequest
from ..words import draw_words
from .planes import BLOCK_WIDTH, count_blocks, member_bytes, plane_words
from .ranks import pick_ranks


class Ranked:
    """A form of the members that finds a candidate by its rank."""

    words_batch_dim = 1

    positives: Tensor  # (B, 1) int64, P
    total: Tensor  # (B, 1) int64, P + Q

    def find(self, ranks: Tensor) -> Tensor:
        """The candidates with these (B, K) ranks; meaningless for ranks of P + Q or more."""
        raise NotImplementedError

    @staticmethod
    def words_shape(
        rows: tuple[int, ...], num_candidates: int, num_samples: int
    ) -> tuple[int, ...]:
        """The shape of the random input: a word for each slot of each class."""
        return (2, *rows, num_samples)

    draw_words = staticmethod(draw_words)

    def take(self, words: Tensor, request: SampleRequest) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draw the sample of each row that ``words`` stand for.

        Args:
            words: of :meth:`words_shape`, int64.
            request: how many of each class to draw.

        Returns:
            (B, K) int64 candidates; (B, K) bool, which of them are padding and meaningless;
            (B, 1) int64 number of positives; (B, 1) int64 number of negatives.
        """
        positives, total = self.positives, self.total
        num_pos, num_neg = request.split(positives, total - positives)
        ranks = pick_ranks(words, positives, total, num_pos)
        return self.find(ranks), ranks >= total, num_pos, num_neg


@dataclass
class MemberTable(Ranked):
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
        member = member_bytes(labels, background)
        ends = member.cumsum(1)
        # Of one layout at every batch size: a compiled function asks for it.
        positives, total = (
            ends[:, at : at + 1].clone(memory_format=torch.contiguous_format)
            for at in (n - 1, 2 * n - 1)
        )
        # One more than its rank for a member, 0 for all else: nobody reads column 0.
        column = ends.mul_(member)
        candidate = torch.arange(n, device=labels.device).repeat(2).expand_as(column)
        return cls(ends.new_empty((rows, n + 1)).scatter_(1, column, candidate), positives, total)

    def find(self, ranks: Tensor) -> Tensor:
        """See :meth:`Ranked.find`."""
        return self.candidates.gather(1, (ranks + 1).clamp_(max=self.candidates.shape[1] - 1))


@dataclass
class MemberBlocks(Ranked):
    """The members of each row, counted by blocks: for long rows.

    Takes 2 bytes a candidate, 32 a block and 2 W a slot.

    Attributes:
        words: (B, 2M, W / 8) int64, a byte a candidate, 1 for a member: the blocks of the
            positives, then those of the negatives.
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
        return cls(words, count_blocks(words).cumsum(1))

    @property
    def positives(self) -> Tensor:  # type: ignore[override]
        """(B, 1) int64, P."""
        return self.ends.narrow(1, self.ends.shape[1] // 2 - 1, 1)

    @property
    def total(self) -> Tensor:  # type: ignore[override]
        """(B, 1) int64, P + Q."""
        return self.ends.narrow(1, -1, 1)

    def find(self, ranks: Tensor) -> Tensor:
        """See :meth:`Ranked.find`."""
        num_blocks, width = self.ends.shape[1], 8 * self.words.shape[2]
        block = torch.searchsorted(self.ends, ranks, right=True).clamp_(max=num_blocks - 1)
        words = self.words.gather(1, block.unsqueeze(2).expand(-1, -1, width // 8))
        running = words.view(torch.uint8).cumsum(2, dtype=torch.uint8)
        # Negative: counted back from the end of the block. In uint8 both wrap around alike.
        rank = (ranks - self.ends.gather(1, block)).to(torch.uint8).unsqueeze(2)
        rank.add_(running.narrow(2, -1, 1))
        place = torch.searchsorted(running, rank, right=True).squeeze(2)
        return place.add_(block.remainder_(num_blocks // 2), alpha=width)

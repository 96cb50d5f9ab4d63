"""Which candidate has a rank: counts of blocks, searched; then one block, searched.

B rows, N candidates, W candidates a block, M = ceil(N / W) blocks a class, K slots. A row's
blocks are those of its positives, then those of its negatives, so that one search serves both.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..request import IGNORE

_BYTES = 8  # candidates in an int64 word of a bool row
# Multiplying by this adds the eight bytes of a word into its highest byte, and leaves their
# running sums in the others. The sums stay below 128, so that no sign bit is touched.
_ADD_BYTES = 0x0101010101010101
WIDE_BLOCK = 64


class Blocks(NamedTuple):
    """Membership and counts of both classes, block by block.

    Attributes:
        members: (B, 2M, W/8) int64, eight candidates a word, a byte of 1 for each member; or
            None where W = 1.
        ends: (B, 2M) int64, how many members stand in a row up to the end of each block.
    """

    members: Tensor | None
    ends: Tensor

    @property
    def counts(self) -> Tensor:
        """(2, B) int64: the positives and the negatives of each row."""
        positives = self.ends[:, self.ends.shape[1] // 2 - 1]
        return torch.stack([positives, self.ends[:, -1] - positives])


def block_width(num_candidates: int, num_samples: int) -> int:
    """W for rows of N candidates and K slots: 64 where a row is long against its slots, else 1.

    A wide block saves 15 bytes of running sums a candidate and costs 8 words a slot.
    """
    return WIDE_BLOCK if num_candidates >= 8 * num_samples else 1


def count_blocks(labels: Tensor, background: int | None, width: int) -> Blocks:
    """Count the positives and negatives of every block.

    Args:
        labels: (B, N) integer or bool, N >= 1.
        background: the label of a negative; None where no label can be one.
        width: W, 1 or a multiple of 8 below 128.
    """
    member = _membership(labels, background, width)
    if width == 1:
        return Blocks(None, member.cumsum(1))
    words = member.view(torch.int64).view(len(labels), -1, width // _BYTES)
    return Blocks(words, _add_bytes(words.sum(-1)).cumsum(1))


def select_by_rank(blocks: Blocks, ranks: Tensor) -> Tensor:
    """The candidates that have the given ranks.

    Args:
        blocks: of (B, N) labels.
        ranks: (B, K) int64, places in a row's positives followed by its negatives.

    Returns:
        (B, K) int64 indices into the row; meaningless where a rank has no member.
    """
    num_blocks = blocks.ends.shape[1]
    block = torch.searchsorted(blocks.ends, ranks, right=True).clamp(max=num_blocks - 1)
    if blocks.members is None:
        return block % (num_blocks // 2)
    words = _rows(blocks.members, block)
    word, byte = _search_block(words, _rank_in_block(blocks.ends, ranks, block))
    in_class = block % (num_blocks // 2)
    return (in_class * words.shape[-1] + word) * _BYTES + byte


def _membership(labels: Tensor, background: int | None, width: int) -> Tensor:
    """(B, 2 M W) bool: a row's positives, then its negatives, each padded to whole blocks."""
    rows, n = labels.shape
    padded = -(-n // width) * width
    member = torch.empty((rows, 2, padded), dtype=torch.bool, device=labels.device)
    member[:, :, n:].zero_()
    positive, negative = member[:, 0, :n], member[:, 1, :n]
    if labels.element_size() == 1:
        # A comparison that answers in the type of its operands takes a tenth of the time.
        labels = labels.view(torch.uint8) if labels.dtype == torch.bool else labels
        positive, negative = positive.view(labels.dtype), negative.view(labels.dtype)
    torch.ne(labels, IGNORE, out=positive)
    if background is None:
        negative.zero_()
    else:
        torch.eq(labels, background, out=negative)
        torch.gt(positive, negative, out=positive)
    return member.view(rows, -1)


def _rows(members: Tensor, block: Tensor) -> Tensor:
    """(B, K, W/8): the words of one block a slot."""
    rows, num_blocks, words = members.shape
    first = torch.arange(rows, device=block.device)[:, None] * num_blocks
    chosen = members.view(-1, words).index_select(0, (block + first).view(-1))
    return chosen.view(*block.shape, words)


def _rank_in_block(ends: Tensor, ranks: Tensor, block: Tensor) -> Tensor:
    """(B, K): how many members of the block come before the one that has the rank."""
    before = ends.gather(1, (block - 1).clamp(min=0))
    return ranks - torch.where(block > 0, before, 0)


def _search_block(words: Tensor, rank: Tensor) -> tuple[Tensor, Tensor]:
    """Word and byte, both (B, K), of the member with that rank in (B, K, W/8) words."""
    counts = _add_bytes(words)
    ends = counts.cumsum(-1)
    word = (ends <= rank[..., None]).sum(-1, keepdim=True).clamp(max=words.shape[-1] - 1)
    chosen = words.gather(-1, word)
    rank = rank[..., None] - (ends - counts).gather(-1, word)
    running = (chosen * _ADD_BYTES).view(torch.uint8)  # little-endian: byte j sums bytes 0 .. j
    byte = (running <= rank).sum(-1)
    return word.squeeze(-1), byte


def _add_bytes(words: Tensor) -> Tensor:
    return (words * _ADD_BYTES) >> 56

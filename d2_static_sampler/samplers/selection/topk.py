"""Selection by random keys and top-k, as other samplers do it.

B rows, N candidates, K slots. It draws N random keys a row where ranks draw 2 K words, in less
than half of the operations. Exact up to ties of keys, which have 31 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..request import SampleRequest
from .planes import member_bytes

_KEY_BITS = 31
_MAX_KEY = (1 << _KEY_BITS) - 1


@dataclass
class MemberKeys:
    """Which candidates are members, for a draw by random keys.

    Attributes:
        member: (B, 2N) int8, 1 at the positives of a row, then 1 at its negatives.
    """

    member: Tensor

    words_batch_dim = 0

    @staticmethod
    def words_shape(
        rows: tuple[int, ...], num_candidates: int, num_samples: int
    ) -> tuple[int, ...]:
        """The shape of the random input: a key for each candidate."""
        return (*rows, num_candidates)

    @staticmethod
    def draw_words(
        shape: tuple[int, ...], *, device: torch.device, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draw keys of ``shape``, int32 and above 0."""
        return torch.randint(
            1, _MAX_KEY, shape, dtype=torch.int32, device=device, generator=generator
        )

    @classmethod
    def of(cls, labels: Tensor, background: int | None) -> MemberKeys:
        """Tell the classes of (B, N) labels apart, N >= 1."""
        return cls(member_bytes(labels, background).view(torch.int8))

    def take(self, words: Tensor, request: SampleRequest) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See :meth:`.members.Ranked.take`; ``words`` are keys, or int64 words that hold them."""
        if words.dtype == torch.int64:
            words = (words >> _KEY_BITS).bitwise_and_(_MAX_KEY).clamp_(min=1).to(torch.int32)
        (rows, n), k = words.shape, request.num_samples
        member = self.member.view(rows, 2, n)
        positive, negative = member.unbind(1)
        # One row for both classes: positives above 0, negatives below, ignored candidates at 0.
        key = words * (positive - negative)
        highest = key.topk(min(k if request.fill else request.quota, n), dim=1).indices
        lowest = key.topk(min(k, n), dim=1, largest=False).indices

        # What is valid follows from the counts, whatever keys have been drawn.
        counts = member.sum(2, keepdim=True, dtype=torch.int32)  # int64 takes thrice as long
        num_pos, num_neg = request.split(*counts.long().unbind(1))
        slot = torch.arange(k, device=key.device)
        column = torch.where(slot < num_pos, slot, slot + (highest.shape[1] - num_pos))
        picks = torch.cat([highest, lowest], 1)
        index = picks.gather(1, column.clamp_(max=picks.shape[1] - 1))
        return index, slot >= num_pos + num_neg, num_pos, num_neg

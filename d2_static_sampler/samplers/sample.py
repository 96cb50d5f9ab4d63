"""The result of sampling: indices of a fixed shape, and how many of them count."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LabelSample:
    """K slots a row: the positives first, then the negatives, then padding.

    For one row of labels, without a batch dimension, the shapes are (K,), () and ().

    Attributes:
        index: (B, K) int64, candidates of the row; a padding slot holds an in-range index
            (0), which is gatherable unless the row has no candidate at all.
        num_pos: (B,) int64, how many leading slots are positives.
        num_neg: (B,) int64, how many slots after them are negatives.
    """

    index: Tensor
    num_pos: Tensor
    num_neg: Tensor

    @property
    def is_pos(self) -> Tensor:
        """(B, K) bool: the slots that hold a positive."""
        return self._slot < self.num_pos[..., None]

    @property
    def is_neg(self) -> Tensor:
        """(B, K) bool: the slots that hold a negative."""
        return self.is_valid & ~self.is_pos

    @property
    def is_valid(self) -> Tensor:
        """(B, K) bool: the slots that are not padding."""
        return self._slot < (self.num_pos + self.num_neg)[..., None]

    def row(self, i: int) -> LabelSample:
        """The sample of row ``i``, without the batch dimension."""
        return LabelSample(self.index[i], self.num_pos[i], self.num_neg[i])

    @property
    def _slot(self) -> Tensor:
        return torch.arange(self.index.shape[-1], device=self.index.device)

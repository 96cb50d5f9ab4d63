"""Which candidates are positive and which are negative: a byte each, eight in an int64 word.

B rows, N candidates, W candidates a block, M = ceil(N / W) blocks a class.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..operations import operation
from ..request import IGNORE

BYTES = 8  # candidates in a word
BLOCK_WIDTH = 96
# Multiplying by this adds the eight bytes of a word into its highest byte. A sum stays below
# 128, so that no sign bit is touched.
_ADD_BYTES = 0x0101010101010101


def plane_words(labels: Tensor, background: int | None, width: int = BLOCK_WIDTH) -> Tensor:
    """Both classes' planes, a byte of 0 or 1 a candidate, each padded with 0 to whole blocks.

    Args:
        labels: (B, N) integer or bool, N >= 1; -1 = ignore.
        background: the label of a negative; None where no label can be one.
        width: W, a multiple of 8 below 128.

    Returns:
        (B, 2M, W / 8) int64: the blocks of the positives, then those of the negatives.
    """
    if torch.compiler.is_compiling():
        return _plane_words(labels, background, width)
    return _write_planes(labels, background, width)


@operation("plane_words", schema="(Tensor labels, int? background, int width) -> Tensor")
def _plane_words(labels: Tensor, background: int | None, width: int) -> Tensor:
    """For graphs of a caller's: Inductor's code for this takes three times as long on a CPU."""
    return _write_planes(labels, background, width)


@_plane_words.register_fake
def _(labels: Tensor, background: int | None, width: int) -> Tensor:
    return labels.new_empty(_words_shape(labels, width), dtype=torch.int64)


def count_blocks(words: Tensor) -> Tensor:
    """(B, 2M) int64: how many candidates of its class each block has."""
    # Eight candidates an addition: the bytes of a sum hold up to W / 8 each.
    return words.sum(2).mul_(_ADD_BYTES).bitwise_right_shift_(56)


def member_bytes(labels: Tensor, background: int | None) -> Tensor:
    """(B, 2N) bytes of 0 or 1: which candidates are positive, then which are negative.

    Arguments as for :func:`plane_words`; the memory is new.
    """
    rows, n = labels.shape
    if torch.compiler.is_compiling():
        padded = _plane_words(labels, background, BYTES).view(torch.int8).view(rows, 2, -1)
        return padded.narrow(2, 0, n).reshape(rows, 2 * n)
    member = labels.new_empty((rows, 2 * n), dtype=_byte_type(labels))
    positive, negative = member.narrow(1, 0, n), member.narrow(1, n, n)
    _write_membership(positive, negative, labels, background)
    return member


def _byte_type(labels: Tensor) -> torch.dtype:
    # A comparison that answers in the type of its operands takes a tenth of the time.
    if labels.dtype == torch.bool:
        return torch.uint8
    return labels.dtype if labels.element_size() == 1 else torch.bool


def _write_planes(labels: Tensor, background: int | None, width: int) -> Tensor:
    rows, n = labels.shape
    words = labels.new_empty(_words_shape(labels, width), dtype=torch.int64)
    planes = words.view(_byte_type(labels)).view(rows, 2, -1)
    if planes.shape[2] > n:
        planes.narrow(2, n, planes.shape[2] - n).zero_()
    positive, negative = planes.narrow(2, 0, n).unbind(1)
    _write_membership(positive, negative, labels, background)
    return words


def _write_membership(
    positive: Tensor, negative: Tensor, labels: Tensor, background: int | None
) -> None:
    """Write which of the (B, N) labels are of which class, in two tensors of their byte type."""
    labels = labels.view(torch.uint8) if labels.dtype == torch.bool else labels
    torch.ne(labels, IGNORE, out=positive)
    if background is None:
        negative.zero_()
    else:
        torch.eq(labels, background, out=negative)
        torch.gt(positive, negative, out=positive)


def _words_shape(labels: Tensor, width: int) -> tuple[int, int, int]:
    rows, n = labels.shape
    return rows, 2 * -(-n // width), width // BYTES

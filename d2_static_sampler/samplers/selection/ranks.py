"""Which ranks to take: an ordered draw without replacement, every step at once.

B rows, K slots, P positives and Q negatives of a row. Both classes of a row stand in one
virtual array: its positives at places 0 .. P-1, its negatives at P .. P+Q-1, each in the order
of their indices. A Fisher-Yates shuffle of either class swaps, in step i, the content of the
step's own place with that of a random later place; what it takes from there is the pick.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pick_ranks(words: Tensor, counts: Tensor, quota: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pick the places of a row's sample, positives first.

    For the same words this is exactly what a sequential shuffle picks, so that uniform words
    make every ordered sample equally likely (up to the modulo's ``(P+Q) * 2**-62``).

    Args:
        words: (2, B, K) int64, non-negative; row 0 drives the positives, row 1 the negatives.
        counts: (2, B) int64, P and Q of each row.
        quota: the most positives a row may take.

    Returns:
        (B, K) int64 places in 0 .. P+Q-1 (0 in padding slots), (B,) int64 number of positives
        picked, (B,) int64 number of negatives picked.
    """
    num_samples = words.shape[-1]
    positives, negatives = counts
    num_pos = positives.clamp(max=quota)
    num_neg = torch.minimum(negatives, num_samples - num_pos)

    slot = torch.arange(num_samples, device=words.device)
    first_neg = num_pos[:, None]
    is_pos = slot < first_neg
    is_valid = slot < (num_pos + num_neg)[:, None]
    neg_words = words[1].gather(1, (slot - first_neg).clamp(min=0))
    word = torch.where(is_pos, words[0], neg_words)
    total = (positives + negatives)[:, None]
    # A padding slot stands behind everything, alone, and can only swap with itself.
    negative_place = torch.where(is_valid, slot + (positives[:, None] - first_neg), slot + total)
    place = torch.where(is_pos, slot, negative_place)
    end = torch.where(is_pos, positives[:, None], total)
    target = place + word % (end - place).clamp(min=1)

    picks = _shuffle(place, target)
    return torch.where(is_valid, picks, 0), num_pos, num_neg


def _shuffle(place: Tensor, target: Tensor) -> Tensor:
    """What each step of the shuffle takes, (B, K): step i swaps ``place[i]`` and ``target[i]``.

    A target is its step's own place or a later one, so that no step aims behind itself.
    """
    step = torch.arange(place.shape[-1], device=place.device).expand_as(place)
    stays = target == place
    previous, last_at_place = _latest_writers(place, target, step)
    # The last to aim at a step's place is the step itself where it stays.
    wrote_place = torch.where(stays, previous, last_at_place)
    found = place.gather(1, _roots(wrote_place))
    # The previous step with this target left there what it found at its own place.
    untouched = torch.where(stays, found, target)
    return torch.where(previous == step, untouched, found.gather(1, previous))


def _latest_writers(place: Tensor, target: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """For each step, the latest earlier one with its target, and the latest to aim at its place.

    Both (B, K); a step points to itself where there is none.
    """
    ordered, order = torch.sort(target, dim=1, stable=True)
    repeats = ordered[:, 1:] == ordered[:, :-1]
    before = torch.where(repeats, order[:, :-1], order[:, 1:])
    before = torch.cat([order[:, :1], before], dim=1)
    previous = torch.empty_like(order).scatter_(1, order, before)

    at = (torch.searchsorted(ordered, place, right=True) - 1).clamp(min=0)
    aims_here = ordered.gather(1, at) == place
    return previous, torch.where(aims_here, order.gather(1, at), step)


def _roots(pointer: Tensor) -> Tensor:
    """Follow (B, K) pointers to earlier steps to their ends, by pointer doubling.

    What stands at a step's place when the step begins was put there by the latest writer, which
    had found it at its own place: so it is what stood at the place of the root at first.
    """
    for _ in range((pointer.shape[-1] - 1).bit_length()):
        pointer = pointer.gather(1, pointer)
    return pointer

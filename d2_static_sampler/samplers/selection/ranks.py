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
    place = torch.where(is_pos, slot, slot + (positives - num_pos)[:, None])
    end = torch.where(is_pos, positives[:, None], (positives + negatives)[:, None])

    picks = _shuffle(word, place, end, is_valid)
    return torch.where(is_valid, picks, 0), num_pos, num_neg


def _shuffle(word: Tensor, place: Tensor, end: Tensor, is_valid: Tensor) -> Tensor:
    """What each step of the shuffle takes; every argument (B, K), a column a step.

    Step i swaps the contents of ``place[i]`` and ``target[i]``, drawn from place[i] .. end[i]-1.
    """
    step = torch.arange(word.shape[-1], device=word.device)
    nowhere = -1 - step  # equals no place and no other step's
    target = torch.where(is_valid, place + word % (end - place).clamp(min=1), nowhere)
    place = torch.where(is_valid, place, nowhere)

    previous, wrote_place = _latest_writers(target, place, step)
    found = _content_at_start(place, wrote_place, step)
    # The previous step with this target left there what it found at its own place.
    left_by_previous = found.gather(1, previous.clamp(min=0))
    untouched = torch.where(target == place, found, target)
    return torch.where(previous >= 0, left_by_previous, untouched)


def _latest_writers(target: Tensor, place: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """For each step, the latest earlier steps that aimed at its target and at its place.

    Returns two (B, K) int64 tensors of steps, -1 where there is none.
    """
    ordered, order = torch.sort(target, dim=1, stable=True)
    repeats = ordered[:, 1:] == ordered[:, :-1]
    before = torch.where(repeats, order[:, :-1], -1)
    before = torch.nn.functional.pad(before, (1, 0), value=-1)
    previous = torch.empty_like(order).scatter_(1, order, before)

    at = (torch.searchsorted(ordered, place, right=True) - 1).clamp(min=0)
    last = torch.where(ordered.gather(1, at) == place, order.gather(1, at), -1)
    # No step aims at a place before its own, so the last to aim here is this step or earlier.
    return previous, torch.where(last == step, previous, last)


def _content_at_start(place: Tensor, wrote_place: Tensor, step: Tensor) -> Tensor:
    """What stands at a step's place when the step begins.

    The latest writer put there what it had found at its own place: pointers to earlier steps,
    followed to their roots by pointer doubling.
    """
    root = torch.where(wrote_place >= 0, wrote_place, step)
    for _ in range((place.shape[-1] - 1).bit_length()):
        root = root.gather(1, root)
    return place.gather(1, root)

"""Which ranks to take: an ordered draw without replacement, every step at once.

B rows, K slots, P positives and Q negatives of a row. Both classes of a row stand in one
virtual array: its positives at places 0 .. P-1, its negatives at P .. P+Q-1, each in the order
of their indices. A Fisher-Yates shuffle of either class swaps, in step i, the content of the
step's own place with that of a random later place; what it takes from there is the pick.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pick_ranks(words: Tensor, positives: Tensor, total: Tensor, num_pos: Tensor) -> Tensor:
    """Pick the places of a row's sample: ``num_pos`` positives, then negatives.

    For the same words this is exactly what a sequential shuffle picks, so that uniform words
    make every ordered sample equally likely (up to the modulo's ``(P+Q) * 2**-62``).

    Args:
        words: (2, B, K) int64, non-negative; row 0 drives the positives, row 1 the negatives.
        positives: (B, 1) int64, P.
        total: (B, 1) int64, P + Q.
        num_pos: (B, 1) int64, how many positives to pick, at most P and K.

    Returns:
        (B, K) int64 places; P + Q or more in the slots that no negative is left for.
    """
    touch = torch.arange(2 * words.shape[-1], device=words.device)
    slot = touch.narrow(0, 0, words.shape[-1])
    negative = slot - num_pos  # which negative a slot is; below 0 for a positive
    is_neg = negative >= 0
    # Beyond the last negative a slot stands alone behind everything, and swaps with itself.
    place = torch.where(is_neg, negative + positives, slot)
    room = (torch.where(is_neg, total, positives) - place).clamp_(min=1)
    pos_word, neg_words = words
    word = torch.where(is_neg, neg_words.gather(1, negative.clamp_(min=0)), pos_word)
    return _shuffle(place, word.remainder_(room).add_(place), touch)


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
    gap = (key - key.roll(1, dims=1)).clamp_(min=0)  # the first has nothing before it
    back = order.scatter(1, order, gap)
    # A gap of more touches than there were means another place. (masked_fill is four times as
    # slow here: its branches cannot be foretold.)
    back = back.mul_(back <= touch)
    wrote = (touch - back).bitwise_right_shift_(1).view(len(place), num_steps, 2)
    wrote_place, wrote_target = wrote.unbind(2)

    found = place.gather(1, _roots(wrote_place))
    # The last step with this target left there what it had found at its own place.
    is_first = back.view(len(place), num_steps, 2).select(2, 1) == 0
    return torch.where(is_first, target, found.gather(1, wrote_target))


def _roots(pointer: Tensor) -> Tensor:
    """Follow (B, K) pointers to earlier steps to their ends, by pointer doubling.

    What stands at a step's place when the step begins was put there by the latest writer, which
    had found it at its own place: so it is what stood at the place of the root at first.
    """
    for _ in range((pointer.shape[-1] - 1).bit_length()):
        pointer = pointer.gather(1, pointer)
    return pointer

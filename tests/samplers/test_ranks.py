"""pick_ranks is a Fisher-Yates shuffle: by every word there is, and by long random chains."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch

from d2_static_sampler.ops.sampling import pick_in_torch as pick_ranks


def shuffle(words: list[int], n: int, m: int) -> list[int]:
    """The sequential shuffle: m picks of 0 .. n-1."""
    places = list(range(n))
    for step in range(m):
        other = step + words[step] % (n - step)
        places[step], places[other] = places[other], places[step]
    return places[:m]


@pytest.mark.parametrize(
    ("n", "m", "k"), [(6, 3, 3), (6, 3, 5), (6, 4, 4), (5, 5, 5), (4, 2, 6), (8, 1, 3), (7, 6, 8)]
)
def test_every_ordered_sample_is_equally_likely(n, m, k):
    """All words that matter, each once: a bijection onto the ordered m-permutations."""
    choices = itertools.product(*(range(n - step) for step in range(m)))
    words = torch.tensor([[*choice, *[5] * (k - m)] for choice in choices])
    rows = len(words)
    assert rows == math.perm(n, m)

    positives, num_pos = torch.full((rows, 1), n), torch.full((rows, 1), m)
    ranks = pick_ranks(torch.stack([words, words]), positives, positives, num_pos)
    assert ranks[:, :m].tolist() == [shuffle(row, n, m) for row in words.tolist()]
    assert set(Counter(map(tuple, ranks[:, :m].tolist())).values()) == {1}


@pytest.mark.parametrize("k", [1, 2, 33, 256, 600])
def test_both_classes_follow_the_sequential_shuffle(k):
    for _ in range(50):
        n_pos, n_neg = torch.randint(0, 2 * k, (2,)).tolist()
        quota = int(torch.randint(0, k + 1, ()))
        words = torch.randint(1 << 62, (2, 1, k))
        m_pos = min(n_pos, quota)
        m_neg = min(n_neg, k - m_pos)
        counts = (torch.tensor([[count]]) for count in (n_pos, n_pos + n_neg, m_pos))
        ranks = pick_ranks(words, *counts)[0].tolist()
        negatives = shuffle(words[1, 0].tolist(), n_neg, m_neg)
        expected = shuffle(words[0, 0].tolist(), n_pos, m_pos) + [n_pos + r for r in negatives]
        assert ranks[: len(expected)] == expected
        assert all(rank >= n_pos + n_neg for rank in ranks[len(expected) :])


def test_longest_chain():
    """Every step aims at the last place: each pick hangs on all the steps before it."""
    k = 500
    words = torch.arange(k - 1, -1, -1).expand(2, 1, k)
    ranks = pick_ranks(words, *(torch.tensor([[k]]) for _ in range(3)))
    assert ranks[0].tolist() == shuffle(words[0, 0].tolist(), k, k)

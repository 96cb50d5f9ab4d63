"""pick_ranks is a Fisher-Yates shuffle: by every word there is, and by long random chains."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch

from d2_static_sampler.samplers.selection import pick_ranks


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

    counts = torch.tensor([[n] * rows, [0] * rows])
    ranks, num_pos, num_neg = pick_ranks(torch.stack([words, words]), counts, m)
    assert (num_pos == m).all()
    assert (num_neg == 0).all()
    assert ranks[:, :m].tolist() == [shuffle(row, n, m) for row in words.tolist()]
    assert set(Counter(map(tuple, ranks[:, :m].tolist())).values()) == {1}


@pytest.mark.parametrize("k", [1, 2, 33, 256, 600])
def test_both_classes_follow_the_sequential_shuffle(k):
    for _ in range(50):
        n_pos, n_neg = torch.randint(0, 2 * k, (2,)).tolist()
        quota = int(torch.randint(0, k + 1, ()))
        words = torch.randint(1 << 62, (2, 1, k))
        ranks, num_pos, num_neg = pick_ranks(words, torch.tensor([[n_pos], [n_neg]]), quota)
        m_pos, m_neg = min(n_pos, quota), min(n_neg, k - min(n_pos, quota))
        assert (int(num_pos), int(num_neg)) == (m_pos, m_neg)
        negatives = shuffle(words[1, 0].tolist(), n_neg, m_neg)
        expected = shuffle(words[0, 0].tolist(), n_pos, m_pos) + [n_pos + r for r in negatives]
        assert ranks[0].tolist() == expected + [0] * (k - len(expected))


def test_longest_chain():
    """Every step aims at the last place: each pick hangs on all the steps before it."""
    k = 500
    words = torch.arange(k - 1, -1, -1).expand(2, 1, k)
    ranks, _, _ = pick_ranks(words, torch.tensor([[k], [0]]), k)
    assert ranks[0].tolist() == shuffle(words[0, 0].tolist(), k, k)

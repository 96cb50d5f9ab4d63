"""Every ordered sample is equally likely: by every word there is, by chi-square, in every mode.

A statistical test here raises a false alarm with a chance below 1e-6; all seeds are fixed.
"""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from scipy.stats import chi2, chisquare
from torch import Tensor

from d2_static_sampler import build_label_sampler
from d2_static_sampler.samplers import LabelSampler

from ..helpers import STATIC_WAYS, sampler_by

FALSE_ALARM = 1e-6
MIXES = (
    (1, 0, 1, -1, 0, 0, 1),
    (0, 2, -1, 0, 0, -1, 0),
    (3, 1, 2, 1, 1),
    (0, 0, 0, 0),
    (-1, -1, 1),
    (-1, -1),
)
# Candidates of a row, the rest ignored: a table of the members serves short rows, blocks of them
# long ones.
LENGTHS = (0, 900)


def all_words(draws: list[tuple[int, int]], num_samples: int) -> Tensor:
    """(2, R, K) words of all R outcomes: step i of m draws out of n has n - i choices."""
    rooms = [range(n - step) for n, m in draws for step in range(m)]
    choices = torch.tensor(list(itertools.product(*rooms)), dtype=torch.int64)
    words = torch.full((2, len(choices), num_samples), 5)
    for row, part in zip(words, choices.split([m for _, m in draws], dim=1), strict=True):
        row[:, : part.shape[1]] = part
    return words


def check_every_outcome(
    sampler: LabelSampler, mix: tuple[int, ...], num_samples: int, fraction: float, length: int = 0
) -> None:
    """Among the samples of all words, each ordered sample there is occurs exactly once."""
    labels = torch.tensor(mix)
    labels = torch.cat([labels, labels.new_full((max(0, length - len(mix)),), -1)])
    positives, negatives = (labels > 0).nonzero().flatten(), (labels == 0).nonzero().flatten()
    num_pos = min(len(positives), int(num_samples * fraction))
    num_neg = min(len(negatives), num_samples - num_pos)
    words = all_words([(len(positives), num_pos), (len(negatives), num_neg)], num_samples)
    batch = labels.expand(words.shape[1], -1)
    asked = {"num_samples": num_samples, "positive_fraction": fraction, "bg_label": 0}
    index = sampler(batch, **asked, words=words).index[:, : num_pos + num_neg]

    first = itertools.permutations(positives.tolist(), num_pos)
    second = itertools.permutations(negatives.tolist(), num_neg)
    expected = sorted([*one, *two] for one, two in itertools.product(first, second))
    assert len(index) == math.perm(len(positives), num_pos) * math.perm(len(negatives), num_neg)
    assert sorted(index.tolist()) == expected


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("num_samples", [1, 3, 5])
@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("way", ["naive", *STATIC_WAYS])
def test_every_ordered_sample_is_equally_likely(way, length, mix, num_samples, fraction):
    check_every_outcome(sampler_by(way), mix, num_samples, fraction, length)


@pytest.mark.usefixtures("eager_graphs")
@pytest.mark.parametrize("length", LENGTHS)
def test_every_ordered_sample_is_equally_likely_compiled(length):
    """The first call for a number of samples settles the form of the members."""
    compiled = sampler_by("compiled")
    check_every_outcome(compiled, MIXES[0], 3, 0.5, length)
    for mix in MIXES:
        check_every_outcome(compiled, mix, 3, 0.5)
    assert not compiled.is_eager


# Size: candidates, positives, ignored, type, background, samples, fraction.
SIZES = {
    "RPN": (268_569, 60, 3_000, torch.int8, 0, 256, 0.5),
    "ROI": (2_000, 300, 200, torch.int64, 80, 512, 0.25),
}
ROWS = {
    ("RPN", "rank"): 4_000,
    ("RPN", "topk"): 640,
    ("ROI", "rank"): 4_000,
    ("ROI", "topk"): 2_000,
}
every_draw = pytest.mark.parametrize(
    ("size", "select", "member"), [(*case, member) for case in ROWS for member in ("pos", "neg")]
)


@functools.cache
def draw(size: str, select: str) -> dict[str, tuple[Tensor, int]]:
    """For each class the picks of all rows, (R, slots), as ranks in the class, and its members."""
    n, num_pos, ignored, dtype, bg, num_samples, fraction = SIZES[size]
    generator = torch.Generator().manual_seed(2024)
    labels = torch.tensor([1] * num_pos + [-1] * ignored + [bg] * (n - num_pos - ignored))
    labels = labels[torch.randperm(n, generator=generator)].to(dtype)
    sampler = build_label_sampler("static", select=select)
    asked = {"num_samples": num_samples, "positive_fraction": fraction, "bg_label": bg}
    batch = labels.expand(16, -1)
    calls = range(ROWS[size, select] // 16)
    index = torch.cat([sampler(batch, **asked, generator=generator).index for _ in calls])
    end = min(num_pos, int(num_samples * fraction))
    parts = {"pos": (labels == 1, index[:, :end]), "neg": (labels == bg, index[:, end:])}
    return {name: ((at.cumsum(0) - 1)[picks], int(at.sum())) for name, (at, picks) in parts.items()}


def p_of_places(ranks: Tensor, members: int, bins: int) -> float:
    """The p-value of (R, m) ranks of m different members, by bins of neighbours.

    A row's counts have the multinomial's covariance times (n - m) / (n - 1), since no member
    comes twice; for m = 1 that is the plain chi-square test.
    """
    size = (torch.arange(members) * bins // members).bincount(minlength=bins).double()
    found = (ranks.flatten() * bins // members).bincount(minlength=bins)
    statistic = chisquare(found.numpy(), (size / members * ranks.numel()).numpy()).statistic
    m = ranks.shape[1]
    return float(chi2.sf(statistic * (members - 1) / (members - m), bins - 1))


def p_of_pairs(first: Tensor, second: Tensor, members: int, groups: int) -> float:
    """The p-value of (R,) pairs of different members, by the groups that the two are of."""
    size = (torch.arange(members) * groups // members).bincount(minlength=groups).double()
    chance = (torch.outer(size, size) - size.diag()) / (members * (members - 1))
    cell = first * groups // members * groups + second * groups // members
    found = cell.bincount(minlength=groups**2)
    return float(chisquare(found.numpy(), (chance.flatten() * len(first)).numpy()).pvalue)


@every_draw
def test_every_candidate_is_equally_likely(size, select, member):
    """All slots of a class together, in bins of one or more candidates."""
    ranks, members = draw(size, select)[member]
    if ranks.shape[1] == members:
        assert torch.equal(ranks.sort(1).values, torch.arange(members).expand_as(ranks))
    else:
        assert p_of_places(ranks, members, min(members, 512)) > FALSE_ALARM


@every_draw
def test_in_every_slot_every_candidate_is_equally_likely(size, select, member):
    """One slot a row: the first, one in the middle, and the last."""
    ranks, members = draw(size, select)[member]
    for slot in (0, ranks.shape[1] // 2, -1):
        p = p_of_places(ranks[:, slot, None], members, min(members, len(ranks) // 20))
        assert p > FALSE_ALARM / 3


@every_draw
def test_every_pair_is_equally_likely(size, select, member):
    """Which groups two slots are of, and which of the two comes first in the labels."""
    ranks, members = draw(size, select)[member]
    for one, two in ((0, 1), (0, -1), (-2, -1)):
        first, second = ranks[:, one], ranks[:, two]
        assert p_of_pairs(first, second, members, 6) > FALSE_ALARM / 6
        rising = int((first < second).sum())
        assert chisquare([rising, len(ranks) - rising]).pvalue > FALSE_ALARM / 6


@pytest.mark.parametrize("select", ["rank", "topk"])
def test_every_order_of_all_positives_is_equally_likely(select):
    """Each of the 60 positives in each of their 60 slots.

    Rows are permutations: n / (n - 1) times a chi-square of (n - 1)**2 degrees of freedom.
    """
    ranks, n = draw("RPN", select)["pos"]
    cell = ranks * n + torch.arange(n)
    found = cell.flatten().bincount(minlength=n * n)
    assert chi2.sf(chisquare(found.numpy()).statistic * (n - 1) / n, (n - 1) ** 2) > FALSE_ALARM


def test_the_tests_see_words_of_too_few_bits():
    """Words below 2**19 reach 253,270 of 265,509 negatives twice as often as the others."""
    words = torch.randint(1 << 19, (2, 320, 256))
    asked = {"num_samples": 256, "positive_fraction": 0.0, "bg_label": 0, "words": words}
    labels = torch.zeros(265_509, dtype=torch.int8).expand(320, -1)
    index = build_label_sampler("static")(labels, **asked).index
    assert p_of_places(index, 265_509, 512) < FALSE_ALARM
    assert p_of_pairs(index[:, 0], index[:, 0].roll(1) // 2, 265_509, 6) < FALSE_ALARM

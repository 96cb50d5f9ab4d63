"""For any labels and any request: Detectron2's counts, and one sample from one input."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch
from detectron2.modeling.sampling import subsample_labels as oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from d2_static_sampler import build_label_sampler

from ..helpers import STATIC_WAYS, sampler_by

FRACTIONS = (0.0, 0.25, 0.29, 1 / 3, 0.5, 0.7, 1.0)
DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)
# Other labels stand between, before and behind, where a view has gaps.
VIEWS = {
    "plain": lambda labels: labels,
    "strided": lambda labels: torch.stack([labels, labels.flip(1)], 2).flatten(1)[:, ::2],
    "part": lambda labels: torch.cat([labels.flip(1), labels, labels.flip(1)], 1)[
        :, labels.shape[1] : 2 * labels.shape[1]
    ],
    "transposed": lambda labels: labels.t().contiguous().t(),
    "expanded": lambda labels: labels[:1].expand(len(labels), -1),
}
# Numbers of positives and of negatives: either short or missing, or both.
SHORT = ((40, 900), (900, 40), (40, 50), (3, 0), (0, 7))
ways = pytest.mark.parametrize("way", STATIC_WAYS)
some_examples = settings(deadline=None, derandomize=True, max_examples=150)


class Case(NamedTuple):
    """Labels, what is asked of them, and words for it."""

    labels: Tensor
    asked: dict[str, Any]
    words: Tensor


@st.composite
def cases(draw) -> Case:
    rows, n = draw(st.integers(1, 4)), draw(st.integers(0, 12) | st.integers(0, 3000))
    random = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))

    def with_share(share: float) -> Tensor:
        return torch.rand((rows, n), generator=random) < share

    is_pos = with_share(draw(st.sampled_from([0.0, 0.002, 0.1, 0.5, 1.0])))
    is_ignored = with_share(draw(st.sampled_from([0.0, 0.3, 0.9, 1.0])))
    labels = is_pos * torch.randint(1, 100, (rows, n), generator=random)
    # uint8 has 255 then, and bool True: whatever Detectron2 makes of it.
    labels = labels.masked_fill(is_ignored, -1).to(draw(st.sampled_from(DTYPES)))
    labels = VIEWS[draw(st.sampled_from(sorted(VIEWS)))](labels)

    k = draw(st.integers(0, 12) | st.integers(0, 600) | st.integers(3001, 3200))
    fraction = draw(st.sampled_from(FRACTIONS) | st.floats(0, 1))
    bg = draw(st.sampled_from([0, 1, 80]))
    words = torch.randint(1 << 62, (2, rows, k), generator=random)
    return Case(labels, {"num_samples": k, "positive_fraction": fraction, "bg_label": bg}, words)


def counts_of_detectron2(labels: Tensor, asked: dict[str, Any]) -> list[list[int]]:
    """For each row the number of positives and of negatives."""
    return [[len(part) for part in oracle(row, *asked.values())] for row in labels]


def counts(sample) -> list[list[int]]:
    return torch.stack([sample.num_pos, sample.num_neg], 1).tolist()


def rows_of(*mixes: tuple[int, int]) -> Tensor:
    """A row of 1,300 labels for each number of positives and of negatives; the rest ignored."""
    rows = [[1] * pos + [0] * neg + [-1] * (1300 - pos - neg) for pos, neg in mixes]
    order = torch.randperm(1300)
    return torch.tensor(rows, dtype=torch.int8)[:, order]


@pytest.mark.parametrize("way", ["naive", *STATIC_WAYS])
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_counts_are_detectron2s_for_every_number_of_samples(way, fraction):
    """Both classes abundant, either short or missing, both short, and no member at all."""
    labels = rows_of((650, 650), (650, 0), (0, 650), (0, 0), *SHORT)
    sampler = sampler_by(way)
    for num_samples, expected in enumerate(expected_counts(fraction)):
        asked = {"num_samples": num_samples, "positive_fraction": fraction, "bg_label": 0}
        assert counts(sampler(labels, **asked)) == expected, asked


@functools.cache
def expected_counts(fraction):
    """Detectron2's for 0 to 600 samples, which do not depend on the order of the labels."""
    labels = rows_of((650, 650), (650, 0), (0, 650), (0, 0), *SHORT)
    asked = {"positive_fraction": fraction, "bg_label": 0}
    return [counts_of_detectron2(labels, {"num_samples": k, **asked}) for k in range(601)]


@ways
@given(case=cases())
@some_examples
def test_counts_are_detectron2s_and_labels_stay(way, case):
    before = case.labels.clone()
    sample = sampler_by(way)(case.labels, **case.asked)
    assert torch.equal(case.labels, before)
    assert counts(sample) == counts_of_detectron2(case.labels, case.asked)
    assert sample.index.shape == (len(before), case.asked["num_samples"])
    assert sample.index.dtype == sample.num_pos.dtype == sample.num_neg.dtype == torch.int64


@ways
@given(case=cases())
@some_examples
def test_picks_are_of_their_class_and_distinct(way, case):
    """And padding is gatherable, unless there is nothing to gather."""
    sample = sampler_by(way)(case.labels, **case.asked)
    n = case.labels.shape[1]
    assert ((sample.index >= 0) & (sample.index < max(n, 1))).all()
    if n == 0:
        assert not sample.is_valid.any()
        return
    picked = case.labels.gather(1, sample.index)
    bg = case.asked["bg_label"]
    assert (picked[sample.is_neg] == bg).all()
    assert ((picked[sample.is_pos] != bg) & (picked[sample.is_pos] != -1)).all()
    times = torch.zeros(case.labels.shape, dtype=torch.int64)
    assert times.scatter_add_(1, sample.index, sample.is_valid.long()).max() <= 1


@ways
@given(case=cases())
@some_examples
def test_static_is_naive_for_equal_words(way, case):
    naive = build_label_sampler("naive")(case.labels, **case.asked, words=case.words)
    static = sampler_by(way)(case.labels, **case.asked, words=case.words)
    assert torch.equal(static.index, naive.index)
    assert counts(static) == counts(naive)


@ways
@given(case=cases())
@some_examples
def test_a_batch_is_its_rows_alone(way, case):
    """As (N,) labels and as a batch of one; neither other rows nor the view matter."""
    static = sampler_by(way)
    batch = static(case.labels, **case.asked, words=case.words)
    for i, labels in enumerate(case.labels.clone()):
        row = static(labels, **case.asked, words=case.words[:, i])
        one = static(labels[None], **case.asked, words=case.words[:, i : i + 1])
        assert torch.equal(row.index, batch.index[i])
        assert torch.equal(one.index, batch.index[i : i + 1])
        assert [int(row.num_pos), int(row.num_neg)] == counts(one)[0] == counts(batch)[i]


@ways
@given(case=cases())
@some_examples
def test_two_threads_give_the_sample_of_one(way, case):
    check_threads(way, case.labels, case.asked, case.words)


@ways
@pytest.mark.parametrize("shape", [(1, 268_569), (3, 40_000), (200, 1_000)])
def test_two_threads_give_the_sample_of_one_at_sizes_that_use_them(way, shape):
    labels = torch.randint(-1, 2, shape, dtype=torch.int8)
    words = torch.randint(1 << 62, (2, shape[0], 256))
    asked = {"num_samples": 256, "positive_fraction": 0.5, "bg_label": 0}
    check_threads(way, labels, asked, words)


def check_threads(way: str, labels: Tensor, asked: dict[str, Any], words: Tensor) -> None:
    samples = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        samples.append(sampler_by(way)(labels, **asked, words=words))
    torch.set_num_threads(1)
    one, two = samples
    assert torch.equal(one.index, two.index)
    assert counts(one) == counts(two)

"""select="topk": random keys and top-k, with the contract of selection by rank."""

from __future__ import annotations

import itertools
from collections import Counter
from math import perm

import pytest
import torch
from detectron2.modeling.sampling import subsample_labels as oracle
from torch import Tensor

from d2_static_sampler import build_label_sampler

ASKED = {"num_samples": 64, "positive_fraction": 0.5, "bg_label": 0}
LAST_WORD = (1 << 62) - 1
# Positives, negatives, ignored.
MIXES = {
    "both abundant": (500, 600, 200),
    "positives short": (3, 600, 0),
    "no positives": (0, 600, 50),
    "negatives short": (600, 3, 50),
    "no negatives": (600, 0, 50),
    "both short": (5, 4, 300),
    "fewer than slots": (5, 4, 0),
    "one candidate": (1, 0, 0),
    "all ignored": (0, 0, 300),
    "no candidates": (0, 0, 0),
}


@pytest.fixture(scope="module")
def static():
    return build_label_sampler("static", select="topk")


@pytest.fixture(scope="module")
def compiled():
    return build_label_sampler("compiled", select="topk")


def mixed(mix: str, rows: int = 3) -> Tensor:
    """(B, N) labels in an order of its own for each row; the positives are 1, 2 and 3."""
    pos, neg, ignored = MIXES[mix]
    labels = torch.tensor([1 + i % 3 for i in range(pos)] + [0] * neg + [-1] * ignored).long()
    return torch.stack([labels[torch.randperm(len(labels))] for _ in range(rows)])


def check(labels: Tensor, sample, asked: dict) -> None:
    """Counts as Detectron2's, picks of their class, none twice, padding in range."""
    shape = len(labels), asked["num_samples"]
    assert sample.index.shape == sample.is_valid.shape == shape
    assert sample.index.dtype == sample.num_pos.dtype == sample.num_neg.dtype == torch.int64
    assert ((sample.index >= 0) & (sample.index < max(labels.shape[1], 1))).all()
    for i, row in enumerate(labels):
        one, bg = sample.row(i), asked["bg_label"]
        expected = [len(part) for part in oracle(row, *asked.values())]
        assert [int(one.num_pos), int(one.num_neg)] == expected
        positives, negatives = row[one.index[one.is_pos]], row[one.index[one.is_neg]]
        assert ((positives != -1) & (positives != bg)).all()
        assert (negatives == bg).all()
        assert len(one.index[one.is_valid].unique()) == sum(expected)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("fraction", [0.0, 0.29, 0.5, 1.0])
@pytest.mark.parametrize("num_samples", [0, 1, 16, 100, 3000])
def test_counts_and_picks(static, mix, fraction, num_samples):
    labels = mixed(mix)
    before = labels.clone()
    asked = {"num_samples": num_samples, "positive_fraction": fraction, "bg_label": 0}
    check(labels, static(labels, **asked), asked)
    assert torch.equal(labels, before)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.uint8, torch.bool])
@pytest.mark.parametrize("bg", [0, 1, 100])
def test_label_types(static, dtype, bg):
    """uint8 has 255 instead of -1, and bool True: whatever Detectron2 makes of it."""
    labels = mixed("both abundant").to(dtype)
    asked = ASKED | {"bg_label": bg}
    check(labels, static(labels, **asked), asked)


def test_views(static):
    """Strided, expanded and transposed labels are sampled as their copies are."""
    labels = mixed("both abundant")
    for view in (labels[:, 1::2], labels[:1].expand(4, -1), labels.t().contiguous().t()):
        words = torch.randint(1 << 62, view.shape)
        sample = static(view, **ASKED, words=words)
        check(view, sample, ASKED)
        assert torch.equal(sample.index, static(view.clone(), **ASKED, words=words).index)


@pytest.mark.usefixtures("eager_graphs")
def test_compiled_is_static_for_equal_words(static, compiled):
    """At most three graphs for all sizes and batches."""
    before = compiled.num_graphs
    for rows in (3, 2, 1, 4):
        for mix in ("both abundant", "positives short", "both short", "all ignored"):
            labels = mixed(mix, rows)
            words = torch.randint(1 << 62, labels.shape)
            sample = compiled(labels, **ASKED, words=words)
            check(labels, sample, ASKED)
            assert torch.equal(sample.index, static(labels, **ASKED, words=words).index)
    assert not compiled.is_eager
    assert 1 <= compiled.num_graphs - before <= 3


@pytest.mark.usefixtures("eager_graphs")
def test_compiled_draws_keys_as_static_does(static, compiled):
    """Also where there are fewer candidates than slots."""
    for mix in ("fewer than slots", "both short"):
        labels, generator = mixed(mix), torch.Generator()
        drawn = [
            sampler(labels, **ASKED, generator=generator.manual_seed(5))
            for sampler in (static, compiled)
        ]
        check(labels, drawn[1], ASKED)
        assert torch.equal(drawn[0].index, drawn[1].index)
    assert not compiled.is_eager


@pytest.mark.parametrize("mix", MIXES)
def test_a_row_of_a_batch_is_the_row_alone(static, mix):
    labels = mixed(mix)
    words = torch.randint(1 << 62, labels.shape)
    assert static.words_shape(labels, 64) == tuple(words.shape)
    batch = static(labels, **ASKED, words=words)
    for i in range(len(labels)):
        row = static(labels[i], **ASKED, words=words[i])
        assert row.index.shape == (64,)
        assert row.num_pos.shape == row.num_neg.shape == ()
        assert torch.equal(row.index, batch.index[i])
        assert [int(row.num_pos), int(row.num_neg)] == [batch.num_pos[i], batch.num_neg[i]]


@pytest.mark.parametrize("word", [0, LAST_WORD])
@pytest.mark.parametrize("mix", MIXES)
def test_extreme_words(static, mix, word):
    """All keys tied, at their lowest and highest value."""
    labels = mixed(mix)
    check(labels, static(labels, **ASKED, words=torch.full(labels.shape, word)), ASKED)


def test_one_extreme_word_beats_or_loses_to_all_others(static):
    """Neither end of the words' range is taken for an ignored candidate, nor for another class."""
    labels = torch.tensor([-1, 1, 1, 1, 0, 0, 0, -1])
    words = torch.tensor([LAST_WORD, 0, LAST_WORD, 1 << 40, 0, LAST_WORD, 1 << 40, 0])
    asked = {"num_samples": 6, "positive_fraction": 0.5, "bg_label": 0}
    assert static(labels, **asked, words=words).index.tolist() == [2, 3, 1, 5, 6, 4]


@pytest.mark.parametrize(
    ("labels", "num_samples", "counts"),
    [((1, 0, 2, 0, -1, 0), 3, (1, 2)), ((1, 1, 1, 0, -1, 1), 4, (2, 1)), ((0, 1, 0), 5, (1, 2))],
)
def test_every_ordered_sample_is_equally_likely(static, labels, num_samples, counts):
    """Every order of different keys once: each ordered sample comes equally often."""
    keys = torch.tensor(list(itertools.permutations(range(1, len(labels) + 1))))
    asked = {"num_samples": num_samples, "positive_fraction": 0.5, "bg_label": 0}
    batch = torch.tensor(labels).expand(len(keys), -1)
    index = static(batch, **asked, words=keys << 31).index[:, : sum(counts)]
    found = Counter(map(tuple, index.tolist()))
    members = sum(label > 0 for label in labels), labels.count(0)
    samples = perm(members[0], counts[0]) * perm(members[1], counts[1])
    assert len(found) == samples
    assert set(found.values()) == {len(keys) // samples}
    for sample in found:
        assert [labels[pick] > 0 for pick in sample] == [True] * counts[0] + [False] * counts[1]
        assert all(labels[pick] == 0 for pick in sample[counts[0] :])


def test_generator_is_used_and_advances(static):
    labels = mixed("both abundant")
    generator = torch.Generator().manual_seed(3)
    first, second = (static(labels, **ASKED, generator=generator).index for _ in range(2))
    again = static(labels, **ASKED, generator=torch.Generator().manual_seed(3)).index
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_runs_without_data(static):
    """On the meta device: no shape depends on a value."""
    labels = torch.empty((2, 5_000), dtype=torch.int8, device="meta")
    words = torch.empty((2, 5_000), dtype=torch.int64, device="meta")
    for sample in (static(labels, **ASKED), static(labels, **ASKED, words=words)):
        assert sample.index.shape == (2, 64)
        assert sample.index.device.type == sample.num_pos.device.type == "meta"


@pytest.mark.parametrize("n", [50, 5_000])
def test_in_a_graph_of_the_callers(static, n):
    """In one graph, without a break."""
    labels = torch.randint(-1, 2, (3, n))
    words = torch.randint(1 << 62, (3, n))
    whole = torch.compile(static, backend="eager", fullgraph=True)
    sample = whole(labels, **ASKED, words=words)
    assert torch.equal(sample.index, static(labels, **ASKED, words=words).index)


@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 64), (9,)])
def test_wrong_words(static, shape):
    labels = torch.zeros(3, 9, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"\(3, 9\)") as error:
        static(labels, **ASKED, words=torch.zeros(shape, dtype=torch.int64))
    assert str(shape) in str(error.value)


@pytest.mark.parametrize("impl", ["static", "compiled"])
def test_unknown_selection(impl):
    with pytest.raises(ValueError, match=r"'best'.*auto, rank, topk"):
        build_label_sampler(impl, select="best")

"""Every sampler keeps the contract that Detectron2's subsample_labels sets."""

from __future__ import annotations

import pytest
import torch
from detectron2.modeling.sampling import subsample_labels as oracle

from d2_static_sampler import build_label_sampler, subsample_labels

from ..helpers import STATIC_WAYS, WAYS, sampler_by

# Graphs as they are: tests/samplers/test_compiled.py has them compiled.
pytestmark = pytest.mark.usefixtures("eager_graphs")

FRACTIONS = (0.0, 0.25, 0.29, 1 / 3, 0.5, 0.7, 1.0)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


@pytest.fixture(scope="module", params=WAYS)
def sampler(request):
    return sampler_by(request.param)


def random_labels(rows: int, n: int, *, ignored: float = 0.3, dtype=torch.int64) -> torch.Tensor:
    labels = torch.randint(0, 4, (rows, n))
    return torch.where(torch.rand(rows, n) < ignored, -1, labels).to(dtype)


def check_row(labels: torch.Tensor, sample, num_samples: int, fraction: float, bg: int) -> None:
    """Counts as Detectron2's, picks of the right class, none twice, padding in range."""
    expected = oracle(labels, num_samples, fraction, bg)
    assert (int(sample.num_pos), int(sample.num_neg)) == tuple(len(part) for part in expected)
    positives, negatives = sample.index[sample.is_pos], sample.index[sample.is_neg]
    assert ((labels[positives] != -1) & (labels[positives] != bg)).all()
    assert (labels[negatives] == bg).all()
    valid = sample.index[sample.is_valid]
    assert len(valid.unique()) == len(valid)
    assert torch.equal(valid, torch.cat([positives, negatives]))
    assert ((sample.index >= 0) & (sample.index < max(len(labels), 1))).all()


@pytest.mark.parametrize(
    ("num_pos", "num_neg", "num_samples", "fraction", "expected"),
    [(15, 1, 16, 0.25, (4, 1)), (500, 500, 100, 0.29, (28, 72)), (0, 9, 4, 0.5, (0, 4))],
)
def test_counts_are_pythons(sampler, num_pos, num_neg, num_samples, fraction, expected):
    labels = torch.tensor([1] * num_pos + [0] * num_neg)
    sample = sampler(labels, num_samples=num_samples, positive_fraction=fraction, bg_label=0)
    assert (int(sample.num_pos), int(sample.num_neg)) == expected


@pytest.mark.parametrize("way", ["naive", *STATIC_WAYS])
@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (2, 37), (3, 600), (2, 9000)])
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_batches(way, shape, fraction):
    labels = random_labels(*shape)
    before = labels.clone()
    sampler = sampler_by(way)
    for num_samples in (0, 1, 7, 256):
        sample = sampler(labels, num_samples=num_samples, positive_fraction=fraction, bg_label=0)
        assert sample.index.shape == (shape[0], num_samples)
        assert sample.index.dtype == sample.num_pos.dtype == sample.num_neg.dtype == torch.int64
        for i, row in enumerate(labels):
            check_row(row, sample.row(i), num_samples, fraction, 0)
    assert torch.equal(labels, before)


@pytest.mark.parametrize("dtype", [*INTEGERS, torch.bool])
@pytest.mark.parametrize("n", [50, 5000])
@pytest.mark.parametrize("way", STATIC_WAYS)
def test_label_types(way, dtype, n):
    labels = torch.randint(0, 3, (2, n)).to(dtype)
    if dtype in (torch.int8, torch.int64):
        labels[:, ::3] = -1
    if dtype == torch.uint8:
        labels[:, ::3] = 255  # as Detectron2 treats it, whatever that is
    sampler = sampler_by(way)
    sample = sampler(labels, num_samples=64, positive_fraction=0.5, bg_label=0)
    for i, row in enumerate(labels):
        check_row(row, sample.row(i), 64, 0.5, 0)


@pytest.mark.parametrize(
    "view",
    [
        lambda labels: labels[:, ::2],
        lambda labels: labels.t().contiguous().t(),
        lambda labels: labels[:1].expand(3, -1),
        lambda labels: labels[:, 5:-3],
    ],
)
@pytest.mark.parametrize("way", STATIC_WAYS)
def test_strides(way, view):
    labels = view(random_labels(4, 4000, dtype=torch.int8))
    sample = sampler_by(way)(labels, num_samples=32, positive_fraction=0.25, bg_label=0)
    for i, row in enumerate(labels):
        check_row(row, sample.row(i), 32, 0.25, 0)


def test_row_of_a_batch_is_the_sample_of_the_row(sampler):
    labels, words = random_labels(3, 200), torch.randint(1 << 62, (2, 3, 64))
    asked = {"num_samples": 64, "positive_fraction": 0.5, "bg_label": 0}
    batch = sampler(labels, **asked, words=words)
    for i in range(3):
        row = sampler(labels[i], **asked, words=words[:, i])
        assert row.index.shape == (64,)
        assert row.num_pos.shape == row.num_neg.shape == ()
        assert torch.equal(row.index, batch.index[i])


def test_ignored_is_never_picked(sampler):
    """60 % ignored, 1,000 draws."""
    labels = random_labels(1000, 100, ignored=0.6, dtype=torch.int8).clamp(max=1)
    sample = sampler(labels, num_samples=32, positive_fraction=0.5, bg_label=0)
    picked = labels.gather(1, sample.index)
    assert (picked[sample.is_valid] != -1).all()
    assert (picked[sample.is_pos] == 1).all()
    assert (picked[sample.is_neg] == 0).all()


def test_background_may_change_between_calls(sampler):
    labels = torch.tensor([0, 79, 80, -1, 0, 80])
    for bg in (0, 80, 0, 1):
        sample = sampler(labels, num_samples=16, positive_fraction=0.5, bg_label=bg)
        check_row(labels, sample, 16, 0.5, bg)


@pytest.mark.parametrize("n", [0, 1, 4])
def test_fewer_candidates_than_slots(sampler, n):
    many = torch.zeros(5000, dtype=torch.int64)
    sampler(many, num_samples=256, positive_fraction=0.5, bg_label=0)
    labels = torch.tensor([1, 0, -1, 0])[:n]
    sample = sampler(labels, num_samples=256, positive_fraction=0.5, bg_label=0)
    check_row(labels, sample, 256, 0.5, 0)


@pytest.mark.parametrize("num_pos", [0, 2])
def test_padding_is_masked_by_count(sampler, num_pos):
    labels = torch.full((300,), -1)
    labels[7 : 7 + num_pos] = 1
    sample = sampler(labels, num_samples=256, positive_fraction=0.5, bg_label=0)
    assert sample.is_pos.sum() == num_pos
    assert not sample.is_neg.any()
    assert torch.equal(sample.is_valid, torch.arange(256) < num_pos)
    assert (sample.index < 300).all()


@pytest.mark.parametrize("bg", [300, -200, 1 << 40])
def test_background_that_the_type_cannot_hold(sampler, bg):
    """Detectron2 would wrap 300 to 44; here there is no background then."""
    labels = torch.tensor([44, 1, -1, 44], dtype=torch.int8)
    sample = sampler(labels, num_samples=16, positive_fraction=0.5, bg_label=bg)
    assert (int(sample.num_pos), int(sample.num_neg)) == (3, 0)


@pytest.mark.parametrize("word", [0, (1 << 62) - 1])
def test_extreme_words(sampler, word):
    labels = random_labels(2, 300)
    words = torch.full((2, 2, 64), word)
    sample = sampler(labels, num_samples=64, positive_fraction=0.5, bg_label=0, words=words)
    for i, row in enumerate(labels):
        check_row(row, sample.row(i), 64, 0.5, 0)


def test_runs_without_data():
    labels = torch.empty((2, 5000), dtype=torch.int8, device="meta")
    words = torch.empty((2, 2, 64), dtype=torch.int64, device="meta")
    sample = build_label_sampler("static")(
        labels, num_samples=64, positive_fraction=0.5, bg_label=0, words=words
    )
    assert sample.index.shape == (2, 64)


def test_generator_is_used_and_advances(sampler):
    labels = random_labels(2, 500)
    asked = {"num_samples": 64, "positive_fraction": 0.5, "bg_label": 0}
    generator = torch.Generator().manual_seed(3)
    first = sampler(labels, **asked, generator=generator)
    second = sampler(labels, **asked, generator=generator)
    again = sampler(labels, **asked, generator=torch.Generator().manual_seed(3))
    assert torch.equal(first.index, again.index)
    assert not torch.equal(first.index, second.index)


@pytest.mark.parametrize(
    ("error", "changed", "message"),
    [
        (TypeError, {"labels": torch.zeros(3)}, "float32"),
        (ValueError, {"labels": torch.zeros((1, 1, 1), dtype=torch.int64)}, r"\(1, 1, 1\)"),
        (ValueError, {"num_samples": -1}, "-1"),
        (ValueError, {"positive_fraction": 1.5}, "1.5"),
        (ValueError, {"positive_fraction": float("nan")}, "nan"),
        (ValueError, {"bg_label": -1}, "bg_label"),
        (ValueError, {"words": torch.zeros((2, 3), dtype=torch.int32)}, "int32"),
        (ValueError, {"words": torch.zeros((2, 9), dtype=torch.int64)}, r"\(2, 9\)"),
        (ValueError, {"words": torch.zeros((2, 3), dtype=torch.int64, device="meta")}, "meta"),
        (TypeError, {"num_samples": 3.0}, "num_samples .* 3.0"),
        (TypeError, {"bg_label": 0.5}, "bg_label .* 0.5"),
        (TypeError, {"bg_label": None}, "bg_label .* None"),
    ],
)
def test_wrong_arguments(sampler, error, changed, message):
    arguments = {
        "labels": torch.tensor([0, 1, 1]),
        "num_samples": 3,
        "positive_fraction": 0.5,
        "bg_label": 0,
    } | changed
    with pytest.raises(error, match=message):
        sampler(arguments.pop("labels"), **arguments)


def test_unknown_name():
    with pytest.raises(ValueError, match=r"'fast'.*compiled, naive, static"):
        build_label_sampler("fast")


def test_subsample_labels_has_detectron2s_signature_and_counts():
    labels = random_labels(1, 3000)[0]
    for num_samples, fraction in ((256, 0.5), (512, 0.25), (0, 0.5), (5000, 1.0)):
        expected = oracle(labels, num_samples, fraction, 0)
        positives, negatives = subsample_labels(labels, num_samples, fraction, 0)
        assert [len(positives), len(negatives)] == [len(part) for part in expected]
        assert (labels[positives] > 0).all()
        assert (labels[negatives] == 0).all()

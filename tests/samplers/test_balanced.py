"""sample_balanced: counts, picks, gradients, random order, and the compiled forms."""

from __future__ import annotations

import itertools
from collections import Counter
from math import comb, factorial

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from d2_static_sampler import sample_balanced
from tests.helpers import needs_inductor

# Graphs as they are: tests/samplers/test_compiled.py has them compiled.
pytestmark = pytest.mark.usefixtures("eager_graphs")

# Positives, negatives, samples, fraction: how many of each are sampled.
REGIMES = {
    "both abundant": ((50, 60, 16, 0.5), (8, 8)),
    "another share": ((50, 60, 16, 0.25), (4, 12)),
    "positives short": ((3, 60, 16, 0.5), (3, 13)),
    "no positives": ((0, 60, 16, 0.5), (0, 16)),
    "negatives short": ((60, 3, 16, 0.5), (13, 3)),
    "no negatives": ((60, 0, 16, 0.25), (16, 0)),
    "both short": ((4, 5, 16, 0.5), (4, 5)),
    "just enough": ((7, 9, 16, 0.25), (7, 9)),
    "all ignored": ((0, 0, 16, 0.5), (0, 0)),
    "no samples": ((50, 60, 0, 0.5), (0, 0)),
    "odd": ((50, 60, 7, 0.5), (3, 4)),
}


def candidates(rows: int, num_pos: int, num_neg: int, *, ignored: int = 20) -> Tensor:
    """(B, N) labels in an order of its own for each row; the positives are 1 and 2."""
    labels = torch.tensor([1, 2] * num_pos)[:num_pos].tolist() + [0] * num_neg + [-1] * ignored
    return torch.stack([torch.tensor(labels)[torch.randperm(len(labels))] for _ in range(rows)])


def numbered(labels: Tensor, features: tuple[int, ...] = ()) -> Tensor:
    """Inputs that tell which candidate they are of: 1, 2, ... in every feature."""
    number = torch.arange(1.0, labels.shape[-1] + 1).view(-1, *(1 for _ in features))
    return number.expand(*labels.shape, *features).clone()


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("features", [(), (5,), (3, 4)])
@pytest.mark.parametrize("rows", [None, 1, 4])
def test_counts_and_picks(regime, features, rows):
    """A short class is filled up by the other; valid rows are distinct and not ignored."""
    (num_pos, num_neg, k, fraction), expected = REGIMES[regime]
    labels = candidates(rows or 1, num_pos, num_neg)
    inputs, before = numbered(labels, features), labels.clone()
    if rows is None:
        batch = sample_balanced(inputs[0], labels[0], k, positive_fraction=fraction)
        sampled, sampled_labels, valid = (part[None] for part in batch)
    else:
        sampled, sampled_labels, valid = sample_balanced(
            inputs, labels, k, positive_fraction=fraction
        )
    assert torch.equal(labels, before)
    assert sampled.shape == (rows or 1, k, *features)
    assert sampled_labels.dtype == labels.dtype
    assert torch.equal(valid, (torch.arange(k) < sum(expected)).expand(rows or 1, -1))
    assert (sampled[~valid] == 0).all()
    assert (sampled_labels[~valid] == -1).all()
    assert ((sampled_labels > 0).sum(1) == expected[0]).all()
    assert ((sampled_labels == 0).sum(1) == expected[1]).all()
    check_numbers(sampled[..., None].flatten(2), sampled_labels, labels, sum(expected))


def check_numbers(sampled: Tensor, sampled_labels: Tensor, labels: Tensor, count: int) -> None:
    """The valid inputs are whole, distinct, and of the labels beside them."""
    assert (sampled == sampled[..., :1]).all()
    for row, picked_labels, row_labels in zip(sampled, sampled_labels, labels, strict=True):
        picked = row[:count, 0].long() - 1
        assert len(picked.unique()) == count
        assert torch.equal(row_labels[picked], picked_labels[:count])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int8])
def test_no_candidates_and_types_without_minus_one(dtype):
    """Padding is labelled 0 where the type has no -1."""
    blank = -1 if dtype.is_signed else 0
    empty = sample_balanced(torch.ones(2, 0, 3), torch.zeros(2, 0, dtype=dtype), 4)
    short = sample_balanced(torch.ones(2, 1, 3), torch.ones(2, 1, dtype=dtype), 4)
    for (sampled, labels, valid), count in ((empty, 0), (short, 1)):
        assert sampled.shape == (2, 4, 3)
        assert valid.sum(1).tolist() == [count, count]
        assert labels.dtype == dtype
        assert (labels[:, count:] == blank).all()
        assert (sampled[:, count:] == 0).all()


@pytest.mark.parametrize("impl", ["static", "compiled"])
@pytest.mark.parametrize("num_pos", [40, 2])
def test_gradient_reaches_exactly_what_was_picked(impl, num_pos):
    """Each picked candidate gets the weight of its slot, all others 0."""
    labels = candidates(3, num_pos, 7)
    number = numbered(labels, (2,))
    inputs = number.clone().requires_grad_()
    sampled, _, valid = sample_balanced(inputs, labels, 16, impl=impl)
    weight = torch.rand_like(sampled)
    (sampled * weight).sum().backward()
    expected = torch.zeros_like(number)
    for row, picked, weights, real in zip(expected, sampled.detach(), weight, valid, strict=True):
        row[picked[real][:, 0].long() - 1] = weights[real]
    assert valid.sum() == 3 * min(16, num_pos + 7)
    assert torch.equal(inputs.grad, expected)


def test_padding_is_clean_of_a_bad_first_candidate():
    """Padding slots gather candidate 0, whose NaN reaches neither values nor gradients."""
    labels = torch.tensor([[-1, 1, 0, -1]])
    inputs = torch.full((1, 4, 2), float("nan"))
    inputs[0, 1:3] = 1
    inputs.requires_grad_()
    sampled, _, valid = sample_balanced(inputs, labels, 6)
    assert torch.equal(sampled[0], valid[0, :, None].float().expand(-1, 2))
    sampled.square().sum().backward()
    assert inputs.grad[0].tolist() == [[0, 0], [2, 2], [2, 2], [0, 0]]


@pytest.mark.parametrize(("num_pos", "num_neg"), [(60, 60), (2, 60), (5, 4)])
def test_compiled_is_static_for_equal_words(num_pos, num_neg):
    labels, words = candidates(3, num_pos, num_neg), torch.randint(1 << 62, (3, 3, 16))
    batches = [
        sample_balanced(numbered(labels, (2,)), labels, 16, impl=impl, words=words)
        for impl in ("static", "compiled")
    ]
    for static, compiled in zip(*batches, strict=True):
        assert torch.equal(static, compiled)


@needs_inductor
@pytest.mark.parametrize("num_neg", [30, 900])
def test_in_a_graph_of_the_callers(num_neg):
    """In one graph, without a break, for short rows and long ones: eager's values and gradients."""
    whole = torch.compile(sample_balanced, fullgraph=True)
    results = []
    labels, words = candidates(3, 5, num_neg), torch.randint(1 << 62, (3, 3, 16))
    for function in (sample_balanced, whole):
        inputs = numbered(labels, (2,)).requires_grad_()
        sampled, *others = function(inputs, labels, 16, words=words)
        (sampled * torch.arange(1.0, 17)[:, None]).sum().backward()
        results.append([sampled, *others, inputs.grad])
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


@pytest.mark.parametrize(
    ("labels", "k", "counts"),
    [
        ([1, 0, 1, -1, 0], 2, (1, 1)),
        ([1, 1, 0, 1], 3, (2, 1)),
        ([0, -1, 1, 0, 0], 3, (1, 2)),
        ([0, 1, 0], 5, (1, 2)),
    ],
)
def test_every_ordered_sample_is_equally_likely(labels, k, counts):
    """All words that matter, each once: every class-balanced order comes equally often."""
    members = [sum(label == value for label in labels) for value in (1, 0)]
    draws = [*zip(members, counts, strict=True), (sum(counts), sum(counts))]
    rooms = [range(n - step) for n, m in draws for step in range(m)]
    choices = torch.tensor(list(itertools.product(*rooms)))
    words = torch.full((3, len(choices), k), 3)
    for row, part in zip(words, choices.split([m for _, m in draws], 1), strict=True):
        row[:, : part.shape[1]] = part
    batch = torch.tensor(labels).expand(len(choices), -1)
    sampled, _, valid = sample_balanced(numbered(batch), batch, k, words=words)
    assert (valid.sum(1) == sum(counts)).all()
    found = Counter(map(tuple, sampled.tolist()))
    sets = comb(members[0], counts[0]) * comb(members[1], counts[1])
    assert len(found) == sets * factorial(sum(counts))
    assert set(found.values()) == {factorial(counts[0]) * factorial(counts[1])}


@pytest.mark.parametrize("impl", ["static", "compiled"])
def test_the_order_is_uniform(impl):
    """The slots of 3 positives among 16, one positive a row: false alarm below 1e-6."""
    labels = torch.tensor([1, 1, 1] + [0] * 40).expand(8_000, -1)
    sampled, sampled_labels, _ = sample_balanced(numbered(labels), labels, 16, impl=impl)
    slot = (sampled == 2).int().argmax(1)  # the second positive, which is always picked
    assert (sampled_labels.gather(1, slot[:, None]) == 1).all()
    assert chisquare(slot.bincount(minlength=16).numpy()).pvalue > 1e-6


@pytest.mark.parametrize(
    ("error", "changed", "message"),
    [
        (ValueError, {"impl": "naive"}, "'naive'.*static, compiled"),
        (ValueError, {"inputs": torch.zeros(2, 4, 3)}, r"\(2, 4, 3\).*\(2, 5\)"),
        (ValueError, {"inputs": torch.zeros(5, 3)}, r"\(5, 3\).*\(2, 5\)"),
        (ValueError, {"labels": torch.zeros(1, 2, 5, dtype=torch.int8)}, r"\(1, 2, 5\)"),
        (
            ValueError,
            {"words": torch.zeros(2, 2, 4, dtype=torch.int64)},
            r"\(3, 2, 4\).*\(2, 2, 4\)",
        ),
        (ValueError, {"words": torch.zeros(3, 2, 4)}, "float32"),
        (ValueError, {"num_samples": -2}, "-2"),
        (ValueError, {"positive_fraction": 1.25}, "1.25"),
        (ValueError, {"bg_label": -1}, "bg_label"),
        (TypeError, {"labels": torch.zeros(2, 5)}, "float32"),
    ],
)
def test_wrong_arguments(error, changed, message):
    usual = {"inputs": torch.zeros(2, 5, 3), "labels": torch.ones(2, 5).long(), "num_samples": 4}
    with pytest.raises(error, match=message):
        sample_balanced(**usual | changed)


def test_runs_without_data():
    """On the meta device: no shape depends on a value."""
    inputs = torch.empty((2, 5_000, 3), device="meta")
    labels = torch.empty((2, 5_000), dtype=torch.int8, device="meta")
    sampled, sampled_labels, valid = sample_balanced(inputs, labels, 64)
    assert sampled.shape == (2, 64, 3)
    assert sampled_labels.shape == valid.shape == (2, 64)
    assert {part.device.type for part in (sampled, sampled_labels, valid)} == {"meta"}

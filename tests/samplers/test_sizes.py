"""Long rows, many sizes: right picks, few graphs, samples that repeat."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from d2_static_sampler import build_label_sampler

# Graphs as they are: tests/samplers/test_compiled.py has them compiled.
pytestmark = pytest.mark.usefixtures("eager_graphs")

ASKED = {"num_samples": 64, "positive_fraction": 0.5, "bg_label": 0}
OF_TWO_HEADS = (ASKED, {"num_samples": 128, "positive_fraction": 0.25, "bg_label": 0})


@pytest.fixture(scope="module")
def compiled():
    return build_label_sampler("compiled", compiles_cpu=True)


@pytest.fixture
def dynamo_warnings(caplog):
    """Warnings of torch.compile: its loggers do not all propagate."""
    logger = logging.getLogger("torch._dynamo")
    logger.addHandler(caplog.handler)
    yield lambda: [r.getMessage() for r in caplog.records if "_limit" in r.getMessage()]
    logger.removeHandler(caplog.handler)


def check_equal(sample, expected) -> None:
    assert torch.equal(sample.index, expected.index)
    assert torch.equal(sample.num_pos, expected.num_pos)
    assert torch.equal(sample.num_neg, expected.num_neg)


def check_picks(labels: Tensor, sample, expected: tuple[int, int]) -> None:
    """Picks of one row: so many of each class, in range, distinct, of the right class."""
    num_pos, num_neg = expected
    assert (int(sample.num_pos), int(sample.num_neg)) == expected
    assert sample.index.min() >= 0
    assert sample.index.max() < labels.shape[-1]
    assert len(sample.index[0].unique()) == num_pos + num_neg == sample.index.shape[1]
    picked = labels[0, sample.index[0]]
    assert (picked[:num_pos] == 1).all()
    assert (picked[num_pos:] == 0).all()


@pytest.mark.parametrize("n", [268_569, 200_000])
def test_rows_of_an_rpn(n):
    """500 calls, no two of which are alike."""
    labels = torch.zeros((1, n), dtype=torch.int8)
    order = torch.randperm(n)
    labels[0, order[:60]] = 1
    labels[0, order[60 : n // 3]] = -1
    before = labels.clone()
    sampler = build_label_sampler("static")
    seen = set()
    for _ in range(500):
        sample = sampler(labels, num_samples=256, positive_fraction=0.5, bg_label=0)
        check_picks(labels, sample, (60, 196))
        seen.add(tuple(sample.index[0].tolist()))
    assert len(seen) == 500
    assert torch.equal(labels, before)


@pytest.mark.slow
def test_a_row_of_300_million():
    """Ranks up to the last one; takes 1.1 GB."""
    # Ten labels over and over: 1, -1, 0 ... 0. The last two of the row are 0 and 1.
    n = 300_000_000
    labels = torch.zeros(n // 10, 10, dtype=torch.int8)
    labels[:, 0], labels[:, 1] = 1, -1
    labels = labels.view(1, n)
    labels[0, -1] = 1
    num_pos, num_neg = n // 10 + 1, n // 10 * 8 - 1
    words = torch.randint(1 << 62, (2, 1, 256))
    for rank_pos, rank_neg in ((num_pos - 1, num_neg - 1), (12_345_678, 123_456_789)):
        words[:, 0, 0] = torch.tensor([rank_pos + 5 * num_pos, rank_neg + 7 * num_neg])
        asked = {"num_samples": 256, "positive_fraction": 0.5, "bg_label": 0, "words": words}
        sample = build_label_sampler("static")(labels, **asked)
        check_picks(labels, sample, (128, 128))
        first_pos = n - 1 if rank_pos == num_pos - 1 else rank_pos * 10
        assert sample.index[0, 0] == first_pos
        assert sample.index[0, 128] == rank_neg // 8 * 10 + 2 + rank_neg % 8


def test_compiled_at_forty_sizes(compiled, dynamo_warnings):
    """At most three graphs, whatever the sizes, the batches and the caller's modes."""
    static, before = build_label_sampler("static"), compiled.num_graphs
    sizes = [int(100 * 400 ** (step / 39)) for step in range(40)]
    assert len(set(sizes)) == 40
    assert sizes[0] < 8 * 64 < 16 * 64 < sizes[-1] == 40_000
    for step, n in enumerate(sizes):
        for rows in (1, 2, 3):
            labels = torch.randint(-1, 2, (rows, n), dtype=torch.int8)
            words = torch.randint(1 << 62, (2, rows, 64))
            half = torch.autocast("cpu", torch.bfloat16, enabled=step % 5 == 3)
            with torch.set_grad_enabled(step % 2 == 0), half:
                sample = compiled(labels, **ASKED, words=words)
            check_equal(sample, static(labels, **ASKED, words=words))
    assert 1 <= compiled.num_graphs <= before + 3
    assert not compiled.is_eager
    assert dynamo_warnings() == []


def test_compiled_for_two_heads(compiled, dynamo_warnings):
    """At most three graphs a head, and neither disturbs the other."""
    static = build_label_sampler("static")
    for n in (30_000, 300, 2_000, 700, 5_000):
        for rows in (1, 3, 2):
            for asked in OF_TWO_HEADS:
                labels = torch.randint(-1, 3, (rows, n))
                words = torch.randint(1 << 62, (2, rows, asked["num_samples"]))
                sample = compiled(labels, **asked, words=words)
                check_equal(sample, static(labels, **asked, words=words))
    assert 2 <= compiled.num_graphs <= 2 * 3
    assert not compiled.is_eager
    assert dynamo_warnings() == []


def test_the_recompile_limit_would_be_seen(dynamo_warnings):
    """What the tests above look for: a function compiled anew for every size."""
    with torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False):
        double = torch.compile(lambda x: x + x, backend="eager")
        for n in range(2, 7):
            double(torch.zeros(n))
    assert dynamo_warnings()


@pytest.mark.parametrize("rows", [1, 3])
def test_the_same_seed_gives_every_impl_the_same_sample(compiled, rows):
    """From words drawn of torch's global generator, which each call advances."""
    labels = torch.randint(-1, 2, (rows, 3_000), dtype=torch.int8)
    first, second = [], []
    for sampler in (build_label_sampler("static"), compiled, compiled):
        torch.manual_seed(11)
        before = torch.get_rng_state()
        first.append(sampler(labels, **ASKED))
        assert not torch.equal(torch.get_rng_state(), before)
        second.append(sampler(labels, **ASKED))
    for one, two in zip(first, second, strict=True):
        check_equal(one, first[0])
        check_equal(two, second[0])
        assert not torch.equal(one.index, two.index)
    assert not compiled.is_eager


@pytest.mark.parametrize("select", ["rank", "topk"])
@pytest.mark.parametrize(("rows", "n", "k"), [(2, 0, 4), (2, 9, 0), (0, 9, 4), (0, 0, 0)])
def test_nothing_to_sample_does_not_end_compiling(select, rows, n, k, caplog):
    """An empty row, no slots or no rows: nothing is valid, nothing fails, nothing is warned of."""
    sampler = build_label_sampler("compiled", select=select, compiles_cpu=True)
    labels = torch.ones((rows, n), dtype=torch.int64)
    sample = sampler(labels, num_samples=k, positive_fraction=0.5, bg_label=0)
    assert sample.index.shape == (rows, k)
    assert (sample.index == 0).all() or n
    assert sample.num_neg.tolist() == [0] * rows
    assert sample.num_pos.tolist() == [min(n, k // 2)] * rows
    assert not sampler.is_eager
    assert "runs uncompiled" not in caplog.text

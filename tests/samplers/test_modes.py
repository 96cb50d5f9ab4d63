"""What a caller wraps around a sampler leaves no trace in it."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from d2_static_sampler import build_label_sampler
from d2_static_sampler.samplers import draw_words

from ..helpers import STATIC_WAYS, sampler_by

# Graphs as they are: tests/samplers/test_compiled.py has them compiled.
pytestmark = pytest.mark.usefixtures("eager_graphs")

ASKED = {"num_samples": 32, "positive_fraction": 0.5, "bg_label": 0}
SHAPES = [(2, 300), (2, 3000), (1, 40_000), (3, 3000)]


@pytest.mark.parametrize("select", ["rank", "topk"])
def test_fake_tensors_stay_in_their_mode(select):
    sampler = build_label_sampler("static", select=select)
    for rows, n in SHAPES:
        with FakeTensorMode(allow_non_fake_inputs=True):
            sampler(torch.empty((rows, n), dtype=torch.int8), **ASKED)
            sampler(torch.empty((rows, 2 * n), dtype=torch.int8), **ASKED)
        sample = sampler(torch.randint(-1, 2, (rows, n)).to(torch.int8), **ASKED)
        assert type(sample.index) is torch.Tensor
        assert sample.is_valid.all()


def test_a_gradient_of_a_function_that_samples():
    labels = torch.randint(-1, 2, (2, 3000))
    sampler = build_label_sampler("static")

    def loss(x):
        return x.gather(1, sampler(labels, **ASKED).index).sum()

    gradient = torch.func.grad(loss)(torch.ones(2, 3000))
    assert gradient.sum() == 64


@pytest.mark.parametrize("way", STATIC_WAYS)
def test_a_sample_can_be_saved_for_backward(way):
    x = torch.ones(2, 3000, requires_grad=True)
    index = sampler_by(way)(torch.randint(-1, 2, (2, 3000)), **ASKED).index
    x.gather(1, index).sum().backward()
    assert x.grad.sum() == 64


@pytest.mark.parametrize("way", [*STATIC_WAYS, "compiled"])
def test_threads_do_not_disturb_each_other(way):
    sampler = sampler_by(way)
    cases = []
    for rows, n in SHAPES * 4:
        labels = torch.randint(-1, 2, (rows, n)).to(torch.int8)
        words = torch.randint(1 << 62, (2, rows, 32))
        cases.append((labels, words, sampler(labels, **ASKED, words=words).index))
    expected = [index.clone() for _, _, index in cases]
    wrong = []

    def run(order):
        for i in order * 10:
            labels, words, _ = cases[i]
            if not torch.equal(sampler(labels, **ASKED, words=words).index, expected[i]):
                wrong.append(i)

    orders = (list(range(16)), list(range(15, -1, -1)), [5] * 16)
    threads = [threading.Thread(target=run, args=(order,)) for order in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert all(torch.equal(case[2], index) for case, index in zip(cases, expected, strict=True))


@contextmanager
def changed(switch, value, usual):
    switch(value)
    try:
        yield
    finally:
        switch(usual)


MODES = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "float16": lambda: changed(torch.set_default_dtype, torch.float16, torch.float32),
    "float64": lambda: changed(torch.set_default_dtype, torch.float64, torch.float32),
    "on cpu": lambda: changed(torch.set_default_device, "cpu", None),
    "on meta": lambda: changed(torch.set_default_device, "meta", None),
    "deterministic": lambda: changed(torch.use_deterministic_algorithms, True, False),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("impl", [*STATIC_WAYS, "compiled"])
def test_the_callers_modes_change_no_sample(impl, mode):
    """Bit for bit, with given words and with drawn ones."""
    sampler = sampler_by(impl)
    asked = {"num_samples": 5, "positive_fraction": 0.5, "bg_label": 0}
    labels = torch.randint(-1, 2, (64, 300), dtype=torch.int8)
    words = draw_words((2, 64, 5), device=labels.device)
    drawing = {"generator": torch.Generator().manual_seed(1)}
    expected = sampler(labels, **asked, words=words), sampler(labels, **asked, **drawing)
    drawing["generator"].manual_seed(1)
    with MODES[mode]():
        samples = sampler(labels, **asked, words=words), sampler(labels, **asked, **drawing)
    for sample, plain in zip(samples, expected, strict=True):
        assert torch.equal(sample.index, plain.index)
        assert torch.equal(sample.num_pos, plain.num_pos)
        assert torch.equal(sample.num_neg, plain.num_neg)
    assert impl != "compiled" or not sampler.is_eager


@pytest.mark.parametrize("mode", MODES)
def test_words_are_uniform_in_the_callers_modes(mode):
    """Mean and 62 bits, each within six standard deviations: false alarm below 2e-7 in all."""
    with MODES[mode]():
        words = draw_words((100_000,), device=torch.device("cpu"))
    assert words.dtype == torch.int64
    assert 0 <= int(words.min()) <= int(words.max()) < 1 << 62
    mean = float(words.double().mean()) / (1 << 62)
    assert abs(mean - 0.5) < 6 * (12 * 100_000) ** -0.5
    ones = torch.stack([(words >> bit & 1).sum() for bit in range(62)])
    assert (ones - 50_000).abs().max() < 6 * 100_000**0.5 / 2

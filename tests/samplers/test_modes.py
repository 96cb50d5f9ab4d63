"""What a caller wraps around a sampler leaves no trace in it."""

from __future__ import annotations

import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from d2_static_sampler import build_label_sampler

from ..helpers import STATIC_WAYS, sampler_by

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

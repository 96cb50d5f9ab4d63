"""What only a GPU can show: no waiting, equal samples, times of the device. Skipped without one."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from detectron2.utils.events import EventStorage

from d2_static_sampler import build_label_sampler, install_sampler, sample_balanced
from d2_static_sampler.engine.clock import clock_for
from d2_static_sampler.engine.step_timer import StepTimer
from d2_static_sampler.samplers import seeded_words
from tests.helpers import make_batch, small_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
CUDA = torch.device("cuda")
ASKED = {"num_samples": 64, "positive_fraction": 0.5, "bg_label": 0}
SHAPES = [(1, 50), (3, 900), (1, 40_000), (4, 268_569)]


@contextmanager
def no_synchronisation():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def make_labels(shape: tuple[int, int]) -> torch.Tensor:
    return torch.randint(-1, 3, shape).to(torch.int8)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("impl", ["static", "compiled"])
def test_the_sample_of_a_cpu(impl, shape):
    sampler, labels = build_label_sampler(impl), make_labels(shape)
    words = torch.randint(1 << 62, (2, shape[0], 64))
    expected = build_label_sampler("static")(labels, **ASKED, words=words)
    sample = sampler(labels.cuda(), **ASKED, words=words.cuda())
    assert sample.index.device.type == "cuda"
    assert torch.equal(sample.index.cpu(), expected.index)
    assert torch.equal(sample.num_pos.cpu(), expected.num_pos)
    assert torch.equal(sample.num_neg.cpu(), expected.num_neg)
    assert not getattr(sampler, "is_eager", False)


@pytest.mark.parametrize("select", ["rank", "topk"])
@pytest.mark.parametrize("impl", ["static", "compiled"])
def test_the_host_never_waits(impl, select):
    sampler = build_label_sampler(impl, select=select)
    for shape in SHAPES:
        labels = make_labels(shape).cuda()
        for _ in range(2):  # the first may compile
            sampler(labels, **ASKED)
        with no_synchronisation():
            sample = sampler(labels, **ASKED)
        assert sample.index.shape == (shape[0], 64)
        assert (labels.gather(1, sample.index)[sample.is_pos] > 0).all()
        assert (labels.gather(1, sample.index)[sample.is_neg] == 0).all()


def test_the_watch_sees_a_wait():
    with pytest.raises(RuntimeError, match="synchroniz"), no_synchronisation():
        torch.ones(3, device=CUDA).sum().item()


def test_a_balanced_batch_never_waits():
    labels, inputs = make_labels((4, 1000)).cuda(), torch.rand(4, 1000, 8, device=CUDA)
    sample_balanced(inputs, labels, 100)
    with no_synchronisation():
        sampled, _, valid = sample_balanced(inputs, labels, 100)
    assert sampled.shape == (4, 100, 8)
    assert valid.all()


def test_the_sampler_can_be_captured_in_a_graph():
    sampler, labels = build_label_sampler("static"), make_labels((2, 40_000)).cuda()
    words = torch.randint(1 << 62, (2, 2, 64), device=CUDA)
    expected = sampler(labels, **ASKED, words=words)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        sampler(labels, **ASKED, words=words)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample = sampler(labels, **ASKED, words=words)
    graph.replay()
    assert torch.equal(sample.index, expected.index)


def test_seeded_words_are_a_cpus():
    of = {"seed": 5, "rank": 1, "head": 2, "call": 3}
    on_cpu = seeded_words((2, 3, 64), device=torch.device("cpu"), **of)
    assert torch.equal(seeded_words((2, 3, 64), device=CUDA, **of).cpu(), on_cpu)


@pytest.mark.parametrize("impl", ["naive", "static", "compiled"])
def test_a_training_step(impl):
    model = install_sampler(small_model("MODEL.DEVICE", "cuda"), impl)
    with EventStorage():
        for _ in range(3):
            losses = model(make_batch((3, 0)))
            sum(losses.values()).backward()
    assert all(bool(torch.isfinite(loss)) for loss in losses.values())


def sleeping(labels, **kwargs):
    torch.cuda._sleep(50_000_000)  # cycles: at least 20 ms
    return build_label_sampler("static")(labels, **kwargs)


def test_a_delay_of_the_device_shows_where_it_is():
    model = install_sampler(small_model("MODEL.DEVICE", "cuda"), sleeping)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    timer = StepTimer(model, optimizer)
    with EventStorage():
        for _ in range(3):
            with timer.step() as times:
                sum(model(make_batch((3, 2))).values()).backward()
                optimizer.step()
    torch.cuda.synchronize()
    took = times.milliseconds()
    assert took["rpn_sample_ms"] >= 20
    assert took["roi_sample_ms"] >= 20
    # A delay that is counted twice would make the one twice the other.
    assert took["rpn_label_ms"] < 2 * took["rpn_sample_ms"]


def test_marking_a_moment_does_not_wait():
    clock = clock_for(CUDA)
    torch.cuda._sleep(1_000_000)
    with no_synchronisation():
        moment = clock.mark()
    assert clock.is_past(moment, wait=True)

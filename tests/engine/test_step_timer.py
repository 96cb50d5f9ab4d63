"""The timer in loops that are not Detectron2's own."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from d2_static_sampler.engine import StepTimer
from d2_static_sampler.engine.step_timer import PHASES


class Slow(nn.Module):
    """A model whose forward takes 20 ms, a list of images at a time."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, images):
        time.sleep(0.02)
        return self.weight * len(images)


@pytest.fixture
def timer():
    model = Slow()
    return StepTimer(model, torch.optim.SGD(model.parameters(), lr=1.0))


def check_sum(times):
    figures = times.milliseconds()
    assert min(figures.values()) >= 0
    total = sum(figures[f"{name}_ms"] for name in (*PHASES, "other"))
    assert total == pytest.approx(figures["total_ms"], abs=1e-6)
    return figures


def test_accumulated_gradients(timer):
    with timer.step() as times:
        for count in (2, 3):
            time.sleep(0.05)
            torch.autograd.backward(timer.model(images=[0] * count))
        timer.optimizer.step()
    figures = check_sum(times)
    assert times.images == 5
    assert figures["data_ms"] >= 100
    assert figures["forward_ms"] >= 40
    assert figures["backward_ms"] > 0
    assert figures["optimizer_ms"] > 0


def test_a_closure_belongs_to_the_optimizer(timer):
    def closure():
        loss = timer.model([0])
        loss.backward()
        return loss

    with timer.step() as times:
        timer.optimizer.step(closure)
    figures = check_sum(times)
    assert figures["optimizer_ms"] >= 20
    assert figures["forward_ms"] == figures["backward_ms"] == 0


def test_an_error_inside_a_step_takes_the_wrappers_away(timer):
    def fail():
        with timer.step():
            assert "forward" in vars(timer.model)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert "forward" not in vars(timer.model)

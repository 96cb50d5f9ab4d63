"""With stock's own picks, every kind of model has stock's losses and gradients, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch

from d2_static_sampler import install_sampler
from tests.helpers import ReplaySampler, record_picks, step
from tests.modeling.models import CASES, MODELS, RUNNABLE_CASES, eager_focal_loss  # noqa: F401


def replay(model, batch, picks):
    """Losses, gradients and logs with recorded picks, all of which are used."""
    install_sampler(model, sampler := ReplaySampler(picks))
    torch.manual_seed(0)
    result = step(model, batch)
    assert sampler.calls == []
    return result


def differences(got, expected):
    """Names of the tensors that are not equal in every bit."""
    assert got.keys() == expected.keys()
    return [name for name, value in expected.items() if not torch.equal(got[name], value)]


@pytest.mark.usefixtures("eager_focal_loss")
@pytest.mark.parametrize(("name", "case"), RUNNABLE_CASES)
def test_losses_gradients_and_logs(name, case, monkeypatch):
    tiny = MODELS[name]()
    num_gt, opts = CASES[case]
    model = tiny.build(*opts)
    replayed = copy.deepcopy(model)
    batch = tiny.batch(num_gt)
    (losses, gradients, logged), picks = record_picks(model, batch, monkeypatch)
    assert [len(calls) for calls in picks] == [len(num_gt)] * len(tiny.heads)
    got_losses, got_gradients, got_logged = replay(replayed, batch, picks)

    assert differences(got_losses, losses) == []
    assert differences(got_gradients, gradients) == []
    # Counted over the life of the process.
    for logs in (got_logged, logged):
        logs.pop("kpts_num_skipped_batches", None)
    # Detectron2 logs a mean over no instance as NaN.
    assert got_logged == pytest.approx(logged, rel=0, abs=0, nan_ok=True)
    for key, buffer in model.named_buffers():
        assert torch.equal(replayed.get_buffer(key), buffer), key


@pytest.mark.parametrize("head", [0, 1])
def test_another_pick_is_seen(head, monkeypatch):
    """One negative of one image exchanged for a candidate that was not picked."""
    tiny = MODELS["faster_fpn"]()
    model = tiny.build()
    replayed = copy.deepcopy(model)
    batch = tiny.batch((3, 2, 4))
    (losses, gradients, _), picks = record_picks(model, batch, monkeypatch)
    positives, negatives = picks[head][1]
    taken = {*positives.tolist(), *negatives.tolist()}
    negatives[0] = next(i for i in range(1000) if i not in taken)
    got_losses, got_gradients, _ = replay(replayed, batch, picks)
    assert differences(got_losses, losses)
    assert differences(got_gradients, gradients)

"""RRPN and RROIHeads in whole models: a box of a tenth of a pixel, and an image without any."""

from __future__ import annotations

import copy

import pytest
import torch

from d2_static_sampler import install_sampler
from d2_static_sampler.modeling import installed_samplers
from tests.helpers import ReplaySampler, record_picks, step
from tests.modeling.models import HAS_OPERATORS, MISSING, MODELS
from tests.modeling.rotated_operators import replace_operators

IMPLS = ("naive", "static", "compiled")
with_operators = pytest.mark.skipif(not HAS_OPERATORS, reason=MISSING.get("rotated", ""))


@pytest.fixture(params=["stand-ins", pytest.param("detectron2", marks=with_operators)])
def _operators(request, monkeypatch):
    if request.param == "stand-ins":
        replace_operators(monkeypatch)


def tiny_box_batch(tiny, seed=0):
    batch = tiny.batch((3, 0, 2), seed=seed)
    batch[0]["instances"].gt_boxes.tensor[0, 2:4] = 0.1
    return batch


@pytest.mark.usefixtures("_operators")
@pytest.mark.parametrize("impl", IMPLS)
def test_trains(impl):
    tiny = MODELS["rotated"]()
    model = install_sampler(tiny.build(), impl)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for seed in range(3):
        losses, gradients, logged = step(model, tiny_box_batch(tiny, seed))
        optimizer.step()
        assert all(torch.isfinite(loss) for loss in losses.values())
        assert all(torch.isfinite(gradient).all() for gradient in gradients.values())
        assert logged["rpn/num_pos_anchors"] > 0
        assert logged["roi_head/num_fg_samples"] > 0
    calls = [head.calls for head in installed_samplers(model).values()]
    assert calls == ([] if impl == "naive" else [3, 3])


@pytest.mark.usefixtures("_operators")
def test_losses_gradients_and_logs_are_stocks(monkeypatch):
    tiny = MODELS["rotated"]()
    model = tiny.build()
    replayed = copy.deepcopy(model)
    batch = tiny_box_batch(tiny)
    (losses, gradients, logged), picks = record_picks(model, batch, monkeypatch)
    install_sampler(replayed, sampler := ReplaySampler(picks))
    got_losses, got_gradients, got_logged = step(replayed, batch)
    assert sampler.calls == []
    for got, expected in ((got_losses, losses), (got_gradients, gradients)):
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], value) for name, value in expected.items())
    assert got_logged == logged


@pytest.mark.skipif(HAS_OPERATORS, reason="this Detectron2 has its compiled operators")
def test_without_the_operators_it_fails_as_stock_does():
    errors = set()
    for impl in IMPLS:
        tiny = MODELS["rotated"]()
        model = install_sampler(tiny.build(), impl)
        with pytest.raises((ImportError, AttributeError, RuntimeError)) as error:
            step(model, tiny_box_batch(tiny))
        errors.add((error.type, str(error.value)))
    assert len(errors) == 1

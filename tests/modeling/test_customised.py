"""A customised model trains as it does in Detectron2, or keeps Detectron2's step with a warning."""

from __future__ import annotations

import functools

import pytest
import torch

from d2_static_sampler import install_sampler
from d2_static_sampler.modeling.static_install import has_static_step
from tests.modeling.customised import PLANTS
from tests.modeling.models import MODELS
from tests.modeling.test_step import SEED, assert_equals_stock, train_once

LATER = [name for name, plant in PLANTS.items() if plant.may_come_later]
COMPILED = list(PLANTS)[::3]  # the rule is the same: a third of them


def batch_of(tiny):
    return tiny.batch((3, 0, 9))


def planted(plant, models, monkeypatch):
    """Plant it in all models, or once where it concerns a class or a module."""
    for model in models if plant.is_of_model else models[:1]:
        plant.change(model, monkeypatch)


def shows(plain, changed):
    """Whether a customisation changes a step at all."""
    return any(
        not torch.equal(value, of_changed[name])
        for of_plain, of_changed in zip(plain[:2], changed[:2], strict=True)
        for name, value in of_plain.items()
        if name in of_changed
    )


def assert_said(warnings, plant):
    said = [text for text in warnings if "STATIC_STEP leaves out" in text]
    assert bool(said) is plant.is_seen, said
    assert len(set(said)) == len(said)


@pytest.mark.parametrize(
    ("name", "impl"),
    [*((name, "static") for name in PLANTS), *((name, "compiled") for name in COMPILED)],
)
def test_planted_before_the_install(name, impl, monkeypatch, warnings_of_detectron2):
    plant = PLANTS[name]
    tiny = MODELS[plant.models[0]]()
    stock, static = (tiny.build(*plant.opts) for _ in range(2))
    batch = batch_of(tiny)
    without = plain_step(plant.models[0], plant.opts)
    planted(plant, (stock, static), monkeypatch)
    expected = train_once(install_sampler(stock, "static", seed=SEED), batch)
    assert shows(without, expected)
    assert "STATIC_STEP" not in " ".join(warnings_of_detectron2)
    install_sampler(static, impl, static_step=True, seed=SEED)
    # Not in a graph: the functions of the compiled step as they are.
    with torch.compiler.set_stance("force_eager" if impl == "compiled" else "default"):
        assert_equals_stock(train_once(static, batch), expected)
    assert_said(warnings_of_detectron2, plant)


@functools.cache
def plain_step(name, opts):
    """What nobody has changed."""
    tiny = MODELS[name]()
    model = install_sampler(tiny.build(*opts), "static", seed=SEED)
    losses, *others = train_once(model, batch_of(tiny))
    return {name: loss.detach() for name, loss in losses.items()}, *others


@pytest.mark.parametrize("name", LATER)
def test_planted_between_two_steps(name, monkeypatch, warnings_of_detectron2):
    plant = PLANTS[name]
    tiny = MODELS[plant.models[-1]]()
    stock, static = (tiny.build(*plant.opts) for _ in range(2))
    install_sampler(stock, "static", seed=SEED)
    install_sampler(static, "static", static_step=True, seed=SEED)
    assert has_static_step(static)
    batch = batch_of(tiny)
    without = train_once(stock, batch)
    assert_equals_stock(train_once(static, batch), without)
    assert warnings_of_detectron2 == []
    planted(plant, (stock, static), monkeypatch)
    expected = train_once(stock, batch)
    assert shows(without, expected)
    assert_equals_stock(train_once(static, batch), expected)
    assert_said(warnings_of_detectron2, plant)

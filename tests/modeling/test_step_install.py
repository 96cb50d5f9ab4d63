"""The static step comes and goes with the sampler, follows the mode, and is copied with it."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from d2_static_sampler import install_sampler, uninstall_sampler
from d2_static_sampler.modeling import installed_samplers
from d2_static_sampler.modeling.static_install import has_static_step, static_graphs
from d2_static_sampler.modeling.static_rpn import StaticRPN
from tests.modeling.models import MODELS
from tests.modeling.test_export import C4, FPN, detections, eager, script, trace
from tests.modeling.test_step import SEED, assert_close, train_once

FROZEN = ("MODEL.RESNETS.NORM", "FrozenBN")


def own_state(model):
    """Of every module: its class, what is in its __dict__, and which objects those are."""
    return [
        (name, type(module), {key: id(value) for key, value in vars(module).items()})
        for name, module in model.named_modules()
    ]


@pytest.mark.parametrize("name", ["faster_fpn", "cascade", "keypoint", "rpn_only", "faster_c4"])
@pytest.mark.parametrize("impl", ["static", "compiled"])
def test_uninstalling_gives_back_all(name, impl):
    tiny = MODELS[name]()
    model = tiny.build(*FROZEN)
    before = own_state(model)
    install_sampler(model, impl, static_step=True)
    assert has_static_step(model)
    if impl == "static":
        train_once(model, tiny.batch((2, 0)))
        model.zero_grad()
    install_sampler(model, impl, static_step=True)
    uninstall_sampler(model)
    assert own_state(model) == before
    assert not has_static_step(model)


def test_naive_and_a_second_call_take_the_step_out():
    model = MODELS["faster_fpn"]().build()
    before = own_state(model)
    install_sampler(model, "static", static_step=True)
    install_sampler(model, "static")
    assert not has_static_step(model)
    assert len(installed_samplers(model)) == 2
    assert type(model) is before[0][1]
    install_sampler(model, "naive")
    assert own_state(model) == before


def test_the_class_follows_the_mode():
    model = install_sampler(MODELS["faster_fpn"]().build(), "static", static_step=True)
    training = [type(module) for module in model.modules()]
    model.eval()
    evaluation = [type(module) for module in model.modules()]
    assert not any(issubclass(cls, StaticRPN) for cls in evaluation)
    changed = [a for a, b in zip(training, evaluation, strict=True) if a is not b]
    assert {"GeneralizedRCNN", "RPN", "StandardROIHeads"} <= {cls.__name__ for cls in changed}
    model.proposal_generator.train()
    assert isinstance(model.proposal_generator, StaticRPN)
    model.train()
    assert [type(module) for module in model.modules()] == training
    assert {cls.__name__ for cls in training} == {cls.__name__ for cls in evaluation}


@pytest.mark.parametrize(("name", "opts", "masks"), [FPN, C4], ids=["fpn", "c4"])
def test_evaluation_is_stocks(name, opts, masks):
    """Bit for bit; scripted and traced too."""
    tiny = MODELS[name]()._replace(masks=masks)
    model = install_sampler(tiny.build(*opts, *FROZEN), "static", static_step=True)
    train_once(model, tiny.batch((2, 1)))
    stock = tiny.build(*opts, *FROZEN)
    image = tiny.batch((1,), seed=1)[0]["image"]
    expected = detections(eager, stock.eval(), image)
    assert len(expected[0]) > 0
    for value, stocks in zip(detections(eager, model.eval(), image), expected, strict=True):
        assert torch.equal(value, stocks)
    for export in (script, trace):
        got = detections(export, model, image)
        for value, stocks in zip(got, expected, strict=True):
            torch.testing.assert_close(value, stocks)


def through_a_file(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "file": through_a_file,
}


@pytest.mark.parametrize("impl", ["static", "compiled"])
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_trains_on(way, impl):
    """After a step in training: equal classes, keys, and the step that the original makes next."""
    tiny = MODELS["mask_bitmaps"]()
    stock = tiny.build()
    keys = list(stock.state_dict())
    model = install_sampler(stock, impl, static_step=True, seed=SEED)
    if impl == "static":
        train_once(model, tiny.batch((2, 1)))
    clone = COPIES[way](model)
    assert [type(module) for module in clone.modules()] == [type(m) for m in model.modules()]
    assert list(clone.state_dict()) == list(model.state_dict()) == keys
    assert has_static_step(clone)
    if impl == "static":
        batch = tiny.batch((1, 3), seed=2)
        assert_close(train_once(clone, batch), train_once(model, batch))
    else:
        graphs = static_graphs(clone)
        assert len(graphs) == 3
        assert not {id(each) for each in graphs} & {id(each) for each in static_graphs(model)}
    state = own_state(tiny.build())
    assert [x[:2] for x in own_state(uninstall_sampler(clone.eval()))] == [x[:2] for x in state]


def test_heads_alone():
    """Whoever installs into a part gets the static step of that part."""
    tiny = MODELS["faster_fpn"]()
    batch = tiny.batch((3, 0, 4))
    results = []
    for static_step in (True, False):
        model = tiny.build()
        assert isinstance(model.roi_heads, nn.Module)
        install_sampler(model.roi_heads, "static", static_step=static_step, seed=SEED)
        assert has_static_step(model) is static_step
        results.append(train_once(model, batch))
    assert_close(*results)

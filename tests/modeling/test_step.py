"""The static step has the losses, gradients and logs of Detectron2's step with the same sample.

That the same sampler in Detectron2's step equals stock, given its picks, is shown in
tests/modeling/test_models_fidelity.py.
"""

from __future__ import annotations

import contextlib
import copy
import functools

import pytest
import torch
from detectron2.utils.events import EventStorage

from d2_static_sampler import install_sampler
from d2_static_sampler.modeling.deferred import deferred_metrics
from tests.helpers import on_another_device
from tests.modeling.models import CASES, MODELS, RUNNABLE_CASES, eager_focal_loss  # noqa: F401

SEED = 5


# A loss sums at most 3 images x 5000 slots, whose roundings walk at random: sqrt(15,000) of them.
RTOL = {dtype: 15_000**0.5 * torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)}
WAYS = {"here": contextlib.nullcontext, "elsewhere": on_another_device}


def train_once(model, batch, way="here", dtype=torch.float64):
    """Losses, gradients by name, and logged scalars of one forward and backward.

    In float64: in float32 another order of a sum can put an activation on the other side of a
    ReLU, and no bound on what follows holds on every processor. The step has the same code for
    both types. The gradients are those of parameters and, as "features p2", of the backbone's
    outputs; "output p2" are these themselves.
    """
    model.zero_grad()
    torch.manual_seed(0)
    with EventStorage() as storage, in_type(model, dtype), watched_features(model) as gradients:
        with WAYS[way]():
            losses = model(batch)
        sum(losses.values()).backward()
        deferred_metrics().flush()
        gradients |= {
            name: parameter.grad
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        model.zero_grad()
    return losses, gradients, {name: value for name, (value, _) in storage.latest().items()}


@contextlib.contextmanager
def in_type(model, dtype):
    """The model in another type; its scores stay float32, as the suppression needs the boxes'."""

    def with_scores_in_float32(head, inputs, outputs):
        return [x.float() for x in outputs[0]], outputs[1]

    rpn = getattr(model, "proposal_generator", None)
    with contextlib.ExitStack() as stack:
        if dtype is torch.float64 and rpn is not None:
            stack.enter_context(hooked(rpn.rpn_head, with_scores_in_float32))
        model.to(dtype)
        stack.callback(model.float)
        yield


@contextlib.contextmanager
def watched_features(model):
    """The backbone's outputs by name and, after the backward, their gradients from the heads."""
    watched = {}

    def watch(backbone, inputs, outputs):
        found = {name: value.view_as(value) for name, value in outputs.items()}
        for name, value in found.items():
            watched["output " + name] = value.detach()
            if value.requires_grad:
                value.register_hook(functools.partial(watched.__setitem__, "features " + name))
        return found

    with hooked(model.backbone, watch):
        yield watched


@contextlib.contextmanager
def hooked(module, hook):
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def assert_close(got, expected, bound=1e-5, rtol=0.0):
    """Losses within RTOL, gradients within 1e-5 in L2, counts exactly.

    Gradients are compared where the step's own arithmetic ends: at the heads' parameters and at
    the backbone's outputs, which have the same bits themselves. Behind them the backward is
    Detectron2's own, whose BatchNorms enlarge errors as far as sums happen to cancel. Detectron2
    computes some losses in float32 whatever its model is in: about ten roundings of 6e-8 each, and
    16 times as much for sums that cancel in the heads.
    """
    losses, gradients, logged = got
    expected_losses, expected_gradients, expected_logged = expected
    assert losses.keys() == expected_losses.keys()
    for name, loss in expected_losses.items():
        # Only from float64 a loss may come in either type, where it is of nothing.
        got_loss = losses[name].to(loss.dtype) if loss.dtype is torch.float64 else losses[name]
        within = max(rtol, RTOL[losses[name].dtype], RTOL[loss.dtype])
        torch.testing.assert_close(got_loss, loss, rtol=within, atol=1e-12, msg=name)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        if name.startswith("output "):
            assert torch.equal(gradients[name], gradient), name
        elif not name.startswith("backbone."):
            assert relative_error(gradients[name], gradient) <= bound, name
    assert logged == pytest.approx(expected_logged, rel=1e-12, abs=0)


def relative_error(gradient, expected):
    return (gradient - expected).norm() / expected.norm().clamp(min=1e-12)


@pytest.mark.usefixtures("eager_focal_loss")
@pytest.mark.parametrize(("name", "case"), RUNNABLE_CASES)
def test_equals_detectron2(name, case):
    num_gt, opts = CASES[case]
    # PointRend's own code needs float32. Its heads keep their step; the RPN has one shape either
    # way, so that no sum before its losses has another order.
    dtype = torch.float32 if name == "point_rend" else torch.float64
    assert_equal_steps(MODELS[name](), num_gt, *opts, dtype=dtype)


@pytest.mark.parametrize("masks", ["", "polygon", "bitmask"])
@pytest.mark.parametrize("case", CASES)
def test_one_feature_map_and_a_shared_head(case, masks, caplog):
    """Without BatchNorm the last block of a ResNet is static, too."""
    num_gt, opts = CASES[case]
    tiny = MODELS["faster_c4"]()._replace(masks=masks)
    norm = "MODEL.RESNETS.NORM", "FrozenBN", "MODEL.MASK_ON", bool(masks)
    assert_equal_steps(tiny, num_gt, *norm, *opts)
    assert "leaves out" not in caplog.text


@pytest.mark.parametrize(
    "name", ["faster_fpn", "faster_dc5", "mask_bitmaps", "keypoint", "cascade", "rpn_only"]
)
def test_in_float32(name):
    """Losses are Detectron2's; gradients are as near to those of float64 as Detectron2's own.

    Each part's worst parameter, and four times: two roundings of one thing differ by so much.
    """
    tiny = MODELS[name]()
    batch = tiny.batch((3, 0, 4))
    exact, stock, static = (
        train_once(
            install_sampler(tiny.build(), "static", static_step=is_static, seed=SEED),
            batch,
            dtype=dtype,
        )
        for is_static, dtype in (
            (False, torch.float64),
            (False, torch.float32),
            (True, torch.float32),
        )
    )
    for loss_name, loss in stock[0].items():
        torch.testing.assert_close(static[0][loss_name], loss, rtol=RTOL[torch.float32], atol=1e-9)
    errors = [worst_errors(gradients, exact[1]) for _, gradients, _ in (static, stock)]
    assert errors[0].keys() == errors[1].keys() >= {"backbone", "proposal_generator"}
    for part, error in errors[1].items():
        assert errors[0][part] <= 4 * max(error, 1e-6), part


def worst_errors(gradients, exact):
    worst = {}
    for name, gradient in exact.items():
        part = name.split(".")[0]
        error = float(relative_error(gradients[name].double(), gradient))
        worst[part] = max(worst.get(part, 0.0), error)
    return worst


def assert_equal_steps(tiny, num_gt, *opts, dtype=torch.float64):
    """The static step of a model equals Detectron2's with the same sampler, in both ways."""
    model, batch = tiny.build(*opts), tiny.batch(num_gt)
    copies = [copy.deepcopy(model) for _ in WAYS]
    expected = train_once(install_sampler(model, "static", seed=SEED), batch, dtype=dtype)
    for number, (way, static) in enumerate(zip(WAYS, copies, strict=True), start=1):
        install_sampler(static, "static", static_step=True, seed=SEED)
        assert_equals_stock(train_once(static, batch, way, dtype), expected, later=number)


def assert_equals_stock(got, expected, *, later=1, **bounds):
    """:func:`assert_close` of a static step and Detectron2's, ``later`` steps before it."""
    if (skipped := "kpts_num_skipped_batches") in expected[2]:
        # Counted over the life of the process.
        assert got[2][skipped] == expected[2][skipped] + later
        got, expected = (
            (*part[:2], {name: value for name, value in part[2].items() if name != skipped})
            for part in (got, expected)
        )
    # Detectron2 logs a mean over no instance as NaN, where the static step logs nothing.
    got, expected = (
        (*part[:2], {name: value for name, value in part[2].items() if value == value})
        for part in (got, expected)
    )
    assert_close(got, expected, **bounds)

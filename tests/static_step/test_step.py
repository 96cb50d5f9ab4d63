"""The static step has the losses, gradients and logs of Detectron2's step with the same sample.

That the same sampler in Detectron2's step equals stock, given its picks, is shown in
tests/modeling/test_models_fidelity.py.
"""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from detectron2.utils.events import EventStorage
from torch.utils._python_dispatch import TorchDispatchMode

from d2_static_sampler import install_sampler
from d2_static_sampler.static_step.deferred import deferred_metrics
from tests.modeling.models import CASES, MODELS, RUNNABLE_CASES, eager_focal_loss  # noqa: F401

SEED = 5


class Elsewhere(TorchDispatchMode):
    """Lets everything pass: in it the step is that of other devices, every slot and no NumPy."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


WAYS = {"here": contextlib.nullcontext, "elsewhere": Elsewhere}


def train_once(model, batch, way="here"):
    """Losses, gradients by parameter, and logged scalars of one forward and backward."""
    model.zero_grad()
    torch.manual_seed(0)
    with EventStorage() as storage:
        with WAYS[way]():
            losses = model(batch)
        sum(losses.values()).backward()
        deferred_metrics().flush()
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return losses, gradients, {name: value for name, (value, _) in storage.latest().items()}


def assert_close(got, expected):
    """Losses within 1e-6, gradients within 1e-5 in L2, counts exactly."""
    losses, gradients, logged = got
    expected_losses, expected_gradients, expected_logged = expected
    assert losses.keys() == expected_losses.keys()
    for name, loss in expected_losses.items():
        torch.testing.assert_close(losses[name], loss, rtol=1e-6, atol=1e-9, msg=name)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        error = (gradients[name] - gradient).norm() / gradient.norm().clamp(min=1e-12)
        assert error <= 1e-5, name
    assert logged == pytest.approx(expected_logged, rel=1e-12, abs=0)


@pytest.mark.usefixtures("eager_focal_loss")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "case"), RUNNABLE_CASES)
def test_equals_detectron2(name, case, way):
    num_gt, opts = CASES[case]
    assert_equal_steps(MODELS[name](), num_gt, *opts, way=way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("masks", ["", "polygon", "bitmask"])
@pytest.mark.parametrize("case", CASES)
def test_one_feature_map_and_a_shared_head(case, masks, way, caplog):
    """Without BatchNorm the last block of a ResNet is static, too."""
    num_gt, opts = CASES[case]
    tiny = MODELS["faster_c4"]()._replace(masks=masks)
    norm = "MODEL.RESNETS.NORM", "FrozenBN", "MODEL.MASK_ON", bool(masks)
    assert_equal_steps(tiny, num_gt, *norm, *opts, way=way)
    assert "leaves out" not in caplog.text


def assert_equal_steps(tiny, num_gt, *opts, way):
    """The static step of a model equals Detectron2's with the same sampler."""
    model = tiny.build(*opts)
    static = install_sampler(copy.deepcopy(model), "static", static_step=True, seed=SEED)
    batch = tiny.batch(num_gt)
    expected = train_once(install_sampler(model, "static", seed=SEED), batch)
    got = train_once(static, batch, way)
    assert_equals_stock(got, expected)


def assert_equals_stock(got, expected):
    """:func:`assert_close` of a static step and Detectron2's, which ran just before it."""
    if (skipped := "kpts_num_skipped_batches") in expected[2]:
        # Counted over the life of the process.
        assert got[2].pop(skipped) == expected[2].pop(skipped) + 1
    # Detectron2 logs a mean over no instance as NaN, where the static step logs nothing.
    got, expected = (
        (*part[:2], {name: value for name, value in part[2].items() if value == value})
        for part in (got, expected)
    )
    assert_close(got, expected)

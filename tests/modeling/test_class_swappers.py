"""Others swap the classes of modules too, before us or after us: theirs stays, and so does ours."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from d2_static_sampler import install_sampler, uninstall_sampler
from d2_static_sampler.modeling.static_part import takes_step
from tests.modeling.models import MODELS
from tests.modeling.test_step import SEED, train_once


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


SHARDED = (
    "backbone",
    "proposal_generator",
    "roi_heads.box_head",
    "roi_heads.mask_head",
    "roi_heads",
)


def shard(model, mesh):
    for path in SHARDED:
        fully_shard(model.get_submodule(path), mesh=mesh)
    return fully_shard(model, mesh=mesh)


def sharded_parts(model):
    return [model, *map(model.get_submodule, SHARDED)]


@pytest.mark.parametrize("order", ["install first", "shard first", "shard in evaluation"])
@pytest.mark.parametrize("static_step", [False, True])
def test_fully_shard(order, static_step, mesh, warnings_of_detectron2):
    tiny = MODELS["mask_bitmaps"]()
    batch = tiny.batch((3, 0, 4))
    stock = install_sampler(tiny.build(), "static", seed=SEED)
    expected = train_once(stock, batch, dtype=torch.float32)[0]
    model = tiny.build()
    if order == "shard first":
        shard(model, mesh)
    if order == "shard in evaluation":
        model.eval()
    install_sampler(model, "static", static_step=static_step, seed=SEED)
    if order != "shard first":
        shard(model, mesh)
    for mode in (False, True, False, True):
        model.train(mode)
        assert all(isinstance(part, FSDPModule) for part in sharded_parts(model))
    losses = train_once(model, batch, dtype=torch.float32)[0]
    for name, loss in expected.items():
        torch.testing.assert_close(losses[name], loss, rtol=1e-5, atol=1e-7)
    if static_step:  # but for the mask head, whose layers are called past its hooks
        assert all(map(takes_step, (model.proposal_generator, model.roi_heads)))
        assert sum("mask head has a hook" in text for text in warnings_of_detectron2) == 1
    else:
        assert warnings_of_detectron2 == []
    uninstall_sampler(model)
    assert all(isinstance(part, FSDPModule) for part in sharded_parts(model))
    assert "d2_static_sampler" not in {c.__module__.split(".")[0] for c in type(model).__mro__}


def swap(module):
    """As libraries do it: a subclass of whatever class the module has."""
    cls = type(module)

    def train(self, mode=True):
        self.switches = getattr(self, "switches", 0) + 1
        return super(swapped, self).train(mode)

    swapped = type(f"Swapped{cls.__name__}", (cls,), {"train": train, "is_swapped": True})
    module.__class__ = swapped


@pytest.mark.parametrize("path", ["", "proposal_generator", "roi_heads"])
def test_a_swap_after_the_install_stays(path, warnings_of_detectron2):
    tiny = MODELS["faster_fpn"]()
    batch = tiny.batch((3, 0, 4))
    stock = install_sampler(tiny.build(), "static", seed=SEED)
    expected = train_once(stock, batch)[0]
    model = install_sampler(tiny.build(), "static", static_step=True, seed=SEED)
    part = model.get_submodule(path) if path else model
    swap(part)
    for mode in (False, True):
        part.train(mode)
        assert part.is_swapped
    assert part.switches == 2
    losses = train_once(model, batch)[0]
    for name, loss in expected.items():
        torch.testing.assert_close(losses[name], loss)
    assert takes_step(part)
    assert warnings_of_detectron2 == []
    uninstall_sampler(model)
    assert part.is_swapped
    assert isinstance(part, nn.Module)
    assert not hasattr(type(part), "_own_class")
    part.eval()
    assert part.switches == 3

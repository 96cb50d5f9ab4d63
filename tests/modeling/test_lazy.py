"""A sampler in models of the zoo's LazyConfigs: one line, saved, loaded and overridden."""

from __future__ import annotations

import pytest
import torch
from detectron2.config import LazyCall, LazyConfig, instantiate
from detectron2.modeling.backbone import ResNet
from detectron2.utils.events import EventStorage
from omegaconf import DictConfig

from d2_static_sampler import install_sampler
from d2_static_sampler.modeling import installed_samplers
from tests.helpers import make_batch
from tests.modeling.models import zoo_config

HEADS = {
    "StandardROIHeads": "common/models/mask_rcnn_fpn.py",
    "CascadeROIHeads": "common/models/cascade_rcnn.py",
}
SMALL = (
    "model.proposal_generator.batch_size_per_image=32",
    "model.proposal_generator.post_nms_topk=[50,50]",
    "model.roi_heads.batch_size_per_image=16",
)


def lazy_config(heads):
    model = LazyConfig.load(zoo_config(HEADS[heads])).model
    stages = LazyCall(ResNet.make_default_stages)(depth=18, norm="FrozenBN")
    model.backbone.bottom_up.stages = stages
    cfg = DictConfig({"model": model, "sampler": {"impl": "static"}}, flags={"allow_objects": True})
    return LazyConfig.apply_overrides(cfg, list(SMALL))


def check(model, impl, heads):
    """Both heads, of the right class, sample with ``impl`` in a forward of training."""
    assert type(model.roi_heads).__name__ == heads
    samplers = installed_samplers(model)
    assert list(samplers) == [model.proposal_generator, model.roi_heads]
    assert [head.impl for head in samplers.values()] == [impl, impl]
    with EventStorage() as storage, torch.no_grad():
        losses = model.train()(make_batch((2, 0), masks="polygon", size=64))
    assert all(torch.isfinite(loss) for loss in losses.values())
    logged = {name: value for name, (value, _) in storage.latest().items()}
    assert logged["rpn/num_pos_anchors"] + logged["rpn/num_neg_anchors"] == 32
    assert [head.calls for head in samplers.values()] == [1, 1]


@pytest.mark.parametrize("heads", HEADS)
def test_the_line_in_a_script(heads):
    cfg = LazyConfig.apply_overrides(lazy_config(heads), ["sampler.impl=compiled"])
    check(install_sampler(instantiate(cfg.model), cfg.sampler.impl), "compiled", heads)


@pytest.mark.parametrize("heads", HEADS)
def test_the_line_in_a_config_is_saved_loaded_and_overridden(heads, tmp_path):
    cfg = lazy_config(heads)
    cfg.model = LazyCall(install_sampler)(model=cfg.model, cfg_or_name_or_sampler="${sampler.impl}")
    LazyConfig.save(cfg, str(tmp_path / "config.yaml"))
    loaded = LazyConfig.load(str(tmp_path / "config.yaml"))
    check(instantiate(loaded.model), "static", heads)
    LazyConfig.apply_overrides(loaded, ["sampler.impl=naive"])
    assert installed_samplers(instantiate(loaded.model)) == {}

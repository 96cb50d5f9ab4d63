"""Installing: per model, undone exactly, invisible to everything but the sampling."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import detectron2.modeling.proposal_generator.rpn as stock_rpn
import detectron2.modeling.roi_heads.roi_heads as stock_roi_heads
import pytest
import torch
from detectron2.modeling import build_model
from detectron2.modeling.proposal_generator.rpn import RPN
from detectron2.modeling.roi_heads import ROIHeads, StandardROIHeads

from d2_static_sampler import (
    LABEL_SAMPLER_REGISTRY,
    build_label_sampler,
    install_sampler,
    uninstall_sampler,
)
from d2_static_sampler.modeling import installed_samplers
from tests.helpers import make_batch, small_config, small_model, step

IMPLS = ("naive", "static", "compiled")
STOCK_FUNCTION = stock_rpn.subsample_labels


def methods(model):
    return (
        type(model.proposal_generator),
        type(model.roi_heads),
        model.proposal_generator.label_and_sample_anchors.__func__,
        model.roi_heads.label_and_sample_proposals.__func__,
    )


def test_naive_is_detectron2_itself():
    model = small_model()
    stock = methods(model)
    assert stock == (
        RPN,
        StandardROIHeads,
        RPN.label_and_sample_anchors,
        ROIHeads.label_and_sample_proposals,
    )
    assert install_sampler(model, "naive") is model
    assert methods(model) == stock
    install_sampler(model, "static")
    assert methods(model) != stock
    install_sampler(model, "naive")
    assert methods(model) == stock
    assert stock_rpn.subsample_labels is stock_roi_heads.subsample_labels is STOCK_FUNCTION


@pytest.mark.parametrize("first", IMPLS)
@pytest.mark.parametrize("second", IMPLS)
def test_a_second_install_replaces_the_first(first, second):
    model = small_model()
    stock = methods(model)
    install_sampler(install_sampler(model, first), second)
    impls = [head.impl for head in installed_samplers(model).values()]
    assert impls == ([] if second == "naive" else [second] * 2)
    assert uninstall_sampler(model) is model
    assert methods(model) == stock
    assert not any("_label_sampler" in vars(module) for module in model.modules())


def test_two_models_in_one_process(monkeypatch):
    """A naive model calls Detectron2's function, a static one beside it never does."""
    naive, static = small_model(), install_sampler(small_model(), "static")
    calls = []

    def count(*args):
        calls.append(args)
        return STOCK_FUNCTION(*args)

    for module in (stock_rpn, stock_roi_heads):
        monkeypatch.setattr(module, "subsample_labels", count)
    batch = make_batch((2, 3))
    step(static, batch)
    assert calls == []
    step(naive, batch)
    assert len(calls) == 4  # two heads, two images


def test_seed_depends_on_nothing_else():
    """The samples repeat under the seed, whatever torch's generator does."""

    def picks(seed, torch_seed):
        model = install_sampler(small_model(), "static", seed=seed)
        batch = make_batch((2, 3))
        torch.manual_seed(torch_seed)
        images = model.preprocess_image(batch)
        features = model.backbone(images.tensor)
        rpn = model.proposal_generator
        anchors = rpn.anchor_generator([features[f] for f in rpn.in_features])
        truth = [x["instances"] for x in batch]
        first, second = (
            torch.stack(rpn.label_and_sample_anchors(anchors, truth)[0]) for _ in range(2)
        )
        assert not torch.equal(first, second)
        return torch.stack([first, second])

    assert torch.equal(picks(7, 0), picks(7, 1))
    assert not torch.equal(picks(7, 0), picks(8, 0))


class Renamed(StandardROIHeads):
    """A user's class that overrides nothing of the sampling."""


Renamed.__name__ = Renamed.__qualname__ = "StandardROIHeads"


def test_a_users_class_of_the_same_name():
    model = small_model()
    model.roi_heads.__class__ = Renamed
    install_sampler(model, "static")
    assert installed_samplers(model)[model.roi_heads].calls == 0
    step(model, make_batch((2,)))
    assert installed_samplers(model)[model.roi_heads].calls == 1
    assert type(uninstall_sampler(model).roi_heads) is Renamed


def test_a_model_without_a_sampler_gets_one_warning(warnings_of_detectron2):
    cfg = small_config("MODEL.META_ARCHITECTURE", "RetinaNet")
    cfg.MODEL.RESNETS.OUT_FEATURES = ["res3", "res4", "res5"]
    cfg.MODEL.FPN.IN_FEATURES = ["res3", "res4", "res5"]
    cfg.MODEL.BACKBONE.NAME = "build_retinanet_resnet_fpn_backbone"
    cfg.MODEL.RETINANET.NUM_CLASSES = 3
    cfg.MODEL.ANCHOR_GENERATOR.SIZES = [[16], [32], [64], [128], [256]]
    model = build_model(cfg)
    assert install_sampler(model, "static") is model
    assert len(warnings_of_detectron2) == 1
    assert "RetinaNet" in warnings_of_detectron2[0]


def test_own_samplers_by_object_and_by_name():
    seen = []

    def own(labels, **kwargs):
        seen.append((tuple(labels.shape), kwargs["bg_label"]))
        return build_label_sampler("static")(labels, **kwargs)

    model = install_sampler(small_model(), own)
    step(model, make_batch((2, 1)))
    assert [bg for _, bg in seen] == [0, 3]  # the RPN first, one call a head
    assert all(shape[0] == 2 for shape, _ in seen)

    class OwnSampler:
        def __call__(self, labels, **kwargs):
            return own(labels, **kwargs)

    LABEL_SAMPLER_REGISTRY.register(OwnSampler)
    try:
        cfg = small_config("MODEL.SAMPLER.IMPL", "OwnSampler")
        model = install_sampler(small_model(), cfg)
        assert [head.impl for head in installed_samplers(model).values()] == ["OwnSampler"] * 2
    finally:
        del LABEL_SAMPLER_REGISTRY._obj_map["OwnSampler"]


@pytest.mark.parametrize("impl", ["static", "compiled"])
@pytest.mark.parametrize("select", ["auto", "rank", "topk"])
def test_config_chooses_the_selection(impl, select):
    opts = ("MODEL.SAMPLER.IMPL", impl, "MODEL.SAMPLER.SELECT", select)
    model = install_sampler(small_model(), small_config(*opts))
    assert {head.sampler.select for head in installed_samplers(model).values()} == {select}


def test_topk_trains():
    opts = ("MODEL.SAMPLER.IMPL", "static", "MODEL.SAMPLER.SELECT", "topk")
    losses, _, logged = step(
        install_sampler(small_model(), small_config(*opts)), make_batch((2, 0))
    )
    assert all(loss.isfinite() for loss in losses.values())
    assert logged["rpn/num_pos_anchors"] + logged["rpn/num_neg_anchors"] == 64


def test_wrong_selection_is_refused():
    with pytest.raises(ValueError, match=r"MODEL\.SAMPLER\.SELECT is 'fast'.*auto, rank, topk"):
        install_sampler(small_model(), small_config("MODEL.SAMPLER.SELECT", "fast"))


@pytest.mark.parametrize(
    ("choice", "options", "error", "message"),
    [
        ("fast", {}, ValueError, r"'fast'.*compiled, naive, static"),
        (3, {}, TypeError, "3"),
        ("static", {"seed": -2}, ValueError, "-2"),
    ],
)
def test_wrong_choices_leave_the_model_as_it_is(choice, options, error, message):
    model = install_sampler(small_model(), "static")
    before = methods(model)
    with pytest.raises(error, match=message):
        install_sampler(model, choice, **options)
    assert methods(model) == before
    assert len(installed_samplers(model)) == 2


def test_import_twice_reload_and_any_order():
    import d2_static_sampler
    import d2_static_sampler.modeling.install as module

    importlib.reload(d2_static_sampler)
    importlib.reload(module)
    again = module.install_sampler(small_model(), "static")
    step(again, make_batch((1,)))

    path = Path(d2_static_sampler.__file__)
    spec = importlib.util.spec_from_file_location(
        "another_path", path, submodule_search_locations=[str(path.parent)]
    )
    other = sys.modules["another_path"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(other)
    importlib.import_module("another_path.data")
    model = other.install_sampler(small_model(), "static")
    step(model, make_batch((1,)))
    assert type(other.uninstall_sampler(model).roi_heads) is StandardROIHeads

    # An import has operators of its own; a module that is reloaded leaves them as they are.
    for package in (other, d2_static_sampler):
        model = package.install_sampler(small_model(), "static", static_step=True)
        step(model, make_batch((1,)))
    for name in ("matching", "matching_cpu"):
        importlib.reload(sys.modules[f"d2_static_sampler.ops.{name}"])
    step(model, make_batch((1,)))

    script = """
import d2_static_sampler, sys
assert "detectron2" not in sys.modules
d2_static_sampler.install_sampler
from detectron2.modeling.proposal_generator.rpn import RPN, subsample_labels
from detectron2.modeling.sampling import subsample_labels as own
assert subsample_labels is own and RPN.__module__ == "detectron2.modeling.proposal_generator.rpn"
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_sampling_function_of_ones_own_is_not_replaced_in_silence(
    monkeypatch, warnings_of_detectron2
):
    monkeypatch.setattr(stock_rpn, "subsample_labels", lambda *args: None)
    install_sampler(small_model(), "static")
    (warning,) = warnings_of_detectron2
    assert "rpn.subsample_labels has been replaced" in warning

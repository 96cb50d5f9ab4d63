"""Every kind of model that Detectron2 has trains with every IMPL, and logs stock's counts."""

from __future__ import annotations

import copy

import pytest
import torch
from config_files import merge_file
from detectron2.config import get_cfg
from detectron2.modeling import build_model
from detectron2.utils.events import EventStorage

from d2_static_sampler import add_sampler_config, install_sampler, uninstall_sampler
from d2_static_sampler.modeling import installed_samplers
from tests.helpers import CONFIGS, step
from tests.modeling.models import (
    CASES,
    MISSING,
    MODELS,
    ROI_SLOTS,
    RPN_SLOTS,
    RUNNABLE,
    RUNNABLE_CASES,
    eager_focal_loss,  # noqa: F401
    zoo_config,
)

IMPLS = ("naive", "static", "compiled")
COUNTS = (
    "rpn/num_pos_anchors",
    "rpn/num_neg_anchors",
    "roi_head/num_fg_samples",
    "roi_head/num_bg_samples",
)


def built(name, impl, *opts):
    """The model as a training script makes it: built, then installed by its config."""
    tiny = MODELS[name]()
    cfg = tiny.cfg.clone()
    cfg.MODEL.SAMPLER.IMPL = impl
    return tiny, install_sampler(tiny.build(*opts), cfg)


@torch.no_grad()
def logged_counts(model, batch):
    with EventStorage() as storage:
        model(batch)
    return {key: storage.latest()[key][0] for key in COUNTS if key in storage.latest()}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", RUNNABLE)
def test_trains(name, impl):
    """Finite losses and gradients, down to the first layer, with and without ground truth."""
    tiny, model = built(name, impl)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for i, num_gt in enumerate([(3, 2, 4), (0, 3, 1), (2, 0, 0)]):
        losses, gradients, _ = step(model, tiny.batch(num_gt, seed=i))
        optimizer.step()
        assert all(torch.isfinite(loss) for loss in losses.values())
        assert all(torch.isfinite(gradient).all() for gradient in gradients.values())
        stem = [key for key in gradients if key.endswith("stem.conv1.weight")]
        assert gradients[stem[0]].any()
    calls = [head.calls for head in installed_samplers(model).values()]
    assert calls == ([] if impl == "naive" else [3] * len(tiny.heads))


@pytest.mark.parametrize(("name", "case"), RUNNABLE_CASES)
def test_logged_counts_are_stocks(name, case):
    """What could be picked is equal in a first step, so the counts of what was picked are too."""
    num_gt, opts = CASES[case]
    tiny = MODELS[name]()
    model, batch = tiny.build(*opts), tiny.batch(num_gt)
    counts = [logged_counts(install_sampler(model, impl), batch) for impl in IMPLS]
    assert len(counts[0]) == 2 * len(tiny.heads)
    assert counts[1] == counts[0]
    assert counts[2] == counts[0]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("usual", None),
        ("no truth", (0, RPN_SLOTS, 0, ROI_SLOTS)),
        # int(5 * 0.5) and int(5 * 0.25) positives, and negatives in the other slots.
        ("more of both than slots", (2, 3, 1, 4)),
    ],
)
def test_counts_of_the_contract(case, expected, impl):
    num_gt, opts = CASES[case]
    tiny, model = built("faster_fpn", impl, *opts)
    counts = tuple(logged_counts(model, tiny.batch(num_gt)).values())
    if expected is not None:
        assert counts == expected
    else:
        assert 0 < counts[0] < RPN_SLOTS * 0.5
        assert 0 < counts[2] <= ROI_SLOTS * 0.25
        assert counts[0] + counts[1] == RPN_SLOTS
        assert counts[2] + counts[3] == ROI_SLOTS


@pytest.mark.parametrize("impl", ["static", "compiled"])
@pytest.mark.parametrize(
    "name", [name for name in MODELS if name not in MISSING or name == "rotated"]
)
def test_installed_samplers(name, impl):
    """The heads that sample and nothing else; of a cascade's three stages, one."""
    tiny = MODELS[name]()
    model = tiny.build()
    classes = [type(module) for module in model.modules()]
    install_sampler(model, impl)
    samplers = installed_samplers(model)
    assert list(samplers) == [getattr(model, head) for head in tiny.heads]
    assert [head.impl for head in samplers.values()] == [impl] * len(tiny.heads)
    uninstall_sampler(model)
    assert [type(module) for module in model.modules()] == classes
    assert installed_samplers(model) == {}


@pytest.mark.usefixtures("eager_focal_loss")
@pytest.mark.parametrize("impl", ["static", "compiled"])
def test_retinanet_has_nothing_to_install(impl, warnings_of_detectron2):
    tiny = MODELS["retinanet"]()
    stock = tiny.build()
    model = install_sampler(copy.deepcopy(stock), impl)
    assert len(warnings_of_detectron2) == 1
    assert "RetinaNet" in warnings_of_detectron2[0]
    assert "no sampler installed" in warnings_of_detectron2[0]
    batch = tiny.batch((3, 0, 2))
    (losses, gradients, logged), (expected, expected_gradients, expected_logged) = (
        step(x, batch) for x in (model, stock)
    )
    assert losses == expected
    assert logged == expected_logged
    for key, gradient in expected_gradients.items():
        assert torch.equal(gradients[key], gradient), key


@pytest.mark.parametrize("impl", ["static", "compiled"])
def test_own_classes_keep_their_methods(impl, warnings_of_detectron2):
    """A user's subclasses that leave the sampling alone get it, without a warning."""
    tiny, model = built("own_classes", impl)
    batch = tiny.batch((3, 0, 2))
    _, _, logged = step(model, batch)
    assert warnings_of_detectron2 == []
    assert model.roi_heads.sampled == [ROI_SLOTS] * 3
    assert logged["roi_head/num_fg_samples"] > 0
    stock_tiny, stock = built("faster_fpn", impl)
    assert type(stock.proposal_generator).__name__ == "RPN"
    torch.manual_seed(0)
    losses, _, _ = step(model, batch)
    torch.manual_seed(0)
    expected, _, _ = step(stock, stock_tiny.batch((3, 0, 2)))
    assert torch.equal(losses["loss_rpn_loc"], expected["loss_rpn_loc"] * 0.5)


@pytest.mark.parametrize("impl", IMPLS)
def test_precomputed_proposals(impl):
    """0, 1 and 700 proposals, and no ground truth at all: as many are picked as there are."""
    tiny, model = built("precomputed", impl)
    assert model.proposal_generator is None
    batch = tiny.batch((0, 0, 0))
    assert [len(item["proposals"]) for item in batch] == [0, 1, 700]
    losses, _, logged = step(model, batch)
    assert all(torch.isfinite(loss) for loss in losses.values())
    assert logged["roi_head/num_bg_samples"] == (0 + 1 + ROI_SLOTS) / 3
    _, _, logged = step(model, tiny.batch((0,)))
    assert logged["roi_head/num_bg_samples"] == 0


@pytest.mark.skipif("point_rend" in MISSING, reason=MISSING.get("point_rend", ""))
def test_what_point_rend_refuses_stays_refused():
    """Its own code takes the labels of no point at all for an error."""
    errors = []
    for impl in IMPLS:
        tiny, model = built("point_rend", impl)
        with pytest.raises(Exception, match="non-empty") as raised:
            step(model, tiny.batch((0, 0, 0)))
        errors.append(raised.type)
        losses, _, _ = step(model, tiny.batch((0, 2, 0)))
        assert all(torch.isfinite(loss) for loss in losses.values())
    assert errors == [errors[0]] * len(IMPLS)


LEAVES = {
    "mask_rcnn_R_50_FPN": "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x.yaml",
    "keypoint_rcnn_R_50_FPN": "COCO-Keypoints/keypoint_rcnn_R_50_FPN_1x.yaml",
    "cascade_mask_rcnn_R_50_FPN": "Misc/cascade_mask_rcnn_R_50_FPN_1x.yaml",
    "faster_rcnn_R_50_C4": "COCO-Detection/faster_rcnn_R_50_C4_1x.yaml",
    "faster_rcnn_R_50_DC5": "COCO-Detection/faster_rcnn_R_50_DC5_1x.yaml",
    "rpn_R_50_FPN": "COCO-Detection/rpn_R_50_FPN_1x.yaml",
    "fast_rcnn_R_50_FPN": "COCO-Detection/fast_rcnn_R_50_FPN_1x.yaml",
}
# Left over from the base of the models with an FPN: nothing in these two reads them.
UNREAD = {
    "faster_rcnn_R_50_C4": ("FPN.IN_FEATURES", "ROI_BOX_HEAD.NAME", "ROI_BOX_HEAD.NUM_FC"),
    "faster_rcnn_R_50_DC5": ("FPN.IN_FEATURES",),
}


def leaf_config(name):
    cfg = get_cfg()
    add_sampler_config(cfg)
    merge_file(cfg, str(CONFIGS / f"{name}_static.yaml"))
    return cfg


def flat(node, prefix=""):
    """Every value of a config by its dotted key."""
    values = {}
    for key, value in node.items():
        values |= (
            flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return values


@pytest.mark.parametrize("name", LEAVES)
def test_a_leaf_is_the_model_zoos(name):
    """A leaf differs from the model zoo's file in nothing that a model or its training reads."""
    zoo = get_cfg()
    zoo.merge_from_file(zoo_config(LEAVES[name]))
    ours, expected = flat(leaf_config(name)), flat(zoo)
    differing = {key for key in expected if ours[key] != expected[key]}
    if not zoo.MODEL.MASK_ON:
        differing = {key for key in differing if "ROI_MASK_HEAD" not in key}
    assert differing == {f"MODEL.{key}" for key in UNREAD.get(name, ())}
    assert {key for key in ours if key not in expected} == {
        key for key in ours if key.startswith("MODEL.SAMPLER.")
    }


OTHER_LEAVES = ("rrpn_faster_rcnn_R_50_FPN", "pointrend_rcnn_R_50_FPN")


@pytest.mark.parametrize("name", [*LEAVES, *OTHER_LEAVES])
def test_a_leaf_builds(name):
    if name.startswith("pointrend") and "point_rend" in MISSING:
        pytest.skip(MISSING["point_rend"])
    cfg = leaf_config(name)
    cfg.merge_from_list(["MODEL.DEVICE", "cpu", "MODEL.WEIGHTS", ""])
    model = install_sampler(build_model(cfg), cfg)
    without = {"rpn_R_50_FPN": "roi_heads", "fast_rcnn_R_50_FPN": "proposal_generator"}
    heads = [x for x in ("proposal_generator", "roi_heads") if x != without.get(name)]
    assert list(installed_samplers(model)) == [getattr(model, head) for head in heads]
    assert {head.impl for head in installed_samplers(model).values()} == {"static"}

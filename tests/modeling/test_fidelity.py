"""With stock's own picks, every loss and gradient is stock's, bit for bit."""

from __future__ import annotations

import copy

import detectron2.modeling.proposal_generator.rpn as stock_rpn
import detectron2.modeling.roi_heads.roi_heads as stock_roi_heads
import pytest
import torch
from detectron2.config import LazyCall, instantiate
from detectron2.modeling.meta_arch import GeneralizedRCNN
from detectron2.modeling.proposal_generator.rpn import RPN
from detectron2.modeling.roi_heads import StandardROIHeads
from detectron2.structures import Boxes, Instances, Keypoints
from detectron2.utils.events import EventStorage

from d2_static_sampler import install_sampler
from d2_static_sampler.modeling import installed_samplers
from tests.helpers import (
    ReplaySampler,
    make_batch,
    record_picks,
    small_config,
    small_model,
    step,
)

FASTER = ()
MASK = ("MODEL.MASK_ON", True)
RPN_ONLY = ("MODEL.META_ARCHITECTURE", "ProposalNetwork")
C4 = (
    "MODEL.BACKBONE.NAME", "build_resnet_backbone",
    "MODEL.RESNETS.OUT_FEATURES", ["res4"],
    "MODEL.RPN.IN_FEATURES", ["res4"],
    "MODEL.ANCHOR_GENERATOR.SIZES", [[16, 32, 64]],
    "MODEL.ROI_HEADS.NAME", "Res5ROIHeads",
    "MODEL.ROI_HEADS.IN_FEATURES", ["res4"],
    "MODEL.RESNETS.DEPTH", 50,
    "MODEL.RESNETS.RES2_OUT_CHANNELS", 32,
    "MODEL.RESNETS.STEM_OUT_CHANNELS", 16,
    "MODEL.RESNETS.WIDTH_PER_GROUP", 8,
)  # fmt: skip
MODELS = {"rpn": (RPN_ONLY, ""), "faster": (FASTER, ""), "mask": (MASK, "polygon"), "c4": (C4, "")}


@pytest.mark.parametrize("num_gt", [(3,), (2, 3), (0, 3), (0, 0), (40, 1)])
@pytest.mark.parametrize("name", MODELS)
def test_losses_gradients_and_logs(name, num_gt, monkeypatch):
    opts, masks = MODELS[name]
    model = small_model(*opts)
    replayed = copy.deepcopy(model)
    batch = make_batch(num_gt, masks=masks)
    (losses, gradients, logged), picks = record_picks(model, batch, monkeypatch)
    install_sampler(replayed, sampler := ReplaySampler(picks))
    replayed_losses, replayed_gradients, replayed_logged = step(replayed, batch)

    assert sampler.calls == []
    assert replayed_losses.keys() == losses.keys()
    assert replayed_gradients.keys() == gradients.keys()
    for key, loss in losses.items():
        assert torch.equal(replayed_losses[key], loss), key
    for key, gradient in gradients.items():
        assert torch.equal(replayed_gradients[key], gradient), key
    assert replayed_logged == logged


@pytest.mark.parametrize("impl", ["static", "compiled"])
@pytest.mark.parametrize("name", MODELS)
def test_ten_iterations_with_empty_images(name, impl):
    """Finite losses; an empty image gives only negatives; counts are logged as stock logs them."""
    opts, masks = MODELS[name]
    torch.manual_seed(0)
    model = install_sampler(small_model(*opts), impl)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for i in range(10):
        batch = make_batch((0, 3) if i % 2 else (0, 0), masks=masks, size=64, seed=i)
        losses, _, logged = step(model, batch)
        optimizer.step()
        assert all(torch.isfinite(loss) for loss in losses.values())
        if not i % 2:
            assert logged["rpn/num_pos_anchors"] == 0
            assert logged.get("roi_head/num_fg_samples", 0) == 0


def anchors_of(model, batch):
    images = model.preprocess_image(batch)
    features = model.backbone(images.tensor)
    rpn = model.proposal_generator
    return rpn.anchor_generator([features[name] for name in rpn.in_features])


def test_label_vectors_are_stocks(monkeypatch):
    model = small_model()
    batch = make_batch((3, 0, 5))
    anchors, truth = anchors_of(model, batch), [x["instances"] for x in batch]
    rpn = model.proposal_generator
    picks = []

    def record(*args, stock=stock_rpn.subsample_labels):
        picks.append(stock(*args))
        return picks[-1]

    monkeypatch.setattr(stock_rpn, "subsample_labels", record)
    labels, boxes = rpn.label_and_sample_anchors(anchors, truth)
    monkeypatch.undo()
    install_sampler(model, ReplaySampler([picks]))
    replayed_labels, replayed_boxes = rpn.label_and_sample_anchors(anchors, truth)
    for got, expected in zip([*replayed_labels, *replayed_boxes], [*labels, *boxes], strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)

    install_sampler(model, "static")
    labels, _ = rpn.label_and_sample_anchors(anchors, truth)
    for vector in labels:
        assert set(vector.unique().tolist()) <= {-1, 0, 1}
        assert (vector >= 0).sum() == rpn.batch_size_per_image


def proposals_and_targets(masks="polygon"):
    """Two images, the second without ground truth, every proposal with fields of its own."""
    proposals, targets = [], []
    for (truth,) in ([x["instances"]] for x in make_batch((3, 0), masks=masks)):
        corner = torch.rand(50, 2) * 60
        boxes = Boxes(torch.cat([corner, corner + 20], dim=1))
        found = Instances(truth.image_size, proposal_boxes=boxes)
        found.objectness_logits = torch.rand(50)
        truth.gt_keypoints = Keypoints(torch.rand(len(truth), 4, 3))
        truth.gt_own = torch.arange(len(truth)) * 10
        proposals.append(found)
        targets.append(truth)
    return proposals, targets


@pytest.mark.parametrize("masks", ["polygon", "bitmask"])
@pytest.mark.parametrize("append_gt", [True, False])
def test_instances_have_stocks_fields(append_gt, masks, monkeypatch):
    heads = small_model().roi_heads
    heads.proposal_append_gt = append_gt
    proposals, targets = proposals_and_targets(masks)
    before = [copy.deepcopy(x.get_fields()).keys() for x in (*proposals, *targets)]
    picks = []

    def record(*args, stock=stock_roi_heads.subsample_labels):
        picks.append(stock(*args))
        return picks[-1]

    monkeypatch.setattr(stock_roi_heads, "subsample_labels", record)
    with EventStorage() as storage:
        expected = heads.label_and_sample_proposals(proposals, targets)
        logged = storage.latest()
    monkeypatch.undo()
    install_sampler(heads, ReplaySampler([picks]))
    with EventStorage() as storage:
        got = heads.label_and_sample_proposals(proposals, targets)
        assert storage.latest() == logged
    for a, b in zip(got, expected, strict=True):
        assert list(a.get_fields()) == list(b.get_fields())
        assert a.image_size == b.image_size
        for name, value in b.get_fields().items():
            assert type(a.get(name)) is type(value)
            assert same(a.get(name), value), name
    assert [x.get_fields().keys() for x in (*proposals, *targets)] == before


def same(a, b) -> bool:
    if hasattr(a, "polygons"):
        return all(
            (p == q).all()
            for polygons in zip(a.polygons, b.polygons, strict=True)
            for p, q in zip(*polygons, strict=True)
        )
    a, b = getattr(a, "tensor", a), getattr(b, "tensor", b)
    return a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("impl", ["naive", "static"])
def test_what_stock_refuses_stays_refused(impl):
    heads = install_sampler(small_model().roi_heads, impl)
    proposals, targets = proposals_and_targets()
    targets[0].gt_listed = ["a", "b", "c"]
    with EventStorage(), pytest.raises(TypeError):
        heads.label_and_sample_proposals(proposals, targets)
    proposals, targets = proposals_and_targets()
    targets[0].remove("gt_classes")
    with EventStorage(), pytest.raises(AttributeError, match="gt_classes"):
        heads.label_and_sample_proposals(proposals, targets)
    proposals, targets = proposals_and_targets()
    targets[0].gt_boxes.tensor[0, 2] = float("inf")
    with EventStorage(), pytest.raises(AssertionError):
        heads.label_and_sample_proposals(proposals, targets)


def lazy_model():
    """A Faster R-CNN from a LazyConfig, whose parts are those of the YAML's model."""
    parts = small_model()
    cfg = small_config()
    shape = parts.backbone.output_shape()
    lazy = LazyCall(GeneralizedRCNN)(
        backbone=parts.backbone,
        proposal_generator=LazyCall(RPN)(**RPN.from_config(cfg, shape)),
        roi_heads=LazyCall(StandardROIHeads)(**StandardROIHeads.from_config(cfg, shape)),
        pixel_mean=cfg.MODEL.PIXEL_MEAN,
        pixel_std=cfg.MODEL.PIXEL_STD,
    )
    return instantiate(lazy).train()


@pytest.mark.parametrize("impl", ["static", "compiled"])
def test_a_lazy_model(impl):
    model = install_sampler(lazy_model(), impl)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for i in range(10):
        losses, _, logged = step(model, make_batch((0, 3) if i % 2 else (0, 0), size=64, seed=i))
        optimizer.step()
        assert all(torch.isfinite(loss) for loss in losses.values())
        assert logged["roi_head/num_fg_samples"] > 0 or not i % 2
    assert [head.calls for head in installed_samplers(model).values()] == [10, 10]


def test_one_anchor_a_cell_on_a_tiny_image():
    model = small_model(
        "MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS",
        [[1.0]],
        "MODEL.RESNETS.NORM",
        "FrozenBN",
        "MODEL.FPN.NORM",
        "",
    )
    install_sampler(model, "static")
    losses, _, _ = step(model, make_batch((1,), size=32))
    assert all(torch.isfinite(loss) for loss in losses.values())

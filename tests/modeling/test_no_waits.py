"""Nothing of the static step waits for the device or has a shape that depends on data, but NMS."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from detectron2.config import get_cfg
from detectron2.modeling import build_model
from detectron2.structures import BitMasks
from detectron2.utils.events import EventStorage

from d2_static_sampler import LabelSample, install_sampler, uninstall_sampler
from d2_static_sampler.losses.anchors import BoxLoss, anchor_losses, label_anchors
from d2_static_sampler.losses.keypoints import (
    has_visible_keypoint,
    keypoint_heatmap,
    keypoint_loss,
)
from d2_static_sampler.losses.masks import crop_masks, mask_loss_mean, mask_stats
from d2_static_sampler.losses.regions import (
    OutputLoss,
    RegionRule,
    label_regions,
    region_losses,
    take_regions,
)
from d2_static_sampler.modeling import proposals
from d2_static_sampler.ops.matching import MatchRule
from d2_static_sampler.ops.pooling import pool_in_fixed_shapes
from d2_static_sampler.profiling.op_counter import count_data_dependent_ops
from tests.helpers import make_batch
from tests.modeling.models import MODELS, zoo_config

FILES = {
    "faster": "COCO-Detection/faster_rcnn_R_50_FPN_1x.yaml",
    "mask": "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x.yaml",
}
# B images, N candidates, G ground truth, K samples, C classes, S side of a mask, J keypoints.
B, N, G, K, C, S, J = 2, 40, 3, 8, 5, 14, 4
RULE = MatchRule((0.3, 0.7), (0, -1, 1), low_quality=True)
LOSSES = [BoxLoss(kind, (1.0, 1, 1, 1), 4.0, 0.0) for kind in ("smooth_l1", "giou", "ciou")]


class CountNames(count_data_dependent_ops):
    def __init__(self):
        super().__init__()
        self.ours = Counter()

    def record(self, name, data_dependent):
        super().record(name, data_dependent)
        namespace, _, op = name.partition("::")
        if namespace == "d2_static_sampler":
            self.ours[op] += 1


@pytest.fixture(scope="module", params=FILES)
def fixture_model(request):
    """The fixture of the design's section on data-dependent operations, after a forward."""
    cfg = get_cfg()
    cfg.merge_from_file(zoo_config(FILES[request.param]))
    small = ["MODEL.RESNETS.DEPTH", 18, "MODEL.RESNETS.RES2_OUT_CHANNELS", 64]
    # Narrow: as many operations, in a tenth of the time.
    small += ["MODEL.FPN.OUT_CHANNELS", 16, "MODEL.ROI_BOX_HEAD.FC_DIM", 32]
    small += ["MODEL.ROI_MASK_HEAD.CONV_DIM", 8]
    cfg.merge_from_list(["MODEL.DEVICE", "cpu", "MODEL.WEIGHTS", "", *small])
    torch.manual_seed(0)
    model = build_model(cfg).train()
    model.proposal_generator.rpn_head.anchor_deltas.weight.data.zero_()
    install_sampler(model, "static", static_step=True)
    with EventStorage():
        model(batch_of(request.param, 1))
    return request.param, model


def batch_of(name, num_images):
    batch = make_batch((3,) * num_images, size=256)
    for item in batch if name == "mask" else ():
        truth = item["instances"]
        truth.gt_masks = BitMasks(torch.ones(3, 256, 256, dtype=torch.bool))
    return batch


@pytest.mark.parametrize("num_images", [1, 8])
def test_detectron2s_training_forward(fixture_model, num_images):
    """What the same model has without the static step."""
    name, model = fixture_model
    stock = uninstall_sampler(copy.deepcopy(model))
    with EventStorage(), CountNames() as count:
        stock(batch_of(name, num_images))
    fixed, each = {"faster": (21, 31), "mask": (30, 32)}[name]
    assert len(count.data_dependent) == fixed + each * num_images


@pytest.mark.parametrize("num_images", [1, 2, 4, 8])
def test_a_training_forward(fixture_model, num_images):
    name, model = fixture_model
    batch = batch_of(name, num_images)
    with EventStorage(), CountNames() as count:
        model(batch)
    assert count.by_line() == {}
    assert count.ours == {"nms_topk": 1}
    # With what is in the operators, NMS alone excepted.
    limit = {"faster": 1070, "mask": 1225 + 12 * num_images}[name]
    assert 500 < count.num_ops <= limit


@pytest.mark.parametrize("name", ["cascade", "keypoint", "faster_c4", "faster_dc5", "rpn_only"])
def test_other_models(name):
    """Polygons of masks are drawn on the host: one copy a batch, which no counter sees."""
    tiny = MODELS[name]()
    model = tiny.build("MODEL.RESNETS.NORM", "FrozenBN")
    install_sampler(model, "static", static_step=True)
    batch = tiny.batch((2, 0, 3))
    if name == "cascade":
        model.roi_heads.mask_on = False
    with EventStorage(), CountNames() as count:
        model(batch)
    assert count.by_line() == {}
    assert count.ours["nms_topk"] == 1


def test_a_planted_item_is_caught(fixture_model, monkeypatch):
    name, model = fixture_model

    def clip(boxes, limits):
        assert boxes.max().item() > 0
        return proposals.clip_boxes(boxes, limits)

    monkeypatch.setattr("d2_static_sampler.modeling.static_rpn.clip_boxes", clip)
    with EventStorage(), CountNames() as count:
        model(batch_of(name, 1))
    assert [op.file for op in count.data_dependent] == [__file__]


def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def whole(*shape):
    return empty(*shape, dtype=torch.int64)


def truth_of(*shape):
    return empty(*shape, dtype=torch.bool)


SAMPLE = LabelSample(whole(B, K), whole(B), whole(B))


@pytest.mark.parametrize("border", [-1, 0])
def test_labels_of_anchors_without_data(border):
    truth, anchors, limits = empty(B, G, 4), empty(N, 4), empty(B, 4)
    matches, labels, is_right = label_anchors(truth, whole(B), anchors, limits, RULE, border)
    assert (matches.shape, labels.shape, is_right.shape) == ((B, N), (B, N), ())


@pytest.mark.parametrize("loss", LOSSES, ids=[loss.kind for loss in LOSSES])
def test_losses_without_data(loss):
    logits, deltas = empty(B, N), empty(B, N, 4)
    found = anchor_losses(
        SAMPLE, whole(B, N), empty(B, G, 4), empty(N, 4), logits, deltas, K // 2, loss
    )
    assert {value.shape for value in found} == {()}
    for is_sigmoid in (False, True):
        of_output = OutputLoss(C, loss, K // 2, is_sigmoid)
        slots = (empty(B, K, 4), empty(B, K, 4), whole(B, K), truth_of(B, K), truth_of(B, K))
        found = region_losses(of_output, empty(B * K, C + 1), empty(B * K, 4 * C), *slots)
        assert {value.shape for value in (*found[:2], *found.stats, *found[3:])} == {()}


def test_proposals_without_data():
    index, levels = proposals.top_candidates([empty(B, 30), empty(B, 10)], 20)
    assert (index.shape, levels.shape) == ((B, 30), (30,))
    boxes = proposals.clip_boxes(empty(B, 30, 4), empty(B, 4))
    assert proposals.are_larger(boxes, 2).shape == (B, 30)


def test_regions_without_data():
    truth, rule = empty(B, G, 4), RegionRule(RULE, C)
    labels = label_regions(rule, truth, whole(B), whole(B, G), empty(B, N, 4), truth_of(B, N))
    assert labels.classes.shape == (B, N)
    regions = take_regions(SAMPLE, labels, empty(B, N, 4), truth, C)
    assert [value.shape[:2] for value in regions] == [(B, K)] * 6


def test_masks_and_keypoints_without_data():
    crops = crop_masks(truth_of(G, 64, 64), empty(K, 4), whole(K), S)
    assert crops.shape == (K, S, S)
    logits, classes, valid = empty(K, C, S, S), whole(K), truth_of(K)
    assert mask_loss_mean(logits, classes, crops, valid).shape == ()
    assert {value.shape for value in mask_stats(logits, classes, crops, valid)} == {()}
    assert has_visible_keypoint(empty(K, J, 3), empty(K, 4)).shape == (K,)
    cells, is_visible = keypoint_heatmap(empty(K, J, 3), empty(K, 4), S)
    assert keypoint_loss(empty(K, J, S, S), cells, is_visible, valid, None).shape == ()


def test_pooling_without_data():
    features = [empty(B, 3, 16, 16), empty(B, 3, 8, 8)]
    how = [0.25, 0.125], (7, 7), 0, True
    assert pool_in_fixed_shapes(features, empty(K, 5), whole(K), *how).shape == (K, 3, 7, 7)

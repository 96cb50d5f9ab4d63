"""What others see of a static step is Detectron2's: types, rows, edits that count, refusals."""

from __future__ import annotations

import pytest
import torch
from detectron2.modeling.roi_heads import select_foreground_proposals
from detectron2.structures import Boxes, Instances
from detectron2.utils.events import EventStorage

from d2_static_sampler import install_sampler
from d2_static_sampler.modeling.static_part import takes_step
from tests.helpers import NUM_CLASSES
from tests.modeling.models import MODELS
from tests.modeling.test_step import SEED, assert_equals_stock, train_once


def pair(tiny, *opts):
    """A model with Detectron2's step and one with the static step, of equal weights and samples."""
    return tuple(
        install_sampler(tiny.build(*opts), "static", static_step=is_static, seed=SEED)
        for is_static in (False, True)
    )


def inputs(tiny, model):
    """Images, features, proposals and ground truth, as a caller from outside has them."""
    batch = tiny.batch((3, 0, 9))
    truth = [item["instances"] for item in batch]
    images = model.preprocess_image(batch)
    features = model.backbone(images.tensor)
    proposals, losses = model.proposal_generator(images, features, truth)
    assert losses.keys() == {"loss_rpn_cls", "loss_rpn_loc"}
    return images, features, proposals, truth


@pytest.mark.parametrize("impl", ["static", "compiled"])
def test_anchors_are_labelled_for_any_caller(impl):
    tiny = MODELS["faster_fpn"]()
    results = []
    for is_static in (False, True):
        name = impl if is_static else "static"
        model = install_sampler(tiny.build(), name, static_step=is_static, seed=SEED)
        rpn = model.proposal_generator
        truth = [item["instances"] for item in tiny.batch((3, 0, 9))]
        maps = [torch.zeros(1, 1, 64 // 2**i, 64 // 2**i) for i in range(2, 7)]
        results.append(rpn.label_and_sample_anchors(rpn.anchor_generator(maps), truth))
    (labels, boxes), (static_labels, static_boxes) = results
    assert isinstance(static_labels, list)
    assert torch.equal(torch.stack(static_labels), torch.stack(labels))
    assert torch.equal(torch.stack(static_boxes), torch.stack(boxes))


def test_proposals_and_regions_are_lists_of_instances():
    tiny = MODELS["mask_bitmaps"]()
    seen = []
    for model in pair(tiny):
        with EventStorage():
            images, features, proposals, truth = inputs(tiny, model)
            assert isinstance(proposals, list)
            assert all(type(image) is Instances for image in [*proposals, *(proposals + proposals)])
            proposals[0] = proposals[0][:7]
            heads = model.roi_heads
            regions = heads.label_and_sample_proposals(proposals, truth)
            assert isinstance(regions, list)
            fg, _ = select_foreground_proposals(regions, NUM_CLASSES)
            handed_out, losses = heads(images, features, proposals, truth)
            assert isinstance(handed_out, list)
            assert handed_out[0].has("gt_masks")
            seen.append((proposals, regions, fg, handed_out, losses))
    *lists, losses = zip(*seen, strict=True)
    for of_stock, of_static in lists:
        assert_equal_instances(of_static, of_stock)
    assert losses[0].keys() == losses[1].keys()
    for name, loss in losses[0].items():
        torch.testing.assert_close(losses[1][name], loss, rtol=1e-5, atol=1e-7, msg=name)


def assert_equal_instances(got, expected):
    assert len(got) == len(expected)
    for image, of_stock in zip(got, expected, strict=True):
        assert image.image_size == of_stock.image_size
        assert image.get_fields().keys() == of_stock.get_fields().keys()
        for name, value in of_stock.get_fields().items():
            field = image.get(name)
            assert type(field) is type(value)
            tensors = [getattr(x, "tensor", x) for x in (field, value)]
            torch.testing.assert_close(*tensors, rtol=1e-6, atol=1e-5)


class Edits:
    """Counts the rows that a module's hook sees."""

    def __init__(self, module):
        self.rows = []
        module.register_forward_hook(lambda _, args, __: self.rows.append(len(args[0])))


@pytest.mark.parametrize("path", ["box_predictor", "box_head", "box_head.fc2", "mask_head.deconv"])
@pytest.mark.parametrize("is_later", [False, True])
def test_a_hook_sees_detectron2s_rows(path, is_later, warnings_of_detectron2):
    tiny = MODELS["mask_bitmaps"]()
    opts = ("MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", 64, "MODEL.RPN.POST_NMS_TOPK_TRAIN", 20)
    batch, seen = tiny.batch((3, 0, 9)), []
    for is_static in (False, True):
        model = tiny.build(*opts)
        heads = model.roi_heads
        edits = None if is_later else Edits(heads.get_submodule(path))
        install_sampler(model, "static", static_step=is_static, seed=SEED)
        if is_later:
            train_once(model, batch)
            edits = Edits(heads.get_submodule(path))
        for _ in range(2):
            train_once(model, batch)
        seen.append(edits.rows)
    assert seen[0] == seen[1]
    assert len(seen[0]) == 2
    (warning,) = warnings_of_detectron2
    assert "hook" in warning


# A model and how its truth has no masks: in which images.
WITHOUT_MASKS = [
    ("mask_bitmaps", (0,)), ("mask_polygons", (2,)), ("cascade", (0,)), ("mask_bitmaps", (0, 1, 2)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "images"), WITHOUT_MASKS)
def test_truth_without_masks_is_refused_as_by_detectron2(name, images):
    tiny = MODELS[name]()
    said = []
    for model in pair(tiny):
        batch = tiny.batch((3, 0, 9))
        for i in images:
            batch[i]["instances"].remove("gt_masks")
        with pytest.raises(AttributeError) as error, EventStorage():
            model(batch)
        said.append(str(error.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("name", ["mask_bitmaps", "mask_polygons", "cascade", "keypoint"])
def test_an_image_without_boxes_needs_no_masks(name):
    tiny = MODELS[name]()
    stock, static = pair(tiny)
    batch = tiny.batch((3, 0, 9))
    for field in ("gt_masks", "gt_keypoints"):
        if batch[1]["instances"].has(field):
            batch[1]["instances"].remove(field)
    expected = train_once(stock, batch)
    assert_equals_stock(train_once(static, batch), expected)


@pytest.mark.parametrize(
    ("field", "names"), [("gt_keypoints", "keypoint"), ("gt_classes", "cascade")]
)
def test_truth_without_other_fields(field, names):
    tiny = MODELS[names]()
    said = []
    for model in pair(tiny):
        batch = tiny.batch((3, 0, 9))
        batch[0]["instances"].remove(field)
        with pytest.raises(AttributeError) as error, EventStorage():
            model(batch)
        said.append(str(error.value))
    assert said[0] == said[1]


def test_a_cascades_figures_count_matches_of_any_class():
    """Of a class equal to NUM_CLASSES, too, which is that of the background."""
    tiny = MODELS["cascade"]()
    stock, static = pair(tiny)
    batch = tiny.batch((3, 2, 9))
    for item in batch:
        item["instances"].gt_classes[0] = NUM_CLASSES
    expected = train_once(stock, batch)
    got = train_once(static, batch)
    assert_equals_stock(got, expected)
    assert got[2]["stage1/roi_head/num_fg_samples"] > got[2]["roi_head/num_fg_samples"] - 1


def test_a_cascade_trains_on_what_its_later_matchers_ignore():
    tiny = MODELS["cascade"]()
    stock, static = pair(tiny)
    for model in (stock, static):
        for matcher in model.roi_heads.proposal_matchers[1:]:
            matcher.thresholds = [matcher.thresholds[0], 0.2, 0.9, matcher.thresholds[-1]]
            matcher.labels = [0, -1, 1]
    batch = tiny.batch((3, 2, 9))
    expected = train_once(stock, batch)
    assert_equals_stock(train_once(static, batch), expected)


class OwnBoxes(Boxes):
    def to(self, device):
        return OwnBoxes(self.tensor.to(device))

    def area(self):
        return super().area() * 0.5


def test_boxes_of_ones_own_keep_detectron2s_step(warnings_of_detectron2):
    tiny = MODELS["faster_fpn"]()
    stock, static = pair(tiny)
    batch = tiny.batch((3, 0, 9))
    batch[2]["instances"].gt_boxes = OwnBoxes(batch[2]["instances"].gt_boxes.tensor)
    expected = train_once(stock, batch)
    for _ in range(2):
        assert_equals_stock(train_once(static, batch), expected)
        expected = train_once(stock, batch)
    assert sum("OwnBoxes" in text for text in warnings_of_detectron2) == 2  # RPN and heads, once


def test_a_hook_that_is_taken_away_gives_the_step_back(warnings_of_detectron2):
    tiny = MODELS["faster_fpn"]()
    stock, static = pair(tiny)
    batch = tiny.batch((3, 0, 4))
    handle = static.roi_heads.box_head.register_forward_hook(lambda *_: None)
    assert not takes_step(static.roi_heads)
    expected = train_once(stock, batch)
    assert_equals_stock(train_once(static, batch), expected)
    handle.remove()
    assert takes_step(static.roi_heads)
    expected = train_once(stock, batch)
    assert_equals_stock(train_once(static, batch), expected)
    assert len(warnings_of_detectron2) == 1


@pytest.mark.parametrize("name", ["mask_bitmaps", "keypoint"])
def test_of_two_faults_the_first_is_refused(name):
    """An infinite box comes before what the heads' truth lacks, though its check is deferred."""
    tiny = MODELS[name]()
    for model in pair(tiny):
        batch = tiny.batch((3, 0, 9))
        truth = batch[0]["instances"]
        truth.gt_boxes.tensor[0] = torch.tensor([20.0, 20, torch.inf, 40])
        truth.remove("gt_masks" if truth.has("gt_masks") else "gt_keypoints")
        with pytest.raises(AssertionError), EventStorage():
            model(batch)

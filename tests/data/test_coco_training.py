"""Which annotations of one's own files remain for training: the count is Detectron2's own."""

from __future__ import annotations

import copy
import json
import re

import numpy as np
import pycocotools.mask as mask_util
import pytest
from detectron2.config import get_cfg
from detectron2.data import (
    DatasetCatalog,
    DatasetMapper,
    MetadataCatalog,
    get_detection_dataset_dicts,
)
from detectron2.data.datasets import load_coco_json
from detectron2.structures.masks import polygons_to_bitmask
from PIL import Image

from d2_static_sampler.data import Needs, register_coco_files

HEIGHT, WIDTH = 40, 60
NAME, STOCK = "own", "own_stock"
KEYPOINTS = ["left_eye", "right_eye", "nose"]
SQUARE = [10, 10, 30, 10, 30, 30, 10, 30]
VISIBLE = [12, 12, 2, 20, 12, 2, 16, 20, 1]
UNSEEN = [0] * 9
PIXELS = np.zeros((HEIGHT, WIDTH), np.uint8, order="F")
PIXELS[10:30, 10:30] = 1


def compressed(pixels):
    rle = mask_util.encode(pixels)
    return {"size": rle["size"], "counts": rle["counts"].decode()}


RLE = compressed(PIXELS)
EMPTY_RLE = compressed(np.zeros_like(PIXELS))
LIST_RLE = {"size": [HEIGHT, WIDTH], "counts": [410, *[20, 20] * 19, 20, 1210]}
EMPTY_LIST_RLE = {"size": [HEIGHT, WIDTH], "counts": [HEIGHT * WIDTH]}
FLAT = [[10, 20, 20, 20, 30, 20], [10, 10, 20, 20, 30, 30, 15, 15]]

POLYGONS = Needs(mask_format="polygon")
BITMASKS = Needs(mask_format="bitmask")
POINTS = Needs(num_keypoints=3, min_keypoints=1, flips=True)


@pytest.fixture
def root(tmp_path):
    for number in range(4):
        Image.new("RGB", (WIDTH, HEIGHT)).save(tmp_path / f"{number}.png")
    return tmp_path


def annotation(number, image_id=0, **fields):
    usual = {
        "id": number, "image_id": image_id, "category_id": 7, "bbox": [10, 10, 20, 20],
        "area": 400, "iscrowd": 0, "segmentation": [SQUARE], "keypoints": VISIBLE,
    }  # fmt: skip
    fields = {**usual, **fields}
    return copy.deepcopy({key: value for key, value in fields.items() if value is not ...})


def coco_file(annotations, num_images=4, **category):
    images = [
        {"id": i, "file_name": f"{i}.png", "height": HEIGHT, "width": WIDTH}
        for i in range(num_images)
    ]
    category = {"id": 7, "name": "face", "keypoints": KEYPOINTS, **category}
    return {"images": images, "annotations": annotations, "categories": [category]}


def remaining(coco, root, needs, caplog):
    """What the check says: the number, or the line with which it refuses."""
    path = root / "own.json"
    path.write_text(json.dumps(coco))
    caplog.clear()
    text = ""
    try:
        register_coco_files(NAME, str(path), str(root), needs=needs)
    except ValueError as error:
        text = str(error)
    finally:
        DatasetCatalog.data.pop(NAME, None)
        MetadataCatalog.data.pop(NAME, None)
    if text:
        assert "\n" not in text
        assert text.startswith(str(path))
        return text
    lines = [r.getMessage() for r in caplog.records if "remain for training" in r.getMessage()]
    assert len(lines) <= 1
    if not lines:
        return len(coco["annotations"])
    return int(re.search(r"(\d+) of \d+ annotations remain", lines[0])[1])


def stock_remaining(coco, root, needs):
    """What Detectron2 hands to the model; None where it or a head would fail."""
    path = root / "stock.json"
    path.write_text(json.dumps(coco))
    DatasetCatalog.data.pop(STOCK, None)
    MetadataCatalog.data.pop(STOCK, None)
    DatasetCatalog.register(STOCK, lambda: load_coco_json(str(path), str(root), STOCK))
    MetadataCatalog.get(STOCK).set(
        keypoint_names=KEYPOINTS, keypoint_flip_map=[("left_eye", "right_eye")]
    )
    cfg = get_cfg()
    cfg.DATASETS.TRAIN = (STOCK,)
    cfg.MODEL.MASK_ON = needs.mask_format is not None
    cfg.INPUT.MASK_FORMAT = needs.mask_format or "polygon"
    cfg.MODEL.KEYPOINT_ON = needs.num_keypoints is not None
    cfg.INPUT.MIN_SIZE_TRAIN = (HEIGHT,)
    try:
        least = needs.min_keypoints if cfg.MODEL.KEYPOINT_ON else 0
        records = get_detection_dataset_dicts([STOCK], min_keypoints=least)
        return sum(usable(DatasetMapper(cfg)(r)["instances"], needs) for r in records)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError):
        return None


def usable(instances, needs):
    if len(instances) and needs.num_keypoints is not None:
        assert instances.gt_keypoints.tensor.shape[1] == needs.num_keypoints
    if len(instances) and needs.mask_format == "polygon":
        # Detectron2 keeps flat polygons, and trains their masks towards nothing.
        return sum(polygons_to_bitmask(p, HEIGHT, WIDTH).any() for p in instances.gt_masks)
    assert needs.mask_format is None or not len(instances) or instances.has("gt_masks")
    return len(instances)


SEGMENTATIONS = [
    *[[SQUARE]] * 24, [SQUARE, FLAT[0]], [SQUARE, [1, 2, 3, 4]], [[1, 2, 3, 4]], [[1] * 7],
    [FLAT[0]], [FLAT[1]], [FLAT[0], [1, 2]],
]  # fmt: skip
RLES = [RLE, LIST_RLE, EMPTY_RLE, EMPTY_LIST_RLE]
BOXES = [
    *[[10, 10, 20, 20]] * 12, [-5, -5, 500, 500], [10, 10, 0, 20], [10, 10, 20, 0],
    [WIDTH, 3, 9, 9], [-9, 3, 9, 9], [10, 10, 1e-6, 5], [59.999999, 2, 5, 5],
]  # fmt: skip


def draw(rng, needs):
    """A file with a little of everything; faults that end a training are rare."""

    def choose(choices):
        return choices[rng.integers(len(choices))]

    annotations = []
    for number in range(1, rng.integers(1, 9)):
        fields = {"segmentation": choose(SEGMENTATIONS), "keypoints": choose([VISIBLE, UNSEEN])}
        if needs.mask_format != "polygon" and rng.random() < 0.3:
            fields["segmentation"] = choose(RLES)
        if needs.mask_format is None or rng.random() < 0.05:
            fields["segmentation"] = choose([..., None, [], RLE, [SQUARE]])
        if rng.random() < 0.04:
            fields["keypoints"] = choose([..., None, [], VISIBLE[:6], [*VISIBLE, 1]])
        else:
            fields["bbox"] = choose(BOXES)
        if fields["segmentation"] in (..., None, []):
            fields["bbox"] = [10, 10, 20, 20]
        fields["iscrowd"] = choose([0, 0, 0, 1, ...])
        annotations.append(annotation(number, int(rng.integers(4)), **fields))
    return coco_file(annotations)


@pytest.mark.parametrize(
    "needs",
    [Needs(), POLYGONS, BITMASKS, POINTS, Needs(num_keypoints=3, flips=True),
     Needs(num_keypoints=3, min_keypoints=4, flips=True)],
    ids=["boxes", "polygons", "bitmasks", "keypoints", "keypoints, none needed", "4 needed"],
)  # fmt: skip
def test_as_many_remain_as_detectron2_trains_on(root, caplog, needs):
    rng = np.random.default_rng(0)
    outcomes = set()
    for _ in range(60):
        coco = draw(rng, needs)
        ours, stock = remaining(coco, root, needs, caplog), stock_remaining(coco, root, needs)
        if isinstance(ours, str):
            assert not stock, (coco, ours)
        else:
            assert ours == stock, coco
        outcomes.add("none" if stock == 0 else "failed" if stock is None else "trained")
    assert "trained" in outcomes
    assert outcomes & {"none", "failed"}


@pytest.mark.parametrize(
    ("annotations", "needs", "message"),
    [
        ([], Needs(), r"0 of 0 annotations remain for training$"),
        (
            [annotation(1, iscrowd=1), annotation(2, iscrowd=1)],
            Needs(),
            r"0 of 2 annotations remain for training; the others: 2 crowd \(first: 1\)$",
        ),
        ([annotation(1, iscrowd=1, segmentation=RLE)], POLYGONS, r"0 of 1 .* 1 crowd"),
        (
            [annotation(3, segmentation=[[1, 2, 3, 4]])],
            Needs(),
            r"0 of 1 .* 1 without a polygon of three points \(first: 3\)$",
        ),
        ([annotation(1, bbox=[5, 5, 0, 9])], Needs(), r"0 of 1 .* 1 with a box of no size"),
        ([annotation(1, segmentation=[FLAT[0]])], POLYGONS, r"0 of 1 .* 1 with a mask of no area"),
        ([annotation(1, segmentation=[FLAT[1]])], BITMASKS, r"0 of 1 .* 1 with a mask of no area"),
        ([annotation(1, segmentation=EMPTY_RLE)], BITMASKS, r"0 of 1 .* 1 with a mask of no area"),
        (
            [annotation(1, keypoints=UNSEEN), annotation(2, 1, keypoints=...)],
            POINTS,
            r"0 of 2 .* 2 in images of fewer than 1 visible keypoints \(first: 1\)",
        ),
        (
            [annotation(1), annotation(2, segmentation=...), annotation(3, segmentation=None)],
            POLYGONS,
            r"2 of 3 annotations \(first: 2\) have no 'segmentation', .*MASK_ON.*; 1 remain",
        ),
        ([annotation(1, segmentation=[])], BITMASKS, r"1 of 1 .* no 'segmentation'.*; 0 remain"),
        (
            [annotation(1), annotation(2, segmentation=LIST_RLE)],
            POLYGONS,
            r"1 of 2 .*first: 2\) have an RLE, .*set INPUT\.MASK_FORMAT bitmask; 1 remain",
        ),
        (
            [annotation(1), annotation(2, keypoints=...)],
            POINTS,
            r"1 of 2 .*first: 2\) have no 'keypoints', which MODEL\.KEYPOINT_ON .*; 1 remain",
        ),
        ([annotation(1, keypoints=None)], POINTS, r"1 of 1 .* 'keypoints' null"),
        (
            [annotation(1, keypoints=VISIBLE * 2)],
            POINTS,
            r"1 of 1 .* other than 3 x 3 numbers in 'keypoints' \(the first 18\)",
        ),
    ],
)
def test_nothing_to_train_on_is_one_line(root, caplog, annotations, needs, message):
    text = remaining(coco_file(annotations), root, needs, caplog)
    assert isinstance(text, str)
    assert re.search(message, text), text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"segmentation": "none"}, "'segmentation' is 'none', must be a list of polygons"),
        ({"segmentation": 7}, "'segmentation' is 7"),
        ({"segmentation": SQUARE}, "must be a list of polygons"),
        ({"segmentation": [["1"] * 8]}, "of finite numbers"),
        ({"segmentation": [[float("nan")] * 8]}, "of finite numbers"),
        ({"segmentation": [[[1, 2], [3, 4], [5, 6]]]}, "must be a list of polygons"),
        ({"segmentation": {"counts": RLE["counts"]}}, r"has size None, its image is \[40, 60\]"),
        ({"segmentation": {**RLE, "size": [60, 40]}}, r"has size \[60, 40\], its image"),
        ({"segmentation": {**RLE, "size": [40.0, 60]}}, r"has size \[40\.0, 60\]"),
        ({"segmentation": {"size": RLE["size"]}}, "has counts None"),
        ({"segmentation": {**RLE, "counts": [100]}}, r"counts \[100\], .* runs of 40x60 pixels"),
        ({"segmentation": {**RLE, "counts": [-1, 2401]}}, "has counts"),
        ({"segmentation": {**RLE, "counts": ["a"]}}, "has counts"),
        ({"segmentation": {**RLE, "counts": "abc"}}, "has counts 'abc'"),
        ({"segmentation": {**RLE, "counts": RLE["counts"][:-1]}}, "has counts"),
        ({"keypoints": {"a": 1}}, "'keypoints' is {'a': 1}, must be a list"),
        ({"keypoints": 5}, "'keypoints' is 5"),
        ({"keypoints": ["1", "2", "2"]}, "of numbers"),
        ({"keypoints": [None] * 9}, "of numbers"),
    ],
)
def test_values_of_a_wrong_type_are_one_line(root, caplog, fields, message):
    text = remaining(coco_file([annotation(4, **fields)]), root, None, caplog)
    assert isinstance(text, str)
    assert "annotation 4" in text
    assert re.search(message, text), text


@pytest.mark.parametrize("seed", range(8))
def test_runs_of_any_mask_are_read(root, caplog, seed):
    """Compressed by pycocotools: long runs, short ones, first pixel in or out."""
    rng = np.random.default_rng(seed)
    pixels = np.repeat(rng.random((HEIGHT, WIDTH // 4)) < rng.random(), 4, axis=1)
    rle = compressed(np.asfortranarray(pixels.astype(np.uint8)))
    coco = coco_file([annotation(1, segmentation=rle)])
    expected = 1 if pixels.any() else "0 of 1"
    found = remaining(coco, root, BITMASKS, caplog)
    assert found == expected or str(expected) in str(found)


def test_unusual_files_that_detectron2_takes(root, caplog):
    """Gaps in the category ids, keypoints of NaN, an empty polygon beside a good one."""
    nan = [float("nan"), float("nan"), 0] * 2 + [9, 9, 2]
    coco = coco_file([annotation(1, keypoints=nan, segmentation=[[], SQUARE])])
    coco["categories"] += [{"id": 90, "name": "other"}]
    assert remaining(coco, root, POINTS, caplog) == 1 == stock_remaining(coco, root, POINTS)
    assert remaining(coco, root, POLYGONS, caplog) == 1 == stock_remaining(coco, root, POLYGONS)


def test_wrong_needs():
    with pytest.raises(ValueError, match=r"INPUT\.MASK_FORMAT is 'rle'; .*polygon, bitmask"):
        Needs(mask_format="rle")
    with pytest.raises(ValueError, match=r"NUM_KEYPOINTS is 0; at least 1"):
        Needs(num_keypoints=0)

"""What COCO evaluation needs of one's own files is refused before, where it would fail after."""

from __future__ import annotations

import json

import pytest
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.evaluation import COCOEvaluator
from detectron2.structures import Boxes, Instances
from PIL import Image

from d2_static_sampler.data import Needs, register_coco_files
from tests.data.test_coco_training import (
    EMPTY_RLE,
    HEIGHT,
    LIST_RLE,
    PIXELS,
    RLE,
    UNSEEN,
    WIDTH,
    annotation,
    coco_file,
)

NAME = "own_evaluated"
BOXES, MASKS = Needs(), Needs(mask_format="polygon")
POINTS = Needs(num_keypoints=3, min_keypoints=1, flips=True)


def complete(number, **fields):
    return annotation(number, **{"num_keypoints": 3, **fields})


def evaluate(json_file, needs):
    """AP of a perfect detection, by Detectron2's evaluator; an error is pycocotools'."""
    DatasetCatalog.data.pop(NAME, None)
    MetadataCatalog.data.pop(NAME, None)
    MetadataCatalog.get(NAME).set(json_file=str(json_file), thing_classes=["face"])
    MetadataCatalog.get(NAME).thing_dataset_id_to_contiguous_id = {7: 0}
    evaluator = COCOEvaluator(
        NAME, distributed=False, use_fast_impl=False, kpt_oks_sigmas=[0.05] * 3
    )
    found = Instances((HEIGHT, WIDTH))
    found.pred_boxes = Boxes(torch.tensor([[10.0, 10, 30, 30]]))
    found.scores, found.pred_classes = torch.ones(1), torch.zeros(1, dtype=torch.int64)
    task = "bbox"
    if needs.mask_format:
        found.pred_masks, task = torch.from_numpy(PIXELS)[None].bool(), "segm"
    if needs.num_keypoints:
        points = [[12.5, 12.5, 1], [20.5, 12.5, 1], [16.5, 20.5, 1]]
        found.pred_keypoints, task = torch.tensor([points]), "keypoints"
    evaluator.reset()
    evaluator.process([{"image_id": 0}], [{"instances": found}])
    return evaluator.evaluate()[task]["AP"]


@pytest.fixture
def write(tmp_path):
    Image.new("RGB", (WIDTH, HEIGHT)).save(tmp_path / "0.png")
    path = tmp_path / "val.json"

    def write(*annotations):
        path.write_text(json.dumps(coco_file(list(annotations), num_images=1)))
        return path

    return write


def register(path, needs):
    register_coco_files(NAME, str(path), str(path.parent), needs=needs, for_evaluation=True)


@pytest.mark.parametrize(
    ("fields", "needs"),
    [
        ({"segmentation": ..., "keypoints": ..., "num_keypoints": ...}, BOXES),
        ({"num_keypoints": ...}, MASKS),
        ({"segmentation": RLE}, MASKS),
        ({"segmentation": LIST_RLE}, MASKS),
        ({"segmentation": ...}, POINTS),
    ],
)
def test_what_is_accepted_is_evaluated(write, fields, needs):
    path = write(complete(1, **fields))
    register(path, needs)
    assert evaluate(path, needs) == pytest.approx(100, abs=6)  # pixels on a polygon's border


@pytest.mark.parametrize(
    "fields",
    [{"iscrowd": 1}, {"segmentation": EMPTY_RLE}, {"keypoints": UNSEEN, "num_keypoints": 0},
     {"segmentation": [[1, 2, 3, 4, 5], [1, 2]]}],
)  # fmt: skip
@pytest.mark.parametrize("needs", [BOXES, MASKS, POINTS], ids=["boxes", "masks", "points"])
def test_unusual_annotations_that_are_evaluated(write, fields, needs):
    path = write(complete(1), complete(2, **fields))
    register(path, needs)
    assert evaluate(path, needs) > 0


@pytest.mark.parametrize(
    ("fields", "needs", "message"),
    [
        ({"iscrowd": ...}, BOXES, r"1 of 2 annotations \(first: 2\) have no 'iscrowd', .* 0 for"),
        ({"area": ...}, BOXES, r"annotation 2: COCO evaluation needs an 'area' \(it is None\)"),
        ({"area": "big"}, BOXES, r"needs an 'area' \(it is 'big'\)"),
        ({"segmentation": ...}, MASKS, r"1 of 2 .*first: 2\) have no 'segmentation'"),
        ({"segmentation": None}, MASKS, r"1 of 2 .* have no 'segmentation'"),
        ({"segmentation": []}, MASKS, r"1 of 2 .* have no 'segmentation'"),
        ({"segmentation": [[1, 2, 3, 4]]}, MASKS, r"have no 'segmentation' of three points"),
        ({"segmentation": [[]]}, MASKS, r"have no 'segmentation' of three points"),
        ({"segmentation": None, "iscrowd": 1}, MASKS, r"1 of 2 .* have no 'segmentation'"),
        ({"keypoints": ...}, POINTS, r"1 of 2 .*first: 2\) have no 'keypoints' of 3 x 3"),
        ({"keypoints": None}, POINTS, r"have no 'keypoints' of 3 x 3"),
        ({"keypoints": [1, 2, 2]}, POINTS, r"have no 'keypoints' of 3 x 3"),
        ({"num_keypoints": ...}, POINTS, r"1 of 2 .* have no 'num_keypoints'"),
    ],
)
def test_what_would_fail_after_the_training_is_refused(write, fields, needs, message):
    path = write(complete(1), complete(2, **fields))
    with pytest.raises(ValueError, match=message) as refused:
        register(path, needs)
    assert str(refused.value).startswith(str(path))
    assert "\n" not in str(refused.value)
    with pytest.raises(Exception, match=r"."):
        evaluate(path, needs)


def test_keypoints_of_no_annotation(write):
    path = write()
    with pytest.raises(ValueError, match="keypoints needs at least 1 annotation"):
        register(path, POINTS)
    with pytest.raises(StopIteration):
        evaluate(path, POINTS)
    register(path, BOXES)

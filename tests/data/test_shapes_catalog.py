"""The shapes data set as Detectron2 sees it."""

import importlib

import pytest
import torch
from detectron2.data import DatasetCatalog, DatasetMapper, MetadataCatalog
from detectron2.data import transforms as T
from detectron2.evaluation import COCOEvaluator
from detectron2.structures import Boxes, Instances

import d2_static_sampler.data as data_package
from d2_static_sampler.data import ensure_shapes, register_shapes, shapes_folder
from d2_static_sampler.data import shapes as shapes_module
from tests.data.shapes_helpers import SMALL


def test_registering_neither_needs_nor_writes_files(tmp_path):
    register_shapes(tmp_path)
    assert list(tmp_path.iterdir()) == []
    metadata = MetadataCatalog.get("shapes_val")
    assert metadata.thing_classes == ["circle", "square", "triangle"]
    assert metadata.evaluator_type == "coco"
    assert metadata.json_file == str(tmp_path / "shapes" / "annotations" / "shapes_val.json")
    assert metadata.image_root == str(tmp_path / "shapes" / "val")


def test_importing_reloading_and_registering_again_is_harmless(tmp_path):
    register_shapes(tmp_path)
    register_shapes(tmp_path)
    importlib.reload(shapes_module).register_shapes(tmp_path)
    importlib.reload(data_package)
    assert {"shapes_train", "shapes_val"} <= set(DatasetCatalog.list())
    assert MetadataCatalog.get("shapes_train").json_file.startswith(str(shapes_folder()))


def test_the_data_folder_is_read_at_the_call(tmp_path, monkeypatch):
    for name in ("first", "second"):
        monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path / name))
        register_shapes()
        folder = str(tmp_path / name / "shapes")
        assert MetadataCatalog.get("shapes_train").image_root.startswith(folder)
    monkeypatch.delenv("DETECTRON2_DATASETS")
    monkeypatch.chdir(tmp_path)
    assert shapes_folder() == tmp_path / "datasets" / "shapes"


def test_a_name_that_others_registered_stays_theirs(tmp_path, caplog):
    DatasetCatalog.pop("shapes_train", None)
    MetadataCatalog.pop("shapes_train", None)
    DatasetCatalog.register("shapes_train", list)
    MetadataCatalog.get("shapes_train").thing_classes = ["cat"]
    register_shapes(tmp_path)
    assert DatasetCatalog["shapes_train"] is list
    assert MetadataCatalog.get("shapes_train").thing_classes == ["cat"]
    assert "shapes_train is already registered by other code" in caplog.text


def test_the_first_get_writes_what_is_missing(tmp_path):
    folder = ensure_shapes(tmp_path, SMALL)
    (folder / "val" / "shapes_val_000001.png").unlink()
    records = DatasetCatalog.get("shapes_train")
    assert (folder / "val" / "shapes_val_000001.png").exists()
    assert [record["image_id"] for record in records] == list(range(1, 31))
    assert {a["category_id"] for r in records for a in r["annotations"]} == {0, 1, 2}


@pytest.mark.parametrize("mask_format", ["polygon", "bitmask"])
def test_the_mapper_loads_images_with_masks(small_root, mask_format):
    register_shapes(small_root)
    mapper = DatasetMapper(
        is_train=True,
        augmentations=[T.ResizeShortestEdge(96, 96), T.RandomFlip(prob=1.0)],
        image_format="BGR",
        use_instance_mask=True,
        instance_mask_format=mask_format,
    )
    records = DatasetCatalog.get("shapes_train")
    for record in records[:12]:
        loaded = mapper(record)
        assert loaded["image"].shape == (3, 96, 96)
        instances = loaded["instances"]
        assert len(instances) == len(record["annotations"])
        if len(instances):
            boxes = instances.gt_masks.get_bounding_boxes().tensor
            assert torch.allclose(boxes, instances.gt_boxes.tensor, atol=1.5)


@pytest.mark.parametrize(("shift", "expected"), [(0.0, 100.0), (200.0, 0.0)])
def test_coco_evaluation_of_perfect_and_of_wrong_boxes(small_root, shift, expected):
    ensure_shapes(small_root)
    evaluator = COCOEvaluator("shapes_val", ("bbox",), distributed=False, use_fast_impl=False)
    evaluator.reset()
    for record in DatasetCatalog.get("shapes_val"):
        found = Instances((64, 64))
        boxes = torch.tensor([a["bbox"] for a in record["annotations"]]).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        found.pred_boxes = Boxes(boxes + shift)
        found.scores = torch.ones(len(boxes))
        found.pred_classes = torch.tensor(
            [a["category_id"] for a in record["annotations"]], dtype=torch.int64
        )
        evaluator.process([record], [{"instances": found}])
    assert evaluator.evaluate()["bbox"]["AP50"] == pytest.approx(expected)

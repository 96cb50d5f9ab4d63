"""The built-in shapes data set: what is drawn, how it is written, how Detectron2 sees it."""

import hashlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from detectron2.data import DatasetCatalog, DatasetMapper, MetadataCatalog
from detectron2.data import transforms as T
from detectron2.evaluation import COCOEvaluator
from detectron2.structures import Boxes, Instances
from PIL import Image
from pycocotools.coco import COCO

import d2_static_sampler.data as data_package
from d2_static_sampler.data import ShapesSpec, ensure_shapes, register_shapes, shapes_folder
from d2_static_sampler.data import shapes as shapes_module
from d2_static_sampler.data.shapes_draw import MIN_VISIBLE, draw_image

REPOSITORY = Path(__file__).parents[2]
SMALL = ShapesSpec(num_train=30, num_val=20, size=64, empty_fraction=0.1)


@pytest.fixture(autouse=True)
def _restore_catalogs():
    datasets, metadata = dict(DatasetCatalog.data), dict(MetadataCatalog.data)
    yield
    for catalog, saved in ((DatasetCatalog, datasets), (MetadataCatalog, metadata)):
        catalog.data.clear()
        catalog.data.update(saved)


@pytest.fixture(scope="module")
def small_root(tmp_path_factory):
    root = tmp_path_factory.mktemp("datasets")
    ensure_shapes(root, SMALL)
    return root


def contents(folder):
    """Relative path -> hash of every file."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def annotations(root, split):
    return COCO(str(root / "shapes" / "annotations" / f"shapes_{split}.json"))


# --- what is drawn


def test_same_spec_gives_the_same_bytes_in_two_folders(small_root, tmp_path):
    folder = ensure_shapes(tmp_path, SMALL)
    assert contents(folder) == contents(small_root / "shapes")
    assert len(contents(folder)) == 30 + 20 + 2 + 1


def test_another_seed_gives_other_images(small_root, tmp_path):
    spec = ShapesSpec(num_train=30, num_val=20, size=64, empty_fraction=0.1, seed=1)
    other, first = contents(ensure_shapes(tmp_path, spec)), contents(small_root / "shapes")
    assert other.keys() == first.keys()
    assert not set(other.values()) & set(first.values())


def test_an_image_depends_on_its_own_number_alone():
    longer = ShapesSpec(num_train=31, num_val=1, size=64, empty_fraction=0.1)
    for index in (9, 3, 5):
        pixels, shapes = draw_image(SMALL, "train", index)
        again, same = draw_image(longer, "train", index)
        assert (pixels == again).all()
        assert [s.polygon.tolist() for s in shapes] == [s.polygon.tolist() for s in same]
    assert (draw_image(SMALL, "train", 0)[0] != draw_image(SMALL, "val", 0)[0]).any()


def test_every_class_and_every_count_occurs():
    drawn = [draw_image(ShapesSpec(size=64), "train", index)[1] for index in range(120)]
    assert {shape.category for shapes in drawn for shape in shapes} == {0, 1, 2}
    assert {len(shapes) for shapes in drawn} == set(range(9))


def test_a_shape_is_filled_with_one_colour_over_a_texture():
    spec = ShapesSpec(size=96, max_objects=1, empty_fraction=0)
    pixels, (shape,) = draw_image(spec, "train", 0)
    x, y = np.round(shape.polygon.mean(axis=0)).astype(int)
    core = pixels[y - 2 : y + 3, x - 2 : x + 3].reshape(-1, 3)
    assert (core == core[0]).all()
    background = draw_image(ShapesSpec(size=96, empty_fraction=0.99), "train", 50)
    assert background[1] == []
    assert background[0].std(axis=(0, 1)).min() > 5


def test_shapes_hidden_by_later_ones_are_not_annotated(tmp_path):
    crowded = ShapesSpec(num_train=4, num_val=1, size=64, max_objects=200, empty_fraction=0)
    ensure_shapes(tmp_path, crowded)
    coco = annotations(tmp_path, "train")
    for image_id in coco.getImgIds():
        masks = [coco.annToMask(a).astype(bool) for a in coco.imgToAnns[image_id]]
        assert 0 < len(masks) < 60  # 100 are drawn on average
        for index, mask in enumerate(masks):
            later = np.any(masks[index + 1 :], axis=0) if masks[index + 1 :] else False
            # 0.1: pycocotools counts border pixels otherwise than the drawing does.
            assert (mask & ~np.asarray(later)).sum() >= (MIN_VISIBLE - 0.1) * mask.sum()


# --- COCO format


@pytest.mark.parametrize(("split", "count"), [("train", 30), ("val", 20)])
def test_is_valid_coco(small_root, split, count):
    coco = annotations(small_root, split)
    assert coco.getImgIds() == list(range(1, count + 1))
    assert coco.getAnnIds() == list(range(1, len(coco.anns) + 1))
    assert [c["name"] for c in coco.loadCats([1, 2, 3])] == ["circle", "square", "triangle"]
    for image in coco.imgs.values():
        with Image.open(small_root / "shapes" / split / image["file_name"]) as pixels:
            assert (pixels.width, pixels.height) == (image["width"], image["height"]) == (64, 64)
            assert pixels.mode == "RGB"


def test_boxes_areas_and_masks_match_polygons_inside_the_image(small_root):
    coco = annotations(small_root, "train")
    assert len(coco.anns) > 60
    for annotation in coco.anns.values():
        (flat,) = annotation["segmentation"]
        polygon = np.array(flat).reshape(-1, 2)
        assert polygon.min() >= 0
        assert polygon.max() <= 64
        box = [*polygon.min(axis=0), *np.ptp(polygon, axis=0)]
        assert np.allclose(annotation["bbox"], box, atol=0.011)
        assert annotation["iscrowd"] == 0
        area = coco.annToMask(annotation).sum()
        assert annotation["area"] == pytest.approx(area, abs=0.5 * len(polygon) + 0.25 * area)
        assert annotation["area"] <= box[2] * box[3]


def test_some_images_are_without_objects(small_root):
    for split, count in (("train", 3), ("val", 2)):
        coco = annotations(small_root, split)
        assert sum(not coco.imgToAnns[i] for i in coco.getImgIds()) == count
    default = ShapesSpec()
    assert sum(default.is_empty(i) for i in range(default.num_train)) == 80


# --- writing: whole or not at all

WRITE = """
import os, sys, time
from d2_static_sampler.data import ShapesSpec, ensure_shapes
root, num_train, gate = sys.argv[1:]
print("ready", flush=True)
while not os.path.exists(gate):
    time.sleep(0.001)
ensure_shapes(root, ShapesSpec(num_train=int(num_train), num_val=20, size=64, empty_fraction=0.1))
"""


def start_writer(root, num_train, gate):
    """A process that writes once the file `gate` exists."""
    command = [sys.executable, "-c", WRITE, str(root), str(num_train), str(gate)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY
    )


def wait_for_images(root, writer):
    deadline = time.monotonic() + 120
    while len(list(root.glob(".shapes.part-*/train/*.png"))) < 5:
        assert writer.poll() is None, writer.stderr.read()
        assert time.monotonic() < deadline, "the writer never wrote an image"
        time.sleep(0.02)


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_a_killed_run_is_never_taken_for_complete(small_root, tmp_path):
    writer = start_writer(tmp_path, 100_000, gate=os.devnull)
    wait_for_images(tmp_path, writer)
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    assert not (tmp_path / "shapes").exists()
    assert list(tmp_path.glob(".shapes.part-*"))
    folder = ensure_shapes(tmp_path, SMALL)
    assert contents(folder) == contents(small_root / "shapes")
    assert not list(tmp_path.glob(".shapes.part-*"))


def test_of_two_processes_at_once_one_writes_and_one_waits(small_root, tmp_path):
    root, gate = tmp_path / "datasets", tmp_path / "gate"
    writers = [start_writer(root, 30, gate) for _ in range(2)]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n", writer.stderr.read()
    gate.touch()
    errors = [writer.communicate(timeout=120)[1] for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0], errors
    assert sum("drawing the shapes" in text for text in errors) == 1
    assert contents(root / "shapes") == contents(small_root / "shapes")
    assert not list(root.glob(".shapes.part-*"))


@pytest.mark.parametrize("lost", ["train/shapes_train_000007.png", "spec.json"])
def test_an_incomplete_folder_is_written_anew(small_root, tmp_path, lost):
    folder = ensure_shapes(tmp_path, SMALL)
    (folder / lost).unlink()
    ensure_shapes(tmp_path, SMALL)
    assert contents(folder) == contents(small_root / "shapes")


def test_a_complete_folder_is_left_alone_and_may_be_read_only(tmp_path):
    folder = ensure_shapes(tmp_path, SMALL)
    (folder / "train" / "shapes_train_000001.png").write_bytes(b"mark")
    (tmp_path / "shapes.lock").unlink()
    assert ensure_shapes(tmp_path) == folder
    assert (folder / "train" / "shapes_train_000001.png").read_bytes() == b"mark"
    assert not (tmp_path / "shapes.lock").exists()


def test_another_spec_is_refused_and_nothing_is_lost(tmp_path):
    folder = ensure_shapes(tmp_path, SMALL)
    before = contents(folder)
    with pytest.raises(ValueError, match=r"shapes holds .*num_train=30.* delete it") as error:
        ensure_shapes(tmp_path, ShapesSpec(num_train=31, num_val=20, size=64))
    assert "\n" not in str(error.value)
    assert contents(folder) == before


def test_images_of_another_drawing_version_are_refused(tmp_path):
    folder = ensure_shapes(tmp_path, SMALL)
    numbers = json.loads((folder / "spec.json").read_text())
    (folder / "spec.json").write_text(json.dumps({**numbers, "drawing_version": 0}))
    with pytest.raises(ValueError, match="drawing_version 0"):
        ensure_shapes(tmp_path)


def test_a_folder_with_other_files_is_refused_and_kept(tmp_path):
    mine = tmp_path / "shapes" / "train" / "holiday.png"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"mine")
    with pytest.raises(FileExistsError, match=r"1 files .* first train/holiday.png"):
        ensure_shapes(tmp_path, SMALL)
    assert mine.read_bytes() == b"mine"


def test_a_file_in_the_folders_place_is_refused(tmp_path):
    (tmp_path / "shapes").write_text("mine")
    with pytest.raises(FileExistsError, match="not a folder"):
        ensure_shapes(tmp_path, SMALL)


def test_shows_its_progress(tmp_path, capfd):
    ensure_shapes(tmp_path, SMALL)
    assert "drawing the shapes data set: 100%" in capfd.readouterr().err


# --- in Detectron2


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


# --- the spec checks itself


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("num_train", 0, ValueError),
        ("num_val", -1, ValueError),
        ("size", 31, ValueError),
        ("max_objects", 0, ValueError),
        ("seed", -1, ValueError),
        ("seed", 1.5, TypeError),
        ("num_train", True, TypeError),
        ("empty_fraction", 1.0, ValueError),
        ("empty_fraction", -0.1, ValueError),
        ("empty_fraction", float("nan"), ValueError),
        ("empty_fraction", "4 %", TypeError),
    ],
)
def test_a_wrong_spec_names_field_and_value(field, value, error):
    with pytest.raises(error, match=rf"ShapesSpec\.{field} = {value!r}: must be"):
        ShapesSpec(**{field: value})

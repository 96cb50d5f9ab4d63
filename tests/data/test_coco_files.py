"""Registering one's own COCO files: what is accepted, and one clear line for what is not."""

import copy
import json

import pytest
from detectron2.data import DatasetCatalog, DatasetMapper, MetadataCatalog
from PIL import Image

from d2_static_sampler.data import ShapesSpec, ensure_shapes, register_coco_files

NAME = "my_own_data"
VALID = {
    "images": [
        {"id": 10, "file_name": "a.png", "height": 20, "width": 30},
        {"id": 11, "file_name": "sub/b.png", "height": 20, "width": 30},
    ],
    "annotations": [
        {"id": 5, "image_id": 10, "category_id": 7, "bbox": [1, 2, 8.5, 9], "iscrowd": 0},
        {"id": 6, "image_id": 10, "category_id": 3, "bbox": [0, 0, 30, 20]},
    ],
    "categories": [{"id": 7, "name": "dog"}, {"id": 3, "name": "cat"}],
}


@pytest.fixture
def image_root(tmp_path):
    root = tmp_path / "images"
    (root / "sub").mkdir(parents=True)
    for name in ("a.png", "sub/b.png"):
        Image.new("RGB", (30, 20)).save(root / name)
    return root


@pytest.fixture
def write(tmp_path):
    def write_json(content, name="instances.json"):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write_json


def changed(*path, value):
    """VALID with the entry at path replaced; the value ... deletes it."""
    coco = copy.deepcopy(VALID)
    *parents, last = path
    entry = coco
    for key in parents:
        entry = entry[key]
    if value is ...:
        del entry[last]
    else:
        entry[last] = value
    return coco


def test_registers_with_classes_in_id_order(write, image_root):
    path = write(VALID)
    register_coco_files(NAME, path, str(image_root))
    metadata = MetadataCatalog.get(NAME)
    assert metadata.thing_classes == ["cat", "dog"]
    assert metadata.evaluator_type == "coco"
    assert metadata.json_file == path
    assert metadata.image_root == str(image_root)
    records = DatasetCatalog.get(NAME)
    assert [r["image_id"] for r in records] == [10, 11]
    assert [a["category_id"] for a in records[0]["annotations"]] == [1, 0]
    mapper = DatasetMapper(is_train=True, augmentations=[], image_format="BGR")
    assert mapper(records[0])["instances"].gt_boxes.tensor.tolist()[0] == [1, 2, 9.5, 11]


def test_the_shapes_data_set_passes(tmp_path):
    folder = ensure_shapes(tmp_path, ShapesSpec(num_train=5, num_val=5, size=64))
    path = folder / "annotations" / "shapes_val.json"
    register_coco_files(NAME, str(path), str(folder / "val"))
    assert len(DatasetCatalog.get(NAME)) == 5


def test_the_same_paths_again_are_harmless(write, image_root, monkeypatch):
    path = write(VALID)
    register_coco_files(NAME, path, str(image_root))
    monkeypatch.chdir(image_root)
    register_coco_files(NAME, "../instances.json", ".")
    assert len(DatasetCatalog.get(NAME)) == 2


def test_other_paths_under_the_same_name_are_an_error(write, image_root):
    first, second = write(VALID), write(VALID, "second.json")
    register_coco_files(NAME, first, str(image_root))
    with pytest.raises(ValueError, match=r"my_own_data.*already registered") as error:
        register_coco_files(NAME, second, str(image_root))
    assert first in str(error.value)
    assert second in str(error.value)
    assert MetadataCatalog.get(NAME).json_file == first


def test_a_name_that_is_not_from_files_is_an_error(write, image_root):
    DatasetCatalog.register(NAME, list)
    with pytest.raises(ValueError, match="already registered"):
        register_coco_files(NAME, write(VALID), str(image_root))


def test_missing_annotation_file(tmp_path, image_root):
    path = str(tmp_path / "nowhere.json")
    with pytest.raises(FileNotFoundError, match=r"nowhere\.json: no such annotation file"):
        register_coco_files(NAME, path, str(image_root))


def test_missing_image_folder(write, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere: no such folder"):
        register_coco_files(NAME, write(VALID), str(tmp_path / "nowhere"))


def test_missing_images_are_counted_and_the_first_is_named(write, image_root):
    (image_root / "sub" / "b.png").unlink()
    path = write(VALID)
    with pytest.raises(FileNotFoundError, match=r"1 of 2 image files .* first sub/b\.png") as error:
        register_coco_files(NAME, path, str(image_root))
    assert path in str(error.value)
    assert str(image_root) in str(error.value)


INF = float("inf")
WRONG = [
    ("{", "not a JSON file"),
    ("[]", "must hold a JSON object, not a list"),
    (changed("annotations", value=...), "has no 'annotations'"),
    (changed("categories", value={}), "'categories' must be a list"),
    (changed("images", value=[1]), "'images' must be a list of objects"),
    (changed("images", value=[]), "'images' is empty"),
    (changed("categories", value=[]), "'categories' is empty"),
    (changed("categories", 0, "id", value=3), "id 3 appears twice in 'categories'"),
    (changed("categories", 0, "id", value=...), r"categories\[0\] has id None"),
    (changed("categories", 0, "name", value=...), "category 7: 'name' is None"),
    (changed("images", 1, "id", value=10), "id 10 appears twice in 'images'"),
    (changed("images", 1, "id", value="11"), "partly numbers, partly text"),
    (changed("images", 0, "file_name", value=...), "image 10: 'file_name' is None"),
    (changed("images", 0, "height", value=...), "image 10: 'height' is None"),
    (changed("images", 0, "width", value=-30), "image 10: 'width' is -30"),
    (changed("annotations", 1, "id", value=5), "id 5 appears twice in 'annotations'"),
    (changed("annotations", 1, "id", value=...), r"annotations\[1\] has id None"),
    (changed("annotations", 0, "image_id", value=12), "annotation 5: image_id 12 is not among"),
    (changed("annotations", 0, "image_id", value=[10]), r"annotation 5: image_id \[10\] is not"),
    (changed("annotations", 0, "category_id", value=1), "annotation 5: category_id 1 is not among"),
    (changed("annotations", 0, "category_id", value=...), "annotation 5: category_id None"),
    (changed("annotations", 0, "iscrowd", value=2), "annotation 5: iscrowd is 2"),
    (changed("annotations", 0, "ignore", value=1), "annotation 5: 'ignore' is not supported"),
    (changed("annotations", 0, "bbox", value=...), "annotation 5: bbox None is not four finite"),
    (changed("annotations", 0, "bbox", value=[]), r"annotation 5: bbox \[\] is not four finite"),
    (changed("annotations", 0, "bbox", value=[1, 2, 3]), "is not four finite numbers"),
    (changed("annotations", 0, "bbox", value=[1, 2, "3", 4]), "is not four finite numbers"),
    (changed("annotations", 0, "bbox", value=[1, 2, INF, 4]), "is not four finite numbers"),
    (changed("annotations", 0, "bbox", value=[INF - INF, 2, 3, 4]), "is not four finite numbers"),
    (changed("annotations", 0, "bbox", value=[9, 9, -3, 4]), "has a negative size"),
]


@pytest.mark.parametrize(("content", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_content_is_one_line_with_path_and_problem(write, image_root, content, message):
    path = write(content)
    with pytest.raises(ValueError, match=message) as error:
        register_coco_files(NAME, path, str(image_root))
    assert str(error.value).startswith(path)
    assert "\n" not in str(error.value)
    assert NAME not in DatasetCatalog
    assert NAME not in MetadataCatalog


def test_boxes_without_area_are_left_to_detectron2_with_a_warning(write, image_root, caplog):
    path = write(changed("annotations", 0, "bbox", value=[1, 2, 0, 4]))
    register_coco_files(NAME, path, str(image_root))
    assert "1 boxes have width or height 0 (first: annotation 5)" in caplog.text
    mapper = DatasetMapper(is_train=True, augmentations=[], image_format="BGR")
    assert len(mapper(DatasetCatalog.get(NAME)[0])["instances"]) == 1


def test_a_file_without_annotations_is_accepted(write, image_root):
    register_coco_files(NAME, write(changed("annotations", value=[])), str(image_root))
    assert [r["annotations"] for r in DatasetCatalog.get(NAME)] == [[], []]

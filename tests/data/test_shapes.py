"""What the shapes data set draws and annotates, and what its spec refuses."""

import numpy as np
import pytest
from PIL import Image

from d2_static_sampler.data import ShapesSpec, ensure_shapes
from d2_static_sampler.data.shapes_draw import MIN_VISIBLE, draw_image
from tests.data.shapes_helpers import SMALL, annotations, contents


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

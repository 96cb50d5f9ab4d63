"""Names of keypoints in one's own files, and which change places in a mirrored image."""

from __future__ import annotations

import json

import numpy as np
import pytest
from detectron2.data import DatasetCatalog, DatasetMapper, MetadataCatalog
from detectron2.data import transforms as T
from detectron2.data.detection_utils import create_keypoint_hflip_indices
from PIL import Image

from d2_static_sampler.data import Needs, register_coco_files

NAME = "own_keypoints"
COCO_NAMES = [
    "nose", "left_eye", "right_eye", "left_ear", "right_ear", "left_shoulder", "right_shoulder",
    "left_elbow", "right_elbow", "left_wrist", "right_wrist", "left_hip", "right_hip",
    "left_knee", "right_knee", "left_ankle", "right_ankle",
]  # fmt: skip


def coco_file(*categories):
    count = len(categories[0].get("keypoints") or [1, 2])
    keypoints = [v for i in range(count) for v in (2 + i, 5, 2)]
    return {
        "images": [{"id": 1, "file_name": "a.png", "height": 40, "width": 60}],
        "annotations": [
            {"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 1, 30, 30], "iscrowd": 0,
             "area": 900, "keypoints": keypoints, "num_keypoints": count}
        ],
        "categories": [{"id": i, "name": str(i), **c} for i, c in enumerate(categories, 1)],
    }  # fmt: skip


@pytest.fixture
def register(tmp_path):
    def register(*categories, number=None, flips=True, for_evaluation=False):
        Image.new("RGB", (60, 40)).save(tmp_path / "a.png")
        path = tmp_path / "own.json"
        path.write_text(json.dumps(coco_file(*categories)))
        count = number or len(categories[0].get("keypoints") or [1, 2])
        needs = Needs(num_keypoints=count, min_keypoints=1, flips=flips)
        register_coco_files(
            NAME, str(path), str(tmp_path), needs=needs, for_evaluation=for_evaluation
        )
        return MetadataCatalog.get(NAME)

    return register


@pytest.mark.parametrize(
    ("names", "flipped"),
    [
        (["left_eye", "right_eye", "nose"], [1, 0, 2]),
        (["eye_left", "nose", "eye_right"], [2, 1, 0]),
        (["LeftEye", "RightEye"], [1, 0]),
        (["Left eye", "right eye"], [1, 0]),
        (["eyeLeft", "eyeRight", "lefthand", "righthand"], [1, 0, 3, 2]),
        (["LEFT-1", "RIGHT-1", "LEFT-2", "RIGHT-2"], [1, 0, 3, 2]),
        (["l_eye", "r_eye", "eye.R", "eye.L"], [1, 0, 3, 2]),
        (["LHip", "RHip", "HipL", "HipR", "lEye", "rEye"], [1, 0, 3, 2, 5, 4]),
        (["leye", "reye", "lip", "root", "neck"], [1, 0, 2, 3, 4]),
        (["upright_left", "upright_right", "bright_l", "bright_r"], [1, 0, 3, 2]),
        (["left_upper_left", "right_upper_right"], [1, 0]),
        (["top", "bottom", "centre", "tail_1"], [0, 1, 2, 3]),
    ],
)
def test_names_of_two_sides_change_places(register, names, flipped):
    metadata = register({"keypoints": names})
    assert metadata.keypoint_names == names
    assert create_keypoint_hflip_indices([NAME]) == flipped
    mapper = DatasetMapper(
        is_train=True, augmentations=[T.RandomFlip(prob=1.0)], image_format="BGR",
        use_keypoint=True, keypoint_hflip_indices=create_keypoint_hflip_indices([NAME]),
    )  # fmt: skip
    (points,) = mapper(DatasetCatalog.get(NAME)[0])["instances"].gt_keypoints.tensor
    assert points[:, 0].tolist() == [60 - (2.5 + i) for i in flipped]


def test_names_of_coco_give_coco_s_map(register):
    register({"keypoints": COCO_NAMES})
    stock = create_keypoint_hflip_indices(["keypoints_coco_2017_train"])
    assert create_keypoint_hflip_indices([NAME]) == stock


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["left_eye", "nose"], r"'left_eye' has no partner 'right_eye' .*INPUT\.RANDOM_FLIP none"),
        (["RightEye", "nose"], r"'RightEye' has no partner 'leftEye'"),
        (["eye_l", "nose"], r"'eye_l' has no partner 'eye_r'"),
        (["HipL", "neck"], r"'HipL' has no partner"),
        (["left_left", "left_right", "right_left"], r"'left_left' may change places with '.*' or"),
        (["light", "right", "left"], r"'light' may change places with 'right' or 'left'"),
    ],
)
def test_a_side_without_partner_is_refused_where_images_are_flipped(register, names, message):
    with pytest.raises(ValueError, match=message) as refused:
        register({"keypoints": names})
    assert "\n" not in str(refused.value)
    assert NAME not in DatasetCatalog
    assert register({"keypoints": names}, flips=False).keypoint_names == names
    assert create_keypoint_hflip_indices([NAME]) == list(range(len(names)))


@pytest.mark.parametrize(
    ("categories", "number", "message"),
    [
        ([{}], 2, r"its categories have no 'keypoints', .*INPUT\.RANDOM_FLIP none"),
        ([{"keypoints": "a"}], 1, r"category 1: 'keypoints' must be a list of names"),
        ([{"keypoints": ["a", 1]}], 2, r"category 1: 'keypoints' must be a list of names"),
        ([{"keypoints": ["a", "b", "a"]}], 3, r"category 1: the keypoint 'a' appears twice"),
        ([{"keypoints": ["a", "b"]}], 17, r"has 2 keypoints, but .*NUM_KEYPOINTS is 17: set it"),
        (
            [{"keypoints": ["a", "b"]}, {"keypoints": ["b", "a"]}],
            2,
            r"category 2 has other 'keypoints' than category 1",
        ),
    ],
)
def test_names_that_detectron2_cannot_use(register, categories, number, message):
    with pytest.raises(ValueError, match=message):
        register(*categories, number=number)


def test_without_names_where_images_are_not_flipped(register):
    assert register({}, flips=False).keypoint_names == ["keypoint_1", "keypoint_2"]


def test_images_of_an_evaluation_are_not_flipped(register):
    assert register({"keypoints": ["left", "nose"]}, for_evaluation=True).keypoint_flip_map == []


def test_categories_without_keypoints_beside_one_with_them(register):
    metadata = register({"keypoints": ["l", "r"], "skeleton": [[1, 2], [2, 3], [0, 1], "x"]}, {})
    assert metadata.keypoint_flip_map == [("l", "r")]
    ((first, second, colour),) = metadata.keypoint_connection_rules
    assert (first, second) == ("l", "r")
    assert np.shape(colour) == (3,)

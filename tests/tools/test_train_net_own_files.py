"""Training on one's own files: masks and keypoints, and annotations that do not remain."""

from __future__ import annotations

import copy
import json

import pytest
import train_net

from d2_static_sampler.engine import read_steps
from tests.tools.test_train_net import OWN

ONE_CLASS = ["MODEL.ROI_HEADS.NUM_CLASSES", "1", "SOLVER.MAX_ITER", "2"]
ONE_CLASS += ["TEST.DETECTIONS_PER_IMAGE", "5"]
MASKS = ["MODEL.MASK_ON", "True", "MODEL.ROI_MASK_HEAD.CONV_DIM", "8"]
MASKS += ["MODEL.ROI_MASK_HEAD.NUM_CONV", "1"]
NAMES = ["left_top", "right_top", "left_bottom", "right_bottom"]
CORNERS = [9, 9, 2, 49, 9, 2, 9, 49, 2, 49, 49, 1]
POINTS = ["MODEL.KEYPOINT_ON", "True", "MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS", "4"]
POINTS += ["MODEL.ROI_KEYPOINT_HEAD.CONV_DIMS", "[8]"]
SIGMAS = ["TEST.KEYPOINT_OKS_SIGMAS", "[0.1, 0.1, 0.1, 0.1]"]


@pytest.fixture
def write(data_folder, tmp_path):
    """Writes a file of one image, and returns the two values of --train-files."""
    image = next((data_folder / "shapes" / "train").iterdir())
    (tmp_path / "a.png").write_bytes(image.read_bytes())

    def write(*changes, name="own.json", **category):
        """One annotation for each of the changes; the value ... takes a field away."""
        coco = copy.deepcopy(OWN)
        (usual,) = coco["annotations"]
        coco["annotations"] = [
            {k: v for k, v in {**usual, "id": i, **change}.items() if v is not ...}
            for i, change in enumerate(changes, start=1)
        ]
        coco["categories"][0].update(category)
        (tmp_path / name).write_text(json.dumps(coco))
        return [str(tmp_path / name), str(tmp_path)]

    return write


def write_keypoints(write, names=NAMES, **change):
    keypoints = {"keypoints": CORNERS, "num_keypoints": 4, **change}
    return write(keypoints, keypoints=names, skeleton=[[1, 2], [3, 4]])


def metrics(folder):
    found = {}
    for line in (folder / "metrics.json").open():
        found |= json.loads(line)
    return found


def refusal(run, monkeypatch, *arguments):
    """The one line with which the tool stops before anything has started."""
    monkeypatch.setattr(train_net, "launch", lambda *args, **kwargs: pytest.fail("it started"))
    with pytest.raises(SystemExit) as stopped:
        run(*arguments)
    line = str(stopped.value)
    assert line.startswith("train_net.py: error: ")
    assert "\n" not in line
    return line


def test_keypoints_of_ones_own_train_and_are_evaluated(run, write):
    files = write_keypoints(write)
    folder = run("--train-files", *files, "--val-files", *files, *ONE_CLASS, *POINTS, *SIGMAS)
    found = metrics(folder)
    assert found["loss_keypoint"] > 0
    assert "keypoints/AP" in found
    assert (folder / "detections.png").exists()


def test_keypoints_with_the_static_step(run, write):
    step = ("MODEL.SAMPLER.IMPL", "static", "MODEL.SAMPLER.STATIC_STEP", "True")
    folder = run("--train-files", *write_keypoints(write), *ONE_CLASS, *POINTS, *step)
    assert [row["impl"] for row in read_steps(folder / "step_times.jsonl")] == ["static+step"] * 2
    assert metrics(folder)["loss_keypoint"] > 0


@pytest.mark.parametrize(
    ("names", "opts", "message"),
    [
        (["left_a", "b", "c", "d"], [], "'left_a' has no partner 'right_a'"),
        (NAMES, ["MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS", "17"], "is 17: set it to 4"),
        ([], [], "its categories have no 'keypoints'"),
        (NAMES, ["TEST.KEYPOINT_OKS_SIGMAS", "[]"], "is []; COCO evaluation needs 4 numbers"),
        (NAMES, ["TEST.KEYPOINT_OKS_SIGMAS", "[0.1]"], "KEYPOINT_OKS_SIGMAS is [0.1]; "),
        (NAMES, ["TEST.KEYPOINT_OKS_SIGMAS", "[1, 1, 1, 0]"], "SIGMAS is [1, 1, 1, 0]"),
        (NAMES, ["TEST.KEYPOINT_OKS_SIGMAS", "['a', 1, 1, 1]"], "KEYPOINT_OKS_SIGMAS is ['a'"),
    ],
)  # fmt: skip
def test_keypoints_that_would_fail_later(run, write, monkeypatch, names, opts, message):
    files = write_keypoints(write, names)
    settings = [*ONE_CLASS, *POINTS, *SIGMAS]
    given = [v for pair in zip(settings[::2], settings[1::2], strict=True)
             if pair[0] not in opts for v in pair]  # fmt: skip
    line = refusal(run, monkeypatch, "--train-files", *files, "--val-files", *files, *given, *opts)
    assert message in line


def test_other_keypoints_in_the_two_files(run, write, monkeypatch):
    train = write_keypoints(write)
    keypoints = {"keypoints": CORNERS, "num_keypoints": 4}
    val = write(keypoints, name="val.json", keypoints=NAMES[::-1])
    opts = (*ONE_CLASS, *POINTS, *SIGMAS)
    line = refusal(run, monkeypatch, "--train-files", *train, "--val-files", *val, *opts)
    assert "own.json and " in line
    assert "val.json differ in their keypoints: ['left_top'" in line


def test_keypoints_of_a_data_set_without_them(run, monkeypatch):
    line = refusal(run, monkeypatch, *POINTS)
    assert "MODEL.KEYPOINT_ON is True, but shapes_train has no keypoints" in line


def test_masks_of_ones_own(run, write, caplog):
    """One annotation has no polygon, one is crowd: one warning, and the rest trains."""
    rle = {"size": [160, 160], "counts": [1600, 1600, 160 * 160 - 3200]}
    train = write({}, {"segmentation": [[1, 2, 3, 4]]}, {"iscrowd": 1, "segmentation": rle})
    val = write({}, {"iscrowd": 1, "segmentation": rle}, name="val.json")
    folder = run("--train-files", *train, "--val-files", *val, *ONE_CLASS, *MASKS)
    found = metrics(folder)
    assert found["loss_mask"] > 0
    assert "segm/AP" in found
    lines = [record.getMessage() for record in caplog.records]
    (line,) = [line for line in lines if "remain for training" in line]
    reasons = "1 without a polygon of three points (first: 2), 1 crowd (first: 3)"
    assert line == f"{train[0]}: 1 of 3 annotations remain for training; the others: {reasons}"


def test_boxes_alone_need_no_masks_and_no_keypoints(run, write):
    """Not even for the picture at the end, where only some annotations have them."""
    files = write({"keypoints": CORNERS}, {"segmentation": ...}, {"keypoints": CORNERS[:6]})
    folder = run("--train-files", *files, "--val-files", *files, *ONE_CLASS)
    assert (folder / "detections.png").exists()


@pytest.mark.parametrize(
    ("changes", "opts", "message"),
    [
        ([], [], "0 of 0 annotations remain"),
        ([{"iscrowd": 1}] * 2, [], "0 of 2 annotations remain for training; the others: 2 crowd"),
        ([{"segmentation": [[1, 2, 3, 4]]}], [], "1 without a polygon of three points"),
        ([{"segmentation": [[1, 2, 9, 2, 5, 2]]}], MASKS, "1 with a mask of no area"),
        ([{}, {"segmentation": ...}], MASKS, "1 of 2 annotations (first: 2) have no 'segm"),
        ([{"segmentation": ...}], MASKS, "1 of 1 annotations (first: 1) have no 'segmentation'"),
        (
            [{"segmentation": {"size": [160, 160], "counts": [0, 25600]}}],
            MASKS,
            "have an RLE, not polygons: set INPUT.MASK_FORMAT bitmask; 0 remain without them",
        ),
        ([{}], ["INPUT.MASK_FORMAT", "rle"], "INPUT.MASK_FORMAT is 'rle'; choose one of: polygon"),
        ([{}], ["INPUT.RANDOM_FLIP", "both"], "INPUT.RANDOM_FLIP is 'both'; choose one of: horiz"),
    ],
)  # fmt: skip
def test_own_files_with_nothing_to_train_on(run, write, monkeypatch, changes, opts, message):
    files = write(*changes)
    assert message in refusal(run, monkeypatch, "--train-files", *files, *ONE_CLASS, *opts)


def test_val_files_that_evaluation_cannot_read(run, write, monkeypatch):
    train, val = write({}), write({}, {"iscrowd": ...}, name="val.json")
    line = refusal(run, monkeypatch, "--train-files", *train, "--val-files", *val, *ONE_CLASS)
    assert "val.json: 1 of 2 annotations (first: 2) have no 'iscrowd'" in line

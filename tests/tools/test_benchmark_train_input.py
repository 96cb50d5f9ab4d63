"""What the benchmark of training steps is given: synthetic images, and arguments that are wrong."""

from __future__ import annotations

import benchmark_runs
import benchmark_train
import pytest
import torch
from detectron2.structures import BitMasks, PolygonMasks, RotatedBoxes

from tests.helpers import NUM_CLASSES, small_config
from tests.processes import run_script
from tests.tools.train_net_helpers import CONFIG, ROOT


@pytest.mark.parametrize(
    ("opts", "kind"),
    [
        (["MODEL.MASK_ON", "True", "MODEL.KEYPOINT_ON", "True"], PolygonMasks),
        (["MODEL.MASK_ON", "True", "INPUT.MASK_FORMAT", "bitmask"], BitMasks),
        (["MODEL.META_ARCHITECTURE", "PanopticFPN", "MODEL.MASK_ON", "True"], PolygonMasks),
    ],
    ids=["masks and keypoints", "bitmasks", "panoptic"],
)
def test_synthetic_images_suit_every_head(tmp_path, opts, kind):
    opts += ["MODEL.SEM_SEG_HEAD.NUM_CLASSES", 5, "SOLVER.IMS_PER_BATCH", 1]
    cfg = small_config(*opts)
    one = benchmark_runs.ImplRun(cfg, "static", (64, 96), tmp_path)
    one.step(0)
    assert isinstance(one.loader.batch[0]["instances"].gt_masks, kind)
    assert one.finish()[0]["images"] == 1


@pytest.mark.parametrize("rotated", [False, True])
def test_synthetic_images_have_about_as_many_boxes_as_coco(rotated):
    """The mean of 400 counts; 0.1 % false alarms, seed fixed."""
    opts = ["MODEL.PROPOSAL_GENERATOR.NAME", "RRPN"] if rotated else []
    loader = benchmark_runs.SyntheticLoader(small_config(*opts), (64, 96))
    truths = []
    for seed in range(100):
        loader.draw(seed)
        truths += [item["instances"] for item in loader.batch]
    assert sum(map(len, truths)) / 400 == pytest.approx(7, abs=0.45)
    assert min(map(len, truths)) >= 1
    for truth in truths:
        assert isinstance(truth.gt_boxes, RotatedBoxes) == rotated
        assert truth.gt_boxes.nonempty().all()
        assert truth.gt_classes.max() < NUM_CLASSES
        assert rotated or truth.gt_boxes.inside_box((64, 96)).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--impl", "fast"], "--impl is 'fast'; choose from: compiled, naive, static"),
        (["--impl", "naive+step"], "--impl is 'naive+step'; choose from: compiled, naive, static"),
        (["--images", "2", "0"], "--images is [2, 0]; at least 1"),
        (["--synthetic", "0", "64"], "--synthetic is [0, 64]; at least 32"),
        (["--steps", "1"], "--steps is 1; at least 2"),
        (["--warmup", "-1"], "--warmup is -1; at least 0"),
        (["--threads", "0"], "--threads is 0; at least 1"),
        (["--device", "tpu"], "--device is 'tpu'; cpu or cuda"),
        (["--device", "cpu:x"], "--device is 'cpu:x'; cpu or cuda"),
        (["--synthetic", "64", "64", "--images", str(10**12)], "1000000000000 --synthetic 64 64: "),
        (["--config-file", "nothing.yaml"], "nothing.yaml"),
        (["--csv", "/proc/nothing/rows.csv"], "/proc/nothing"),
        (["--csv", "/"], "Is a directory: '/'"),
        (["DATASETS.TRAIN", "('shapes_trian',)"], "'shapes_trian', which is not registered"),
        (["DATASETS.TRAIN", "()"], "DATASETS.TRAIN is empty"),
        (["MODEL.SAMPLER.SELECT", "best"], "MODEL.SAMPLER.SELECT is 'best'"),
        (["MODEL.DEVICE", "cuda"], "MODEL.DEVICE is what --device sets"),
        (["SOLVER.BASE_LR"], "odd length"),
        (["--synthetic", "64", "64", "MODEL.WEIGHTS", "missing.pth"], "missing.pth"),
        (
            ["--synthetic", "64", "64", "MODEL.PROPOSAL_GENERATOR.NAME", "PrecomputedProposals"],
            "--synthetic makes no proposals",
        ),
    ],
)
def test_wrong_arguments_stop_at_once(data_folder, monkeypatch, capsys, arguments, message):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(data_folder))
    monkeypatch.setattr(benchmark_train, "ImplRun", lambda *_: pytest.fail("it started"))
    with pytest.raises(SystemExit) as stopped:
        benchmark_train.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_where_there_is_none(tmp_path):
    command = [str(ROOT / "tools" / "benchmark_train.py"), "--device", "cuda"]
    done = run_script([*command, "--config-file", CONFIG], tmp_path)
    assert done.returncode == 2
    assert "--device is 'cuda': this torch finds no CUDA device" in done.stderr
    assert "Traceback" not in done.stderr


def test_running_out_of_memory_is_one_line(monkeypatch, capsys):
    """The allocator's own error, at an image that no address space holds."""
    monkeypatch.setattr(benchmark_train, "check_memory", lambda *_: None)
    huge = ["--synthetic", str(10**8), str(10**8), "--images", "1", "--impl", "naive"]
    with pytest.raises(SystemExit) as stopped:
        benchmark_train.main(huge)
    assert stopped.value.code == 2
    assert "error: out of memory at 1 images: " in capsys.readouterr().err.splitlines()[-1]


RETINANET = [
    "MODEL.META_ARCHITECTURE", "RetinaNet",
    "MODEL.RETINANET.NUM_CLASSES", "3",
    "MODEL.RETINANET.IN_FEATURES", "['p3','p4','p5']",
    "MODEL.ANCHOR_GENERATOR.SIZES", "[[32],[64],[128]]",
]  # fmt: skip
DIVERGING = ["SOLVER.BASE_LR", "1e30", "SOLVER.WARMUP_ITERS", "0"]


@pytest.mark.parametrize(
    ("opts", "message"),
    [
        (RETINANET, "RetinaNet has nowhere to put 'static'"),
        (["MODEL.WEIGHTS", "file:///nothing.pkl"], "MODEL.WEIGHTS is 'file:///nothing.pkl'"),
        ([*DIVERGING, "SOLVER.CLIP_GRADIENTS.ENABLED", "False"], "a smaller SOLVER.BASE_LR"),
    ],
)
def test_what_only_a_model_shows_is_one_line_too(capsys, opts, message):
    with pytest.raises(SystemExit) as stopped:
        benchmark_train.main(["--synthetic", "64", "64", "--images", "1", "--steps", "4", *opts])
    assert stopped.value.code == 1
    assert message in capsys.readouterr().err.splitlines()[-1]

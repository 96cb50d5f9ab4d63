"""Wrong input stops the training tool before the model is built, in one clear line."""

from __future__ import annotations

import copy
import json
import os
import re
import sys

import pytest
import torch
import train_net
from config_files import merge_file
from detectron2.config import get_cfg

from d2_static_sampler import add_sampler_config
from d2_static_sampler.engine import read_steps
from tests.modeling.models import HAS_POINT_REND
from tests.tools.test_train_net import OWN
from tests.tools.train_net_helpers import CONFIG, ROOT


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["MODEL.SAMPLER.IMPL", "fast"], r"MODEL\.SAMPLER\.IMPL is 'fast'; choose one of: .*naive"),
        (
            ["MODEL.SAMPLER.STATIC_STEP", "True", "MODEL.SAMPLER.IMPL", "naive"],
            r"STATIC_STEP is True, but MODEL\.SAMPLER\.IMPL is 'naive'.* one of: compiled, static",
        ),
        (["MODEL.SAMPLER.SEED", "-5"], r"MODEL\.SAMPLER\.SEED is -5"),
        (["MODEL.SAMPLER.LOG_PERIOD", "0"], r"LOG_PERIOD is 0"),
        (["MODEL.SAMPLER.TIMING", "perhaps"], r"MODEL\.SAMPLER\.TIMING"),
        (["MODEL.SAMPLER.IMPLL", "static"], r"MODEL\.SAMPLER\.IMPLL"),
        (["MODEL.SAMPLER.IMPL"], r"odd length"),
        (["DATASETS.TRAIN", "('shapes_trian',)"], r"'shapes_trian'.*not registered.*shapes_train"),
        (["DATASETS.TRAIN", "('coco_2017_train',)"], r"coco_2017_train.*does not exist.*DETECTRON"),
        (["DATASETS.TRAIN", "()"], r"DATASETS\.TRAIN is empty"),
        (["MODEL.WEIGHTS", "missing.pth"], r"MODEL\.WEIGHTS is 'missing\.pth'"),
        (["MODEL.ROI_HEADS.NUM_CLASSES", "2"], r"NUM_CLASSES is 2, but shapes_train has 3"),
        (["--num-gpus", "2", "SOLVER.IMS_PER_BATCH", "3"], r"IMS_PER_BATCH is 3.*2 processes"),
        (["--train-files", "missing.json", "."], r"missing\.json"),
        (["SOLVER.MAX_ITER", "0"], r"MAX_ITER is 0"),
        (
            ["SOLVER.MAX_ITER", "None"],
            r"SOLVER\.MAX_ITER is None; it must be a value such as 40000",
        ),
        (["DATASETS.TRAIN", "None"], r"DATASETS\.TRAIN is None"),
        (["MODEL.SAMPLER.SEED", "None"], r"MODEL\.SAMPLER\.SEED is None"),
        (["MODEL.DEVICE", "tpu"], r"MODEL\.DEVICE is 'tpu'; cpu"),
        (["MODEL.ROI_HEADS.NAME", "Nope"], r"ROI_HEADS\.NAME is 'Nope'; .*StandardROIHeads"),
        (["MODEL.META_ARCHITECTURE", "Nope"], r"'Nope'; .*GeneralizedRCNN"),
        (["MODEL.RESNETS.DEPTH", "7"], r"MODEL\.RESNETS\.DEPTH is 7; choose one of: .*101"),
        (["MODEL.BACKBONE.NAME", "Nope"], r"'Nope'; .*build_resnet_fpn_backbone"),
        (["SOLVER.LR_SCHEDULER_NAME", "Nope"], r"'Nope'; .*WarmupCosineLR"),
        (["MODEL.RPN.POSITIVE_FRACTION", "1.5"], r"RPN\.POSITIVE_FRACTION is 1\.5"),
        (["MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", "-4"], r"BATCH_SIZE_PER_IMAGE is -4"),
        (["--num-gpus", "0"], r"--num-gpus is 0; at least 1"),
        (["--num-gpus", "-1"], r"--num-gpus is -1"),
        (["--num-machines", "0"], r"--num-machines is 0"),
        (["--machine-rank", "5"], r"--machine-rank is 5; 0 to 0"),
        (["--num-machines", "2", "--dist-url", "auto"], r"--dist-url is 'auto'"),
        (
            ["--eval-only", "MODEL.WEIGHTS", CONFIG, "DATASETS.TEST", "()"],
            r"DATASETS\.TEST is empty",
        ),
        (["--eval-only"], r"--eval-only needs weights"),
        (["--eval-only", "--resume"], r"--eval-only needs weights"),
    ],
)
def test_wrong_input_stops_with_one_line(run, tmp_path, monkeypatch, arguments, message):
    monkeypatch.setattr(train_net, "launch", lambda *args, **kwargs: pytest.fail("it started"))
    with pytest.raises(SystemExit) as stopped:
        run(*arguments)
    line = str(stopped.value)
    assert line.startswith("train_net.py: error: ")
    assert "\n" not in line
    assert re.search(message, line), line
    assert not (tmp_path / "out").exists()


def test_a_missing_config_file(run):
    with pytest.raises(SystemExit, match=r"nothing\.yaml"):
        run(config="nothing.yaml")


def test_the_device_is_cuda_where_there_is_one(run):
    run_on = read_steps(run("SOLVER.MAX_ITER", "1", without=["MODEL.DEVICE"]) / "step_times.jsonl")
    assert run_on[0]["device"] == ("cuda:0" if torch.cuda.is_available() else "cpu")


def test_processes_of_torchrun_share_the_batch(run, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit, match="IMS_PER_BATCH is 2, which 3 processes"):
        run()


@pytest.mark.parametrize("text", ["", "plain", "- a list", "MODEL: [", "_BASE_: bad.yaml"])
def test_a_file_that_is_no_config(run, tmp_path, text):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(SystemExit, match=r"bad\.yaml is not a Detectron2 config") as stopped:
        run(config=str(path))
    assert "\n" not in str(stopped.value)


def change(name, value):
    def apply(own):
        own["annotations"][0][name] = value

    return apply


@pytest.mark.parametrize(
    ("apply", "message"),
    [
        (lambda own: own["annotations"][0].pop("area"), "area"),
        (change("id", 0), "id other than 0"),
        (lambda own: own["images"][0].update(width=99), "99x160.* is 160x160"),
        (lambda own: own["categories"][0].update(name="other"), "differ in their categories"),
    ],
)
def test_own_files_that_would_fail_later(run, data_folder, tmp_path, apply, message):
    image = next((data_folder / "shapes" / "train").iterdir())
    (tmp_path / "a.png").write_bytes(image.read_bytes())
    (tmp_path / "train.json").write_text(json.dumps(OWN))
    changed = copy.deepcopy(OWN)
    apply(changed)
    (tmp_path / "val.json").write_text(json.dumps(changed))
    files = [[str(tmp_path / name), str(tmp_path)] for name in ("train.json", "val.json")]
    with pytest.raises(SystemExit, match=message):
        run("--train-files", *files[0], "--val-files", *files[1])


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda p: p.name)
def test_configs_load_from_any_folder(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = get_cfg()
    add_sampler_config(cfg)
    merge_file(cfg, os.path.relpath(path))
    assert cfg.MODEL.SAMPLER.IMPL in ("naive", "static", "compiled")


def test_a_config_of_point_rend_without_it(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "detectron2.projects.point_rend", None)
    config = str(ROOT / "configs" / "pointrend_rcnn_R_50_FPN_static.yaml")
    with pytest.raises(
        SystemExit, match=r"MODEL\.POINT_HEAD, but this Detectron2 has no PointRend"
    ):
        run(config=config)


@pytest.mark.skipif(not HAS_POINT_REND, reason="no detectron2.projects.point_rend")
def test_classes_of_point_rend(run):
    config = str(ROOT / "configs" / "pointrend_rcnn_R_50_FPN_static.yaml")
    message = r"POINT_HEAD\.NUM_CLASSES is 80; it must be MODEL\.ROI_HEADS\.NUM_CLASSES, which is 3"
    with pytest.raises(SystemExit, match=message):
        run("MODEL.ROI_HEADS.NUM_CLASSES", "3", config=config)


@pytest.mark.parametrize("model", ["[1, 2]", "null"])
def test_a_model_that_is_no_mapping(run, tmp_path, model):
    config = tmp_path / "odd.yaml"
    config.write_text(f"MODEL: {model}\n")
    with pytest.raises(SystemExit, match=r"odd\.yaml is not .*MODEL is .*; it must be a mapping$"):
        run(config=str(config))


def test_the_config_node(tmp_path):
    plain = get_cfg()
    with pytest.raises(KeyError, match=r"MODEL\.SAMPLER"):
        plain.merge_from_file(CONFIG)
    cfg = get_cfg()
    add_sampler_config(cfg)
    assert cfg.MODEL.SAMPLER.IMPL == "naive"
    cfg.merge_from_file(CONFIG)
    add_sampler_config(cfg)
    assert cfg.MODEL.SAMPLER.IMPL == "static"
    late = get_cfg()
    late.merge_from_list(["SOLVER.MAX_ITER", 5])
    add_sampler_config(late)
    assert late.MODEL.SAMPLER.IMPL == "naive"

"""The training tool on small real runs."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from detectron2.config import get_cfg
from detectron2.engine import DefaultTrainer, default_setup

from d2_static_sampler import SamplerHook, add_sampler_config, install_sampler
from d2_static_sampler.data import ShapesSpec, ensure_shapes
from d2_static_sampler.engine import read_steps

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "train_net.py"
CONFIG = str(ROOT / "configs" / "quick" / "faster_rcnn_R_18_FPN_shapes.yaml")
SMALL = [
    "SOLVER.IMS_PER_BATCH", "2",
    "SOLVER.MAX_ITER", "10",
    "INPUT.MIN_SIZE_TRAIN", "(64,)",
    "INPUT.MIN_SIZE_TEST", "64",
    "DATASETS.TEST", "()",
    "MODEL.DEVICE", "cpu",
]  # fmt: skip

spec = importlib.util.spec_from_file_location("train_net", TOOL)
train_net = importlib.util.module_from_spec(spec)
sys.modules["train_net"] = train_net
spec.loader.exec_module(train_net)


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("datasets")
    ensure_shapes(folder, ShapesSpec(num_train=24, num_val=6))
    return folder


@pytest.fixture
def run(data_folder, tmp_path, monkeypatch):
    """Run the tool in this process; returns the output folder."""
    monkeypatch.setenv("DETECTRON2_DATASETS", str(data_folder))

    def run(*arguments, output="out", config=CONFIG):
        folder = tmp_path / output
        given = dict(zip(SMALL[::2], SMALL[1::2], strict=True))
        opts = [x for pair in given.items() if pair[0] not in arguments for x in pair]
        argv = [str(TOOL), "--config-file", config, *arguments, *opts, "OUTPUT_DIR", str(folder)]
        monkeypatch.setattr(sys, "argv", argv)
        train_net.run()
        return folder

    return run


def weights(folder):
    return torch.load(folder / "model_final.pth", weights_only=False)["model"]


def equal(a, b):
    return all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("impl", ["naive", "static", "compiled"])
def test_runs_repeat_bit_for_bit(run, impl):
    """Under a seed, with timing or without; another seed gives another run."""

    def train(name, *opts):
        return weights(run("MODEL.SAMPLER.IMPL", impl, *opts, output=name))

    first = train("a", "SEED", "7")
    assert equal(first, train("b", "SEED", "7", "MODEL.SAMPLER.TIMING", "False"))
    assert not equal(first, train("c", "SEED", "8"))
    if impl == "naive":
        return
    own = ("SEED", "7", "MODEL.SAMPLER.SEED")
    seeded = train("d", *own, "3")
    assert equal(seeded, train("e", *own, "3", "MODEL.SAMPLER.TIMING", "False"))
    assert not equal(seeded, train("f", *own, "4"))
    assert not equal(seeded, first)


def test_trains_evaluates_and_draws(run):
    folder = run("MODEL.SAMPLER.IMPL", "naive", "DATASETS.TEST", "('shapes_val',)")
    rows = read_steps(folder / "step_times.jsonl")
    assert [row["iteration"] for row in rows] == list(range(10))
    assert {row["impl"] for row in rows} == {"naive"}  # KEY VALUE overrides the YAML
    assert (folder / "inference" / "coco_instances_results.json").exists()
    assert (folder / "detections.png").stat().st_size > 10_000
    metrics = {}
    for line in (folder / "metrics.json").open():
        metrics |= json.loads(line)
    assert metrics["step_times/total_ms"] > 0
    assert "bbox/AP50" in metrics
    assert any(name.name.startswith("events.out.tfevents") for name in folder.iterdir())
    again = run("--eval-only", "--resume", "DATASETS.TEST", "('shapes_val',)")
    assert again == folder


class OwnTrainer(DefaultTrainer):
    """The README's lines for one's own training script."""

    @classmethod
    def build_model(cls, cfg):
        return install_sampler(super().build_model(cfg), cfg)

    def build_hooks(self):
        return [*super().build_hooks(), SamplerHook(self.cfg)]


def test_ones_own_script_does_the_same(run, tmp_path):
    expected = run("SEED", "7")
    cfg = get_cfg()
    add_sampler_config(cfg)
    cfg.merge_from_file(CONFIG)
    cfg.merge_from_list([*SMALL, "SEED", "7", "OUTPUT_DIR", str(tmp_path / "own")])
    default_setup(cfg, argparse.Namespace())
    trainer = OwnTrainer(cfg)
    trainer.resume_or_load(resume=False)
    trainer.train()
    assert equal(weights(tmp_path / "own"), weights(expected))
    own, tool = (read_steps(f / "step_times.jsonl") for f in (tmp_path / "own", expected))
    assert [row.keys() for row in own] == [row.keys() for row in tool]


def test_resume_goes_on(run):
    run("SOLVER.MAX_ITER", "4", "MODEL.SAMPLER.SEED", "1")
    folder = run("--resume", "SOLVER.MAX_ITER", "8", "MODEL.SAMPLER.SEED", "1")
    rows = read_steps(folder / "step_times.jsonl")
    assert [row["iteration"] for row in rows] == list(range(8))
    state = torch.load(folder / "model_final.pth", weights_only=False)["trainer"]
    assert state["hooks"]["SamplerHook"] == {"calls": [8, 8]}
    assert state["_trainer"]["optimizer"]["state"]


def test_a_killed_run_resumes_without_a_gap(data_folder, tmp_path):
    environment = os.environ | {"DETECTRON2_DATASETS": str(data_folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(TOOL), "--config-file", CONFIG, *SMALL]
    command += ["OUTPUT_DIR", str(tmp_path), "SOLVER.CHECKPOINT_PERIOD", "5"]
    log = tmp_path / "step_times.jsonl"
    with (tmp_path / "console").open("w") as console:
        process = subprocess.Popen(
            [*command, "SOLVER.MAX_ITER", "100000"], env=environment, stdout=console, stderr=console
        )
        deadline = time.monotonic() + 240
        while not (log.exists() and len(read_steps(log)) >= 12):
            assert process.poll() is None, (tmp_path / "console").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
        process.wait()
    checkpoint = (tmp_path / "last_checkpoint").read_text()
    saved = int(checkpoint.removeprefix("model_").removesuffix(".pth"))
    before = [row["iteration"] for row in read_steps(log)]
    assert before == list(range(len(before)))
    assert before[-1] >= saved

    subprocess.run(
        [*command[:2], "--resume", *command[2:], "SOLVER.MAX_ITER", str(saved + 4)],
        env=environment, check=True, capture_output=True,
    )  # fmt: skip
    assert [row["iteration"] for row in read_steps(log)] == list(range(saved + 4))


def test_two_processes_on_the_cpu(data_folder, tmp_path):
    environment = os.environ | {"DETECTRON2_DATASETS": str(data_folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(TOOL), "--num-gpus", "2", "--dist-url", "auto"]
    command += ["--config-file", CONFIG, *SMALL, "OUTPUT_DIR", str(tmp_path)]
    command += ["SOLVER.MAX_ITER", "3", "DATASETS.TEST", "('shapes_val',)"]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    rows = read_steps(tmp_path / "step_times.jsonl")
    assert [(row["iteration"], row["images"]) for row in rows] == [(0, 1), (1, 1), (2, 1)]
    assert (tmp_path / "log.txt.rank1").exists()
    assert (tmp_path / "detections.png").exists()


OWN = {
    "images": [{"id": 1, "file_name": "a.png", "height": 160, "width": 160}],
    "annotations": [
        {"id": 1, "image_id": 1, "category_id": 4, "bbox": [9, 9, 40, 40], "area": 1600,
         "iscrowd": 0, "segmentation": [[9, 9, 49, 9, 49, 49, 9, 49]]},
    ],
    "categories": [{"id": 4, "name": "thing"}],
}  # fmt: skip


def test_own_files(run, data_folder, tmp_path):
    image = next((data_folder / "shapes" / "train").iterdir())
    (tmp_path / "a.png").write_bytes(image.read_bytes())
    (tmp_path / "own.json").write_text(json.dumps(OWN))
    files = [str(tmp_path / "own.json"), str(tmp_path)]
    opts = ["SOLVER.MAX_ITER", "2", "MODEL.ROI_HEADS.NUM_CLASSES", "1"]
    folder = run("--train-files", *files, "--val-files", *files, *opts)
    assert len(read_steps(folder / "step_times.jsonl")) == 2
    assert (folder / "detections.png").exists()
    assert run("--train-files", *files, *opts, output="no_val")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["MODEL.SAMPLER.IMPL", "fast"], r"MODEL\.SAMPLER\.IMPL is 'fast'; choose one of: .*naive"),
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
        (["SOLVER.AMP.ENABLED", "True"], r"AMP"),
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA is there to be asked for")
def test_cuda_is_used_by_default(run):
    assert read_steps(run() / "step_times.jsonl")[0]["device"].startswith("cuda")


def test_cuda_that_is_not_there(run):
    if torch.cuda.is_available():
        return
    with pytest.raises(SystemExit, match="no CUDA"):
        run("MODEL.DEVICE", "cuda")


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda p: p.name)
def test_configs_load_from_any_folder(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = get_cfg()
    add_sampler_config(cfg)
    cfg.merge_from_file(os.path.relpath(path))
    assert cfg.MODEL.SAMPLER.IMPL in ("naive", "static", "compiled")


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

"""The training tool on small real runs."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time

import pytest
import torch
from detectron2.config import get_cfg
from detectron2.engine import DefaultTrainer, default_setup

from d2_static_sampler import SamplerHook, add_sampler_config, install_sampler
from d2_static_sampler.engine import read_steps
from tests.helpers import CONFIGS
from tests.modeling.models import HAS_POINT_REND, TINY
from tests.processes import Script, run_script
from tests.tools.train_net_helpers import CONFIG, SMALL, TOOL


def weights(folder):
    return torch.load(folder / "model_final.pth", weights_only=False)["model"]


def equal(a, b):
    return all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("impl", ["naive", "static", "compiled"])
def test_runs_repeat_bit_for_bit(run, impl):
    """Under a seed, with timing or without; another seed gives another run."""

    def train(name, *opts):
        four = ("SOLVER.MAX_ITER", "4", "MODEL.SAMPLER.IMPL", impl)
        return weights(run(*four, *opts, output=name))

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
    # The training data need not be there for it.
    missing = ("DATASETS.TRAIN", "('coco_2017_train',)")
    again = run("--eval-only", "--resume", "DATASETS.TEST", "('shapes_val',)", *missing)
    assert again == folder


@pytest.mark.skipif(not HAS_POINT_REND, reason="no detectron2.projects.point_rend")
def test_a_project_with_keys_of_its_own(run, tmp_path):
    """PointRend's leaf, made small and trained on the built-in data, is evaluated and resumed."""
    config = tmp_path / "small.yaml"
    config.write_text(f'_BASE_: "{CONFIGS}/pointrend_rcnn_R_50_FPN_static.yaml"\n')
    data = ("DATASETS.TRAIN", "('shapes_train',)", "DATASETS.TEST", "('shapes_val',)")
    small = (*TINY[2:], "MODEL.POINT_HEAD.NUM_CLASSES", 3, "MODEL.POINT_HEAD.FC_DIM", 16)
    small += ("MODEL.ROI_MASK_HEAD.FC_DIM", 16)
    small += ("TEST.DETECTIONS_PER_IMAGE", 3, "SOLVER.BASE_LR", 1e-5)
    opts = [str(opt) for opt in (*data, *small, "DATALOADER.NUM_WORKERS", 0, "SOLVER.MAX_ITER", 2)]
    folder = run(*opts, config=str(config))
    assert {row["impl"] for row in read_steps(folder / "step_times.jsonl")} == {"static"}
    assert "segm/AP" in json.loads((folder / "metrics.json").read_text().splitlines()[-1])
    # The saved config has the keys, too.
    again = str(folder / "config.yaml")
    assert run("--resume", "SOLVER.MAX_ITER", "3", config=again, without=SMALL[::2]) == folder
    assert len(read_steps(folder / "step_times.jsonl")) == 3


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


@pytest.mark.parametrize("seed", ["-1", "3"])
def test_resume_goes_on_with_another_impl(run, seed):
    """A checkpoint of naive has no count of calls: it goes on as if there was one an iteration."""
    impls = ["naive", "static", "compiled", "naive", "static"]
    for number, impl in enumerate(impls, start=1):
        opts = ("SOLVER.MAX_ITER", str(2 * number), "MODEL.SAMPLER.SEED", seed)
        folder = run("--resume", *opts, "MODEL.SAMPLER.IMPL", impl)
        state = torch.load(folder / "model_final.pth", weights_only=False)["trainer"]
        calls = {} if impl == "naive" else {"calls": [2 * number] * 2}
        assert state.get("hooks", {}).get("SamplerHook", {}) == calls
        assert state["iteration"] == 2 * number - 1
        assert state["_trainer"]["optimizer"]["state"]
    rows = read_steps(folder / "step_times.jsonl")
    assert [row["iteration"] for row in rows] == list(range(10))
    assert [row["impl"] for row in rows] == [impl for impl in impls for _ in range(2)]


def test_a_killed_run_resumes_without_a_gap(data_folder, tmp_path):
    environment = {"DETECTRON2_DATASETS": str(data_folder)}
    command = [str(TOOL), "--config-file", CONFIG, *SMALL]
    command += ["OUTPUT_DIR", str(tmp_path), "SOLVER.CHECKPOINT_PERIOD", "5"]
    log = tmp_path / "step_times.jsonl"
    endless = [*command, "SOLVER.MAX_ITER", "100000"]
    script = Script(endless, tmp_path, environment=environment)
    try:
        while not (log.exists() and len(read_steps(log)) >= 12):
            assert script.process.is_alive(), script.wait().stderr
            time.sleep(0.1)
    finally:
        script.kill()  # at any moment of an iteration
    checkpoint = (tmp_path / "last_checkpoint").read_text()
    saved = int(checkpoint.removeprefix("model_").removesuffix(".pth"))
    before = [row["iteration"] for row in read_steps(log)]
    assert before == list(range(len(before)))
    assert before[-1] >= saved

    resumed = [command[0], "--resume", *command[1:], "SOLVER.MAX_ITER", str(saved + 4)]
    done = run_script(resumed, tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr
    assert [row["iteration"] for row in read_steps(log)] == list(range(saved + 4))


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_not_forked(run, method):
    """Data set and mapper reach DataLoader's workers in a pickle then."""
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method(method, force=True)
    try:
        folder = run("SOLVER.MAX_ITER", "2", "DATALOADER.NUM_WORKERS", "1")
    finally:
        multiprocessing.set_start_method(before, force=True)
    assert len(read_steps(folder / "step_times.jsonl")) == 2


def test_mixed_precision_on_the_cpu(run):
    amp, one = ("SOLVER.AMP.ENABLED", "True"), ("SEED", "7", "SOLVER.MAX_ITER", "1")
    plain = weights(run(*one, output="plain"))
    mixed = weights(run(*one, *amp))
    assert not equal(mixed, plain)
    assert [x.dtype for x in mixed.values()] == [x.dtype for x in plain.values()]
    assert all(x.isfinite().all() for x in mixed.values())
    rows = read_steps(run("--resume", "SOLVER.MAX_ITER", "2", *amp) / "step_times.jsonl")
    assert [row["iteration"] for row in rows] == [0, 1]
    assert all(row[key] > 0 for row in rows for key in row if key.endswith("_ms"))


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

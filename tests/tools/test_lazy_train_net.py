"""The tool for LazyConfigs, on small real runs."""

from __future__ import annotations

import json
import sys

import lazy_train_net
import pytest
import torch
from detectron2.config import LazyCall, LazyConfig, instantiate
from detectron2.modeling import build_model
from omegaconf import OmegaConf

from d2_static_sampler import install_sampler
from d2_static_sampler.engine import read_steps
from d2_static_sampler.lazy import yaml_config
from d2_static_sampler.modeling import installed_samplers
from tests.helpers import small_config
from tests.processes import run_script
from tests.tools.train_net_helpers import ROOT

TOOL = ROOT / "tools" / "lazy_train_net.py"
CONFIG = str(ROOT / "configs" / "quick" / "faster_rcnn_R_18_FPN_shapes.py")
SMALL = (
    "train.max_iter=3",
    "dataloader.train.total_batch_size=2",
    "dataloader.train.mapper.augmentations.0.short_edge_length=[64]",
    "dataloader.test.mapper.augmentations.0.short_edge_length=64",
)


@pytest.fixture(autouse=True)
def datasets(data_folder, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(data_folder))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that runs the tool in this process, on a small run."""

    def run(*arguments, config=CONFIG, opts=SMALL):
        argv = [str(TOOL), "--config-file", str(config), *arguments, *opts]
        monkeypatch.setattr(sys, "argv", [*argv, f"train.output_dir={tmp_path / 'out'}"])
        lazy_train_net.run()
        return read_steps(tmp_path / "out" / "step_times.jsonl")

    return run


def impls(model):
    return [head.impl for head in installed_samplers(model).values()]


def test_trains_resumes_and_evaluates(run, tmp_path):
    rows = run("sampler.seed=1")
    assert [(row["iteration"], row["impl"], row["images"]) for row in rows] == [
        (0, "static", 2), (1, "static", 2), (2, "static", 2)
    ]  # fmt: skip
    assert all(row["rpn_sample_ms"] > 0 and row["roi_sample_ms"] > 0 for row in rows)
    results = tmp_path / "out" / "inference" / "coco_instances_results.json"
    assert results.exists()

    results.unlink()
    saved = tmp_path / "out" / "config.yaml"
    opts = ("train.max_iter=5", "sampler.impl=compiled", "dataloader.evaluator=null")
    rows = run("--resume", "train.amp.enabled=True", config=saved, opts=opts)
    assert [row["impl"] for row in rows] == ["static"] * 3 + ["compiled"] * 2
    state = torch.load(tmp_path / "out" / "model_final.pth", weights_only=False)["trainer"]
    assert state["iteration"] == 4
    assert state["hooks"]["SamplerHook"] == {"calls": [5, 5]}
    assert state["optimizer"]["state"]

    assert not results.exists()
    run("--resume", "--eval-only")
    assert results.exists()


def test_the_static_step(run, tmp_path):
    """In mixed precision; its figures are there when the writers of this config want them."""
    amp = ("train.amp.enabled=True", "train.log_period=2", "dataloader.evaluator=null")
    rows = run("sampler.static_step=True", *amp)
    assert [row["impl"] for row in rows] == ["static+step"] * 3
    lines = (tmp_path / "out" / "metrics.json").read_text().splitlines()
    figures = [json.loads(line) for line in lines]
    assert [line["iteration"] for line in figures] == [1, 2]
    assert all(line["total_loss"] > 0 for line in figures)


def test_two_processes_on_the_cpu(data_folder, tmp_path):
    command = [str(TOOL), "--num-gpus", "2", "--dist-url", "auto", "--config-file", CONFIG, *SMALL]
    command += ["dataloader.evaluator=null", f"train.output_dir={tmp_path}"]
    done = run_script(command, tmp_path, forks=True)
    assert done.returncode == 0, done.stderr
    rows = read_steps(tmp_path / "step_times.jsonl")
    assert [(row["iteration"], row["images"]) for row in rows] == [(0, 1), (1, 1), (2, 1)]
    assert (tmp_path / "log.txt.rank1").exists()


@pytest.mark.parametrize(
    ("opt", "message"),
    [
        ("sampler.impl=fast", "sampler.impl is 'fast'; choose one of: compiled, naive, static"),
        ("sampler.ipml=static", "sampler has 'ipml'; choose one of: impl, log_period, "),
        ("sampler=static", "sampler is 'static'; set one of its keys: impl, "),
        ("train.max_iter=0", "train.max_iter is 0; at least 1"),
        ("dataloader.train.dataset.names=nothing", "dataloader.train.dataset.names has 'nothing'"),
        ("train=3", "has no train.output_dir, "),
        ("--eval-only", "--eval-only needs weights: set train.init_checkpoint, "),
    ],
)
def test_wrong_input_stops_with_one_line(monkeypatch, tmp_path, opt, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(TOOL), "--config-file", CONFIG, opt])
    with pytest.raises(SystemExit) as stopped:
        lazy_train_net.run()
    assert stopped.value.code.startswith("lazy_train_net.py: error: ")
    assert message in stopped.value.code
    assert "\n" not in stopped.value.code
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("missing.py", None, "missing.py"),
        ("broken.py", "model = (", "broken.py"),
        ("other.yaml", "MODEL: {}", "other.yaml has no model, optimizer, "),
        ("text.txt", "", "text.txt"),
        ("absent.py", "import no_such_module_at_all", "no_such_module_at_all"),
    ],
)
def test_a_file_that_is_no_lazy_config(monkeypatch, tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sys, "argv", [str(TOOL), "--config-file", str(tmp_path / name)])
    with pytest.raises(SystemExit) as stopped:
        lazy_train_net.run()
    assert message in stopped.value.code
    assert "\n" not in stopped.value.code


def test_the_same_model_as_the_yaml():
    """Names, shapes and figures of the two configs are equal, so checkpoints fit both."""
    lazy = lazy_train_net.build_model(LazyConfig.load(CONFIG))
    yaml = build_model(small_config(narrow=False))
    assert impls(lazy) == ["static", "static"]
    shapes = [{k: v.shape for k, v in m.state_dict().items()} for m in (lazy, yaml)]
    assert shapes[0] == shapes[1]
    for name in ("batch_size_per_image", "positive_fraction"):
        for head in ("proposal_generator", "roi_heads"):
            assert getattr(getattr(lazy, head), name) == getattr(getattr(yaml, head), name)
    assert lazy.proposal_generator.pre_nms_topk == yaml.proposal_generator.pre_nms_topk
    assert lazy.proposal_generator.post_nms_topk == yaml.proposal_generator.post_nms_topk


def test_a_config_without_the_node_is_detectron2s():
    cfg = LazyConfig.load(CONFIG)
    del cfg.sampler
    assert yaml_config(cfg).MODEL.SAMPLER.IMPL == "naive"
    assert impls(lazy_train_net.build_model(cfg)) == []
    LazyConfig.apply_overrides(cfg, ["+sampler.impl=static"])
    assert impls(lazy_train_net.build_model(cfg)) == ["static", "static"]


def test_the_sampler_inside_the_model(tmp_path):
    """One line of a config, for Detectron2's own Lazy script, saved and loaded and overridden."""
    cfg = LazyConfig.load(CONFIG)
    cfg.model = LazyCall(install_sampler)(model=cfg.model, cfg_or_name_or_sampler="${sampler.impl}")
    LazyConfig.save(cfg, str(tmp_path / "config.yaml"))
    loaded = LazyConfig.load(str(tmp_path / "config.yaml"))
    assert OmegaConf.to_container(loaded)["model"]["_target_"].startswith("d2_static_sampler.")
    for impl in ("static", "compiled"):
        LazyConfig.apply_overrides(loaded, [f"sampler.impl={impl}"])
        assert impls(instantiate(loaded.model)) == [impl, impl]
    del cfg.sampler
    cfg.model.cfg_or_name_or_sampler = "static"
    assert impls(lazy_train_net.build_model(cfg)) == ["static", "static"]

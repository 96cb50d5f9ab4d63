"""The hook around a static step: deferred losses, what an error leaves, compiled step times."""

from __future__ import annotations

import json

import pytest
import torch
from detectron2.engine import SimpleTrainer
from detectron2.engine.hooks import CallbackHook, PeriodicWriter
from detectron2.utils.events import JSONWriter

from d2_static_sampler import SamplerHook, install_sampler, uninstall_sampler
from d2_static_sampler.engine import read_steps
from d2_static_sampler.modeling import has_static_step, static_graphs
from d2_static_sampler.modeling.deferred import PERIOD, deferred_metrics
from tests.helpers import make_batch, small_config, small_model


def make_trainer(folder, *opts, impl="static", static_step=True, hooks=(), fails_at=None):
    def batches():
        for i in range(100):
            if i == fails_at:
                raise RuntimeError("no more data")
            yield make_batch((2, 1), size=64)

    model = install_sampler(small_model(), impl, static_step=static_step, seed=1)
    trainer = SimpleTrainer(model, batches(), torch.optim.SGD(model.parameters(), lr=1e-3))
    cfg = small_config("OUTPUT_DIR", str(folder), "MODEL.SAMPLER.WARMUP_ITERS", 0, *opts)
    trainer.register_hooks([*hooks, SamplerHook(cfg)])
    return trainer


def num_losses(trainer):
    histories = trainer.storage.histories()
    return len(histories["total_loss"].values()) if "total_loss" in histories else 0


@pytest.mark.parametrize("timing", [True, False])
def test_losses_come_every_period(tmp_path, timing):
    seen = []
    hook = CallbackHook(after_step=lambda trainer: seen.append(num_losses(trainer)))
    opts = ("MODEL.SAMPLER.LOG_PERIOD", 3, "SOLVER.CHECKPOINT_PERIOD", 4, "TEST.EVAL_PERIOD", 0)
    trainer = make_trainer(tmp_path, "MODEL.SAMPLER.TIMING", timing, *opts, hooks=[hook])
    before = set(vars(trainer))
    trainer.train(0, 7)
    assert seen == [1, 1, 3, 4, 4, 6, 7]
    # Nothing of the hook stays in the trainer.
    own = {"start_iter", "max_iter", "storage", "_data_loader_iter_obj"}
    assert set(vars(trainer)) - before <= own
    assert deferred_metrics(trainer.storage).period == PERIOD


def test_without_a_static_step_nothing_is_deferred(tmp_path):
    trainer = make_trainer(tmp_path, static_step=False)
    hook = CallbackHook(before_step=lambda trainer: own.append("_write_metrics" in vars(trainer)))
    own = []
    trainer.register_hooks([hook])
    trainer.train(0, 1)
    assert own == [False]


def test_a_checkpoint_at_any_moment_has_checked_losses(tmp_path):
    def save(trainer):
        deferred_metrics().check(trainer.iter != 2, FloatingPointError, "diverged")
        trainer.state_dict()
        assert num_losses(trainer) == trainer.iter + 1

    trainer = make_trainer(tmp_path, hooks=[CallbackHook(after_step=save)])
    with pytest.raises(FloatingPointError, match=r"diverged \(iteration 2\)"):
        trainer.train(0, 5)
    assert trainer.iter == 2


def test_after_an_error_writers_before_the_hook_have_all(tmp_path):
    writer = PeriodicWriter([JSONWriter(str(tmp_path / "metrics.json"))])
    trainer = make_trainer(tmp_path, hooks=[writer], fails_at=3)
    with pytest.raises(RuntimeError, match="no more data"):
        trainer.train(0, 9)
    line = json.loads((tmp_path / "metrics.json").read_text())
    assert line["iteration"] == 2
    assert line["total_loss"] > 0
    assert line["rpn/num_neg_anchors"] > 0
    assert "after_train" not in vars(trainer)
    assert num_losses(trainer) == 3


def test_times_of_a_compiled_step(tmp_path, simulated, monkeypatch):
    """Labels, sample and losses of the RPN are one graph: they are in rpn_label_ms."""

    def compile_in_a_second(graph, inputs, config_patches):
        simulated.sleep(1)
        return graph.forward

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda _: compile_in_a_second)
    trainer = make_trainer(tmp_path, impl="compiled")
    trainer.train(0, 3)
    rows = read_steps(tmp_path / "step_times.jsonl")
    assert [row["impl"] for row in rows] == ["compiled+step"] * 3
    assert [row["warmup"] for row in rows] == [True, False, False]
    assert [each.num_graphs for each in static_graphs(trainer.model)] == [1, 1, 1]
    for row in rows:
        assert row["rpn_sample_ms"] == row["roi_sample_ms"] == 0
        assert 0 < row["rpn_label_ms"] < row["forward_ms"]
        assert 0 < row["roi_label_ms"] < row["forward_ms"]
    assert rows[0]["rpn_label_ms"] >= 1000 > rows[2]["rpn_label_ms"]


def test_a_step_that_cannot_compile_says_so(tmp_path):
    trainer = make_trainer(tmp_path, impl="compiled")
    for each in static_graphs(trainer.model):
        each.is_eager = True
    trainer.train(0, 1)
    (row,) = read_steps(tmp_path / "step_times.jsonl")
    assert row["impl"] == "compiled+step (eager)"


def test_which_models_have_a_static_step():
    model = small_model()
    assert not has_static_step(model)
    assert not has_static_step(install_sampler(model, "static"))
    install_sampler(model, "static", static_step=True)
    assert has_static_step(model)
    assert has_static_step(model.eval())
    assert has_static_step(torch.nn.Sequential(model))
    assert static_graphs(model) == []
    assert not has_static_step(uninstall_sampler(model))

"""The hook in a real trainer: rows, figures in the storage, state in the checkpoint."""

from __future__ import annotations

import copy
import time

import detectron2.modeling.proposal_generator.rpn as stock_rpn
import pytest
import torch
from detectron2.engine import HookBase, SimpleTrainer

from d2_static_sampler import SamplerHook, build_label_sampler, install_sampler
from d2_static_sampler.engine import read_steps
from d2_static_sampler.modeling import installed_samplers
from tests.helpers import make_batch, sampler_by, small_config, small_model

PHASES = ("data_ms", "forward_ms", "backward_ms", "optimizer_ms", "other_ms")
PARTS = ("rpn_label_ms", "rpn_sample_ms", "roi_label_ms", "roi_sample_ms")
AUTOGRAD_BACKWARD = torch.autograd.backward
FIELDS = ["iteration", "impl", "images", "device", "warmup", *PHASES, "total_ms", *PARTS]


class Collect(HookBase):
    """What the storage and the model hold after each step."""

    def __init__(self):
        self.scalars, self.clones = [], []

    def after_step(self):
        self.scalars.append(dict(self.trainer.storage.latest()))
        self.clones.append(copy.deepcopy(self.trainer.model))


def train(tmp_path, impl="static", *, iterations=4, start=0, opts=(), loader=None, model=None):
    cfg = small_config("OUTPUT_DIR", str(tmp_path), "MODEL.SAMPLER.WARMUP_ITERS", 2, *opts)
    model = model or install_sampler(small_model(), impl, seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    trainer = SimpleTrainer(model, loader or Repeat(make_batch((2, 1), size=64)), optimizer)
    collect = Collect()
    trainer.register_hooks([collect, SamplerHook(cfg)])
    trainer.train(start, start + iterations)
    return trainer, collect


class Repeat:
    """An endless loader of one batch; ``before`` runs before each."""

    def __init__(self, batch, before=lambda i: None):
        self.batch, self.before = batch, before

    def __iter__(self):
        i = 0
        while True:
            self.before(i)
            yield self.batch
            i += 1


def sleeping(labels, **kwargs):
    time.sleep(0.05)
    return build_label_sampler("static")(labels, **kwargs)


def rows_of(tmp_path):
    return read_steps(tmp_path / "step_times.jsonl")


@pytest.mark.parametrize("impl", ["naive", "static", "compiled"])
def test_a_row_an_iteration(tmp_path, impl):
    _, collect = train(tmp_path, impl)
    rows = rows_of(tmp_path)
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3]
    for row, scalars in zip(rows, collect.scalars, strict=True):
        assert list(row) == FIELDS
        assert (row["impl"], row["images"], row["device"]) == (impl, 2, "cpu")
        assert sum(row[phase] for phase in PHASES) == pytest.approx(row["total_ms"], abs=1e-6)
        assert all(row[part] > 0 for part in (*PHASES, *PARTS))
        assert row["rpn_sample_ms"] < row["rpn_label_ms"] < row["forward_ms"]
        assert row["roi_sample_ms"] < row["roi_label_ms"] < row["forward_ms"]
        for key in (*PHASES, "total_ms", *PARTS):
            assert scalars[f"step_times/{key}"] == (row[key], row["iteration"])
    assert [row["warmup"] for row in rows] == [True, True, False, False]


@pytest.mark.usefixtures("eager_graphs")
def test_an_iteration_that_compiles_is_warmup(tmp_path):
    batches = [make_batch((1, 1), size=64), make_batch((1,), size=64)]
    loader = (batches[i == 3] for i in range(10))
    model = install_sampler(small_model(), sampler_by("compiled"))
    train(tmp_path, iterations=5, loader=loader, model=model)
    assert [row["warmup"] for row in rows_of(tmp_path)] == [True, True, False, True, False]


def test_a_delay_shows_where_it_is(tmp_path, simulated):
    def slow(labels, **kwargs):
        simulated.sleep(0.05)
        return build_label_sampler("static")(labels, **kwargs)

    model = install_sampler(small_model(), slow)
    loader = Repeat(make_batch((2, 1), size=64), lambda i: simulated.sleep(0.2 * (i == 2)))
    train(tmp_path, loader=loader, model=model)
    within = {"abs": 1}  # ten looks at the clock
    for i, row in enumerate(rows_of(tmp_path)):
        assert row["data_ms"] == pytest.approx(200 * (i == 2), **within)
        assert row["forward_ms"] == pytest.approx(100, **within)
        for part in PARTS:
            assert row[part] == pytest.approx(50, **within)


def test_a_real_delay_shows_in_full(tmp_path):
    train(tmp_path, model=install_sampler(small_model(), sleeping), iterations=1)
    row = rows_of(tmp_path)[0]
    assert min(row[part] for part in PARTS) >= 50
    assert row["forward_ms"] >= 100


def test_a_delay_in_naive_shows_an_image(tmp_path, monkeypatch):
    def slow(*args, stock=stock_rpn.subsample_labels):
        time.sleep(0.05)
        return stock(*args)

    monkeypatch.setattr(stock_rpn, "subsample_labels", slow)
    train(tmp_path, "naive", iterations=1)
    assert rows_of(tmp_path)[0]["rpn_sample_ms"] >= 100
    assert stock_rpn.subsample_labels is slow


def test_timing_off_measures_nothing(tmp_path):
    trainer, collect = train(tmp_path, opts=("MODEL.SAMPLER.TIMING", False))
    assert not (tmp_path / "step_times.jsonl").exists()
    assert not any(key.startswith("step_times") for key in collect.scalars[-1])
    assert "run_step" not in vars(trainer)


def test_nothing_of_the_timer_stays_in_the_model(tmp_path):
    trainer, collect = train(tmp_path, "static")
    plain = install_sampler(small_model(), "static")
    for model in (trainer.model, collect.clones[0]):
        for module, expected in zip(model.modules(), plain.modules(), strict=True):
            assert vars(module).keys() == vars(expected).keys()
    assert "step" not in vars(trainer.optimizer)
    assert "run_step" not in vars(trainer)
    assert torch.autograd.backward is AUTOGRAD_BACKWARD


def test_rows_are_written_before_an_error(tmp_path):
    def fail(i):
        if i == 3:
            raise RuntimeError("no more data")

    model = install_sampler(small_model(), "static")
    loader = Repeat(make_batch((1, 1), size=64), fail)
    with pytest.raises(RuntimeError, match="no more data"):
        train(tmp_path, iterations=9, loader=loader, model=model)
    assert [row["iteration"] for row in rows_of(tmp_path)] == [0, 1, 2]
    assert "forward" not in vars(model)
    assert torch.autograd.backward is AUTOGRAD_BACKWARD


def test_call_counts_are_in_the_checkpoint(tmp_path):
    trainer, _ = train(tmp_path, iterations=3)
    state = trainer.state_dict()
    assert state["hooks"]["SamplerHook"] == {"calls": [3, 3]}
    resumed, _ = train(tmp_path, iterations=0)
    resumed.load_state_dict(state)
    assert [head.calls for head in installed_samplers(resumed.model).values()] == [3, 3]
    naive, _ = train(tmp_path, "naive", iterations=1)
    assert "hooks" not in naive.state_dict()


def test_a_second_hook_does_not_time_again(tmp_path, warnings_of_detectron2):
    cfg = small_config("OUTPUT_DIR", str(tmp_path))
    model = install_sampler(small_model(), "static")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    trainer = SimpleTrainer(model, Repeat(make_batch((1, 1), size=64)), optimizer)
    trainer.register_hooks([SamplerHook(cfg), SamplerHook(cfg)])
    trainer.train(0, 2)
    assert len(rows_of(tmp_path)) == 2
    assert "not timed" in warnings_of_detectron2[0]

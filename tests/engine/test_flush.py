"""Figures of a static step when one asks for them: a loop of one's own, a hook, an uninstall.

What Detectron2's own step logs with the same picks is what has to be there, in its order.
"""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from detectron2.engine import SimpleTrainer, hooks
from detectron2.engine.hooks import CallbackHook, PeriodicWriter
from detectron2.utils.events import CommonMetricPrinter, EventStorage, JSONWriter

from d2_static_sampler import (
    SamplerHook,
    flush_metrics,
    install_sampler,
    uninstall_sampler,
)
from d2_static_sampler.modeling import has_static_step
from d2_static_sampler.modeling.deferred import deferred_metrics
from tests.helpers import small_config
from tests.modeling.deferred_helpers import count_reads, written
from tests.modeling.models import MODELS

TINY = MODELS["faster_fpn"]()
FIGURE = "rpn/num_pos_anchors"
WRITER_PERIOD = 20


def loop(model, storage, iterations, behind=lambda i: None):
    """A plain loop of one's own, within the storage."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for i in range(storage.iter, storage.iter + iterations):
        storage.iter = i
        losses = model(TINY.batch((2, 1), seed=i))
        optimizer.zero_grad()
        sum(losses.values()).backward()
        optimizer.step()
        behind(i)
    storage.iter = i + 1


def iterations_of(storage, name=FIGURE):
    return [at for _, at in written(storage).get(name, [])]


def with_step():
    return install_sampler(TINY.build(), "static", static_step=True, seed=1)


def test_a_plain_loop_has_all_figures_after_one_call():
    stock = install_sampler(TINY.build(), "static", seed=1)
    with EventStorage() as expected:
        loop(stock, expected, 23)
    with EventStorage() as storage:
        loop(with_step(), storage, 23)
        assert iterations_of(storage) == list(range(19))
        flush_metrics()
        assert storage.iter == 23
    assert set(written(storage)) == set(written(expected))
    for name, history in written(expected).items():
        assert [at for _, at in written(storage)[name]] == [at for _, at in history]
    # Of the first step: later ones differ by what rounding made of the weights.
    assert {k: v[0][0] for k, v in written(storage).items()} == pytest.approx(
        {k: v[0][0] for k, v in written(expected).items()}
    )


def test_behind_the_loop_the_storage_is_named():
    with EventStorage() as storage:
        loop(with_step(), storage, 3)
    with pytest.raises(ValueError, match=r"no current EventStorage: .*flush_metrics\(storage\)"):
        flush_metrics()
    flush_metrics(storage)
    flush_metrics(storage)
    assert iterations_of(storage) == [0, 1, 2]
    with pytest.raises(TypeError, match="EventStorage, not GeneralizedRCNN"):
        flush_metrics(TINY.build())


def test_a_flush_raises_what_the_first_check_found():
    with EventStorage() as storage:
        for storage.iter in range(4):
            deferred_metrics().put("x", storage.iter)
            deferred_metrics().check(storage.iter < 2, FloatingPointError, "diverged")
            deferred_metrics().check(storage.iter < 1, AssertionError, "bad boxes")
        with pytest.raises(AssertionError, match=r"bad boxes \(iteration 1\)"):
            flush_metrics()
    assert iterations_of(storage, "x") == [0, 1]


def test_a_loss_that_is_no_number_is_found_by_a_flush():
    """Through the model itself: Detectron2's exception, with the iteration's number."""
    model = with_step()
    with EventStorage() as storage:
        loop(model, storage, 2)
        with torch.no_grad():
            model.proposal_generator.rpn_head.anchor_deltas.bias.fill_(float("nan"))
        loop(model, storage, 1)
        with pytest.raises(FloatingPointError, match=r"iteration 2"):
            flush_metrics()
    assert iterations_of(storage)[:2] == [0, 1]


@pytest.mark.parametrize(
    "leave",
    [uninstall_sampler, lambda model: install_sampler(model, "static")],
    ids=["uninstall", "without the step"],
)
def test_taking_the_step_out_writes_its_figures_first(leave):
    model = with_step()
    with EventStorage() as storage:
        loop(model, storage, 5)
        assert iterations_of(storage) == []
        leave(model)
        assert iterations_of(storage) == [0, 1, 2, 3, 4]
        loop(model, storage, 3)
    assert not has_static_step(model)
    for name in written(storage):
        assert iterations_of(storage, name) == sorted(iterations_of(storage, name))
    assert iterations_of(storage) == list(range(8))


def test_between_two_loops_too():
    model = with_step()
    with EventStorage() as storage:
        loop(model, storage, 3)
    uninstall_sampler(model)
    with storage:
        loop(model, storage, 2)
    assert iterations_of(storage) == [0, 1, 2, 3, 4]


def test_an_uninstall_that_finds_a_failed_check_uninstalls():
    model = with_step()
    with EventStorage():
        deferred_metrics().check(False, FloatingPointError, "diverged")
        with pytest.raises(FloatingPointError, match="diverged"):
            uninstall_sampler(model)
    assert not has_static_step(model)
    assert uninstall_sampler(model) is model


def test_an_uninstall_without_a_step_writes_nothing():
    with EventStorage() as storage:
        deferred_metrics().put("x", 1)
        uninstall_sampler(install_sampler(TINY.build(), "static"))
        assert written(storage) == {}


def make_trainer(folder, *own_hooks, static_step=True, **opts):
    model = install_sampler(TINY.build(), "static", static_step=static_step, seed=1)
    batches = (TINY.batch((2, 1), seed=i) for i in range(1000))
    trainer = SimpleTrainer(model, batches, torch.optim.SGD(model.parameters(), lr=1e-3))
    pairs = [x for pair in opts.items() for x in pair]
    cfg = small_config("OUTPUT_DIR", str(folder), "SOLVER.CHECKPOINT_PERIOD", 0, *pairs)
    trainer.register_hooks([*own_hooks, SamplerHook(cfg)])
    return trainer


class ReadLatest(CallbackHook):
    """Reads what Detectron2 has after each iteration, as hooks of users do."""

    NAMES = ("total_loss", "loss_rpn_cls", "roi_head/num_fg_samples", FIGURE, "data_time")

    def __init__(self):
        super().__init__()
        self.seen = []

    def after_step(self):
        latest = self.trainer.storage.latest()
        self.seen.append({name: latest[name] for name in self.NAMES})


@pytest.mark.parametrize("start", [0, 7])
def test_a_hook_reads_the_newest_known_values(tmp_path, start):
    """From the first iteration on; each value says of which iteration it is."""
    reader, stock = ReadLatest(), ReadLatest()
    make_trainer(tmp_path / "ours", reader).train(start, start + 23)
    make_trainer(tmp_path / "stock", stock, static_step=False).train(start, start + 23)
    due = {start, 19, start + 22}
    for i, (latest, stocks) in enumerate(zip(reader.seen, stock.seen, strict=True), start):
        newest = max(at for at in due if at <= i)
        assert {at for _, at in latest.values()} == {newest}
        assert {at for _, at in stocks.values()} == {i}
    for name in ("total_loss", "loss_rpn_cls", FIGURE):
        assert reader.seen[0][name] == pytest.approx(stock.seen[0][name])


def test_the_first_values_take_one_copy_more_a_run(tmp_path):
    copies = []
    count = CallbackHook(after_step=lambda trainer: copies.append(list(counted.reads)))
    with count_reads() as counted:
        make_trainer(tmp_path, count).train(0, 21)
    of_flushes = [sum(name == "tolist" for name in reads) for reads in copies]
    steps = [after - before for before, after in itertools.pairwise(of_flushes)]
    assert steps == [0] * 18 + [1, 1]  # iteration 19 for the writers, and the last


def test_with_log_period_1_every_iteration_is_there(tmp_path):
    reader = ReadLatest()
    make_trainer(tmp_path, reader, **{"MODEL.SAMPLER.LOG_PERIOD": 1}).train(0, 4)
    assert [latest["total_loss"][1] for latest in reader.seen] == [0, 1, 2, 3]


def test_writers_write_what_they_write_of_detectron2s_step(tmp_path):
    """JSONWriter's lines have the same names and iterations; the printer finds its losses."""
    lines = {}
    for name, static_step in (("ours", True), ("stock", False)):
        writers = [CommonMetricPrinter(45), JSONWriter(str(tmp_path / f"{name}.json"))]
        hook = PeriodicWriter(writers, period=WRITER_PERIOD)
        trainer = make_trainer(tmp_path / name, hooks.IterationTimer(), static_step=static_step)
        trainer.register_hooks([hook])
        trainer.train(0, 45)
        lines[name] = [json.loads(line) for line in (tmp_path / f"{name}.json").open()]
    assert [line["iteration"] for line in lines["ours"]] == [19, 39, 44]
    assert [set(line) for line in lines["ours"]] == [set(line) for line in lines["stock"]]


class Saved:
    """In place of a checkpointer: the names under which something was saved."""

    def __init__(self):
        self.names = []

    def save(self, name, **_):
        self.names.append(name)


def test_the_best_checkpoint_by_the_newest_known_loss(tmp_path):
    """Evaluations of another period than the hook's see the loss of the last flush."""
    saved, metrics = Saved(), []
    best = hooks.BestCheckpointer(4, saved, "total_loss", "min")
    look = CallbackHook(after_step=lambda trainer: metrics.append(best.best_metric))
    make_trainer(tmp_path, best, look, **{"TEST.EVAL_PERIOD": 0}).train(0, 9)
    assert saved.names[0] == "model_best"
    assert metrics[2] is None
    assert metrics[3] > 0


def test_an_uninstall_in_mid_training(tmp_path):
    """In a hook: losses and figures stay in order, and none is lost."""

    def leave(trainer):
        if trainer.iter == 6:
            uninstall_sampler(trainer.model)

    trainer = make_trainer(tmp_path, CallbackHook(after_step=leave))
    trainer.train(0, 25)
    for name in ("total_loss", "loss_rpn_cls", FIGURE, "roi_head/num_fg_samples"):
        assert iterations_of(trainer.storage, name) == list(range(25))


def test_a_checkpoint_after_an_uninstall_has_checked_losses(tmp_path):
    def leave_and_save(trainer):
        if trainer.iter == 2:
            uninstall_sampler(trainer.model)
        if trainer.iter == 4:
            trainer.state_dict()
            assert iterations_of(trainer.storage, "total_loss") == [0, 1, 2, 3, 4]

    trainer = make_trainer(tmp_path, CallbackHook(after_step=leave_and_save))
    trainer.train(0, 6)
    assert len(iterations_of(trainer.storage, "total_loss")) == 6

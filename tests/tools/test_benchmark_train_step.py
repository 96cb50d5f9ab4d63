"""The benchmark of training steps with the static step, beside the step of Detectron2."""

from __future__ import annotations

import benchmark_runs
import benchmark_train
import pytest

from tests.helpers import small_config

TINY = ["MODEL.RPN.PRE_NMS_TOPK_TRAIN", "50", "MODEL.ROI_BOX_HEAD.FC_DIM", "16"]
BRIEF = ["--synthetic", "64", "64", "--images", "1", "--steps", "3", "--warmup", "1"]


def make_run(folder, impl, *opts):
    cfg = small_config(*TINY, "SOLVER.IMS_PER_BATCH", 2, "MODEL.SAMPLER.SEED", 1, *opts)
    return benchmark_runs.ImplRun(cfg, impl, (64, 96), folder / impl)


def test_runs_differ_in_the_step_alone(tmp_path):
    # Equal weights in both steps: of other ones the order of two proposals may differ.
    lr = "SOLVER.BASE_LR", 0.0
    runs = [make_run(tmp_path, impl, *lr) for impl in ("static", "static+step")]
    for number in range(2):
        for run in runs:
            run.step(number)
    assert [run.finish()[-1]["impl"] for run in runs] == ["static", "static+step"]
    static, step = (run.trainer.storage.history("total_loss").values() for run in runs)
    assert [value for value, _ in step] == pytest.approx([value for value, _ in static], rel=1e-4)


def test_in_mixed_precision_on_a_cpu():
    impls = ["--impl", "static+step", "--", "SOLVER.AMP.ENABLED", "True", *TINY]
    rows = benchmark_train.main([*BRIEF, *impls])
    assert [row["impl"] for row in rows] == ["naive", "static+step"]
    assert all(row["roi_label_p50_ms"] > 0 for row in rows)


def test_a_loss_that_is_not_a_number_is_found_at_the_end(tmp_path):
    wild = (
        "SOLVER.BASE_LR",
        1e30,
        "SOLVER.WARMUP_ITERS",
        0,
        "SOLVER.CLIP_GRADIENTS.ENABLED",
        False,
    )
    run = make_run(tmp_path, "static+step", *wild)
    for number in range(3):
        run.step(number)
    with pytest.raises(FloatingPointError):
        run.finish()


def test_the_step_is_chosen_by_the_name(capsys):
    with pytest.raises(SystemExit) as stopped:
        benchmark_train.main([*BRIEF, "--", "MODEL.SAMPLER.STATIC_STEP", "True"])
    assert stopped.value.code == 2
    assert "MODEL.SAMPLER.STATIC_STEP is what --impl sets" in capsys.readouterr().err

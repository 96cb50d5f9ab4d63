"""The benchmark of training steps on tiny real runs: rows, what is alike, what a delay does."""

from __future__ import annotations

import csv
import time

import benchmark_runs
import benchmark_train
import pytest
import torch
from detectron2.data import detection_utils

from d2_static_sampler import LABEL_SAMPLER_REGISTRY, build_label_sampler
from tests.helpers import NARROW

PHASES = ("data", "forward", "backward", "optimizer", "other")
PARTS = ("rpn_label", "rpn_sample", "roi_label", "roi_sample")
TINY = [*NARROW, "SOLVER.CLIP_GRADIENTS.ENABLED", "False", "SOLVER.BASE_LR", "1e-3"]
TINY += ["MODEL.RPN.PRE_NMS_TOPK_TRAIN", "50", "MODEL.ROI_BOX_HEAD.FC_DIM", "16"]
BRIEF = ["--synthetic", "64", "64", "--images", "1", "--steps", "3", "--warmup", "1"]


class Delayed:
    """The static sampler, after a delay at each call or at one; ``num_graphs`` rises at that."""

    def __init__(self, seconds: float, at: int | None = None, sleep=time.sleep) -> None:
        self.static = build_label_sampler("static")
        self.seconds, self.at, self.sleep = seconds, at, sleep
        self.calls = self.num_graphs = 0

    def __call__(self, labels, **request):
        if self.at in (None, self.calls):
            self.sleep(self.seconds)
            self.num_graphs += self.at is not None
        self.calls += 1
        return self.static(labels, **request)


@pytest.fixture
def register():
    """Registers a sampler for one test."""
    names = []

    def register(name, make):
        LABEL_SAMPLER_REGISTRY._do_register(name, make)
        names.append(name)

    yield register
    for name in names:
        del LABEL_SAMPLER_REGISTRY._obj_map[name]


@pytest.fixture
def data(data_folder, monkeypatch):
    """The small built-in data set is where the tools look for it."""
    monkeypatch.setenv("DETECTRON2_DATASETS", str(data_folder))


def run(impl, *arguments, opts=()):
    rows = benchmark_train.main([*arguments, "--impl", *impl, "--", *TINY, *opts])
    return {row["impl"]: row for row in rows}


def test_a_row_an_impl_and_batch_size(tmp_path, capsys):
    path = tmp_path / "new" / "rows.csv"
    sizes = ["--synthetic", "64", "96", "--images", "1", "2", "--steps", "4", "--warmup", "1"]
    benchmark_train.main([*sizes, "--csv", str(path), *TINY])
    with path.open() as file:
        rows = list(csv.DictReader(file))
    impls = ("naive", "static", "compiled", "static+step")
    asked = [(images, impl) for images in "12" for impl in impls]
    assert [(row["images"], row["impl"]) for row in rows] == asked
    printed = capsys.readouterr().out
    for row in rows:
        check_row(row)
        assert row["config"] == "faster_rcnn_R_18_FPN_shapes.yaml"
        assert (row["data"], row["opts"]) == ("synthetic 64x96", " ".join(TINY))
        assert (row["threads"], row["device"], row["peak_mb"]) == ("1", "cpu", "n/a")
        assert row["torch"] == torch.__version__
        assert row["commit"] in printed
        assert row["date"] in printed
        assert f"{float(row['ratio']):.3f} [" in printed


def check_row(row):
    def ms(name, point="p50"):
        return float(row[f"{name}_{point}_ms"])

    for name in (*PHASES, *PARTS, "total"):
        assert ms(name, "p20") <= ms(name) <= ms(name, "p80")
    for head in ("rpn", "roi"):
        assert 0 < ms(f"{head}_sample") < ms(f"{head}_label") < ms("forward")
    assert 0 < max(ms(name) for name in PHASES) < ms("total")
    assert float(row["ratio_low"]) <= float(row["ratio"]) <= float(row["ratio_high"])
    assert row["impl"] != "naive" or float(row["ratio_low"]) == float(row["ratio_high"]) == 1
    speed = int(row["images"]) / ms("total") * 1e3
    assert float(row["images_per_s"]) == pytest.approx(speed, rel=1e-2)
    assert float(row["first_s"]) >= 0


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize("workers", ["", "0", "1"], ids=["synthetic", "loader", "worker"])
def test_runs_are_alike_but_for_the_sampler(register, tmp_path, workers):
    """Equal weights and batches; and equal losses where the samplers do the same."""
    register("twin", lambda: build_label_sampler("static"))
    args = benchmark_train.make_parser().parse_args(
        ["--images", "2", "--", *TINY, "INPUT.MIN_SIZE_TRAIN", "(64,)"]
        + (["DATALOADER.NUM_WORKERS", workers] if workers else [])
    )
    cfg = benchmark_train.build_config(args)
    cfg.SOLVER.IMS_PER_BATCH = 2
    size = None if workers else (64, 96)
    names = ("naive", "static", "twin")
    runs = [benchmark_runs.ImplRun(cfg, name, size, tmp_path / name) for name in names]
    seen = [[] for _ in runs]
    for one, batches in zip(runs, seen, strict=True):
        one.model.register_forward_pre_hook(lambda _, given, to=batches: to.append(given[0]))
    first = runs[0].model.state_dict()
    assert all(torch.equal(first[k], v) for one in runs for k, v in one.model.state_dict().items())
    for number in range(2):
        for one in runs:
            one.step(number)
    naive, static, twin = (one.trainer.storage.history("total_loss").values() for one in runs)
    assert static == twin
    assert naive != static
    for batches in seen[1:]:
        assert [pixels(batch) for batch in batches] == [pixels(batch) for batch in seen[0]]
    assert pixels(seen[0][0]) != pixels(seen[0][1])


def pixels(batch):
    return [(item["image"].tolist(), item["instances"].gt_boxes.tensor.tolist()) for item in batch]


def test_synthetic_images_are_drawn_before_the_step(simulated, monkeypatch):
    draw = benchmark_runs.SyntheticLoader.draw

    def slow(loader, seed):
        simulated.sleep(1)
        draw(loader, seed)

    monkeypatch.setattr(benchmark_runs.SyntheticLoader, "draw", slow)
    rows = run(["static"], *BRIEF)
    assert all(row["total_p80_ms"] < 10 for row in rows.values())


@pytest.mark.usefixtures("data")
def test_the_configs_own_data(simulated, monkeypatch):
    """Its images are read in the step, a millisecond each here."""
    read = detection_utils.read_image

    def slow(*args, **kwargs):
        simulated.sleep(1e-3)
        return read(*args, **kwargs)

    monkeypatch.setattr(detection_utils, "read_image", slow)
    sizes = ["--images", "2", "--steps", "3", "--warmup", "1"]
    opts = ["INPUT.MIN_SIZE_TRAIN", "(64,)", "DATALOADER.NUM_WORKERS", "0"]
    rows = run(["static"], *sizes, opts=opts)
    assert list(rows) == ["naive", "static"]
    assert {row["data"] for row in rows.values()} == {"shapes_train"}
    assert all(row["data_p50_ms"] >= 2 for row in rows.values())


def test_a_delay_in_the_sampler_shows_there_and_nowhere_else(register, simulated):
    """To the microsecond, in simulated time: what else a step takes is not in it."""
    register("slow", lambda: Delayed(0.02, sleep=simulated.sleep))
    rows = run(["static", "slow"], *BRIEF)
    added = {
        name: rows["slow"][f"{name}_p50_ms"] - rows["static"][f"{name}_p50_ms"]
        for name in (*PHASES, *PARTS)
    }
    expected = dict.fromkeys(PHASES, 0) | dict.fromkeys(PARTS, 20) | {"forward": 40}
    assert added == pytest.approx(expected, abs=2e-3)
    assert rows["slow"]["ratio"] > rows["static"]["ratio"]


def test_a_real_delay_shows_in_full(register):
    register("slow", lambda: Delayed(0.02))
    slow = run(["slow"], *BRIEF)["slow"]
    assert all(slow[f"{part}_p20_ms"] >= 20 for part in PARTS)
    assert slow["forward_p20_ms"] >= 40


@pytest.mark.parametrize("step", [0, 2], ids=["in warm-up", "later"])
def test_what_compiling_takes_stands_apart(register, simulated, step):
    register("late", lambda: Delayed(1.0, at=2 * step, sleep=simulated.sleep))
    row = run(["late"], *BRIEF)["late"]
    assert row["first_s"] == pytest.approx(1, abs=0.01)  # a hundred looks at the clock
    assert row["total_p80_ms"] < 10
    if step:
        with pytest.raises(SystemExit) as stopped:
            run(["late"], *BRIEF, "--steps", "2")
        assert stopped.value.code == 1


def test_the_order_changes_from_round_to_round():
    class Fake:
        def __init__(self, name):
            self.name = name

        def step(self, number):
            order[number] += self.name

        def finish(self):
            return self.name

    order = [""] * 4
    runs = {name: Fake(name) for name in "abc"}
    logs = benchmark_runs.run_rounds(runs, range(4), benchmark_train.tqdm(disable=True))
    assert order == ["abc", "bca", "cab", "abc"]
    assert logs == {"a": "a", "b": "b", "c": "c"}


def test_drift_leaves_the_ratio_alone():
    """Steps of a machine that becomes ten times slower; the first is warm-up."""
    naive = [{"images": 4, "total_ms": 100.0 * (1 + i)} for i in range(10)]
    other = [{"images": 4, "total_ms": 50.0 * (1 + i)} for i in range(10)]
    other[0]["total_ms"] = 2_300
    row = benchmark_runs.summarize(other, naive, list(range(1, 10)))
    assert row["ratio"] == row["ratio_low"] == row["ratio_high"] == 0.5
    assert row["total_p50_ms"] == 300
    assert row["first_s"] == 2
    assert row["images_per_s"] == 13.33


def test_the_interval_covers_the_median():
    """The share of 200 samples whose interval holds the truth; 3 % false alarms, seed fixed."""
    random = torch.Generator().manual_seed(0)
    samples = torch.randn(200, 30, generator=random).exp().tolist()
    covered = sum(low <= 1 <= high for low, high in map(benchmark_runs.bootstrap, samples))
    assert 182 <= covered <= 198

"""tools/profile_step.py: the known counts, by phase and line; traces with ranges; clear errors."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from pathlib import Path

import profile_step
import pytest

from d2_static_sampler import LABEL_SAMPLER_REGISTRY
from d2_static_sampler.profiling.step_phases import PHASES, count_waits
from d2_static_sampler.samplers import StaticSampler
from tests.helpers import needs_inductor
from tests.processes import run_script

from ..helpers import CONFIGS

TOOLS = Path(__file__).parents[2] / "tools"
# The same operations as in the default model, on fewer numbers.
SMALL = ["--size", "128", "128", "MODEL.FPN.OUT_CHANNELS", "16", "MODEL.ROI_BOX_HEAD.FC_DIM", "16"]


class WaitingSampler(StaticSampler):
    """Reads a value on the host, once a call."""

    def __call__(self, labels, **options):
        labels.sum().item()
        return super().__call__(labels, **options)


ITEM_LINE = inspect.getsourcelines(WaitingSampler.__call__)[1] + 1


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """The output folder of a run of three samplers, and its rows by (IMPL, images)."""
    LABEL_SAMPLER_REGISTRY.register(WaitingSampler)
    folder = tmp_path_factory.mktemp("profile") / "new"
    impls = ["naive", "static", "WaitingSampler"]
    try:
        profile_step.main(["--impl", *impls, "--images", "1", "2", "--output", str(folder), *SMALL])
    finally:
        del LABEL_SAMPLER_REGISTRY._obj_map["WaitingSampler"]
    return folder, read_rows(folder)


def read_rows(folder):
    rows = json.loads((folder / "profile.json").read_text())["rows"]
    return {(row["impl"], row["images"]): row for row in rows}


def test_the_known_counts_of_detectron2(profiled):
    folder, rows = profiled
    assert rows["naive", 1]["data_dependent"] == {
        "total": 52,
        "by_phase": {"match": 11, "sample": 4, "loss": 9, "pooler": 5, "nms": 15, "logging": 6,
                     "other": 2},
    }  # fmt: skip
    assert rows["naive", 2]["data_dependent"]["total"] == 83
    text = (folder / "profile.txt").read_text()
    assert f"config default, overrides {' '.join(SMALL[3:])}, size 128x128, threads " in text
    assert "detectron2/modeling/poolers.py:" in text


def test_parts_add_up(profiled):
    for row in profiled[1].values():
        for kind in ("data_dependent", "ops"):
            assert list(row[kind]["by_phase"]) == list(PHASES)
            assert sum(row[kind]["by_phase"].values()) == row[kind]["total"]
        assert sum(row["ops_by_name"].values()) == row["ops"]["total"] > 1000
        by_phase = Counter()
        for line in row["lines"]:
            by_phase[line["phase"]] += line["times"]
            assert len(Path(line["file"]).read_text().splitlines()) >= line["line"] > 0
        assert {phase: by_phase[phase] for phase in PHASES} == row["data_dependent"]["by_phase"]


def test_static_has_fewer_and_none_in_the_sampling(profiled):
    rows = profiled[1]
    for images in (1, 2):
        naive, static = (rows[impl, images]["data_dependent"] for impl in ("naive", "static"))
        assert static["total"] < naive["total"]
        assert naive["by_phase"]["sample"] == 4 * images
        assert static["by_phase"]["sample"] == 0
        for phase in ("loss", "pooler", "nms", "logging", "other"):
            assert static["by_phase"][phase] == naive["by_phase"][phase]


def test_a_planted_item_shows_with_its_line(profiled):
    folder, rows = profiled
    for images in (1, 2):
        sampling = [
            line for line in rows["WaitingSampler", images]["lines"] if line["phase"] == "sample"
        ]
        assert sampling == [
            {
                "phase": "sample",
                "op": "aten::_local_scalar_dense",
                "file": __file__,
                "line": ITEM_LINE,
                "times": 2,  # heads
            }
        ]
    assert f"test_profile_step.py:{ITEM_LINE} " in (folder / "profile.txt").read_text()


def test_traces_have_the_phases_as_ranges(profiled):
    folder, rows = profiled
    for (impl, images), row in rows.items():
        assert row["trace"] == f"trace_{impl}_{images}.json"
        events = json.loads((folder / row["trace"]).read_text())["traceEvents"]
        ranges = Counter(each["name"] for each in events if each.get("cat") == "user_annotation")
        assert {"step", "forward", "backward", "optimizer", *PHASES[:-1]} <= set(ranges)
        assert ranges["match"] == ranges["nms"] + 1 == ranges["step"] + 1 == 2
        assert ranges["sample"] == (2 * images if impl == "naive" else 2)


@needs_inductor
def test_a_compiled_sampler_shows_its_graphs(tmp_path, capsys):
    profile_step.main(["--impl", "compiled", "--images", "2", "--output", str(tmp_path), *SMALL])
    row = read_rows(tmp_path)["compiled", 2]
    graphs = row["graphs"]
    assert (graphs["captured"], graphs["breaks"], graphs["is_eager"]) == (2, 0, False)
    for graph in graphs["each"]:
        assert graph["data_dependent"]["total"] == 0
        assert graph["ops"]["total"] == sum(graph["ops_by_name"].values()) > 30
    # A counter sees the static sampler in its place: no figures of the sampling.
    for kind in ("data_dependent", "ops"):
        assert row[kind]["total"] is row[kind]["by_phase"]["sample"] is None
        assert row[kind]["by_phase"]["match"] > 0
    printed = capsys.readouterr().out
    assert "compiles_cpu=True" in printed
    operations = ", ".join(str(graph["ops"]["total"]) for graph in graphs["each"])
    assert f"| {operations} " in printed


def test_waits_of_a_trace_on_cuda():
    """As torch.profiler writes it: calls on the host, and copies on the device's own time."""

    def call(name, ts, correlation):
        args = {"correlation": correlation}
        return {"cat": "cuda_runtime", "name": name, "ts": ts, "dur": 1, "args": args}

    def span(name, ts, dur, cat="user_annotation"):
        return {"cat": cat, "name": name, "ts": ts, "dur": dur}

    def copy(name, correlation):
        args = {"correlation": correlation}
        return {"cat": "gpu_memcpy", "name": name, "ts": 900, "dur": 1, "args": args}

    events = [
        span("step", 10, 100), span("match", 20, 50), span("sample", 30, 10),
        span("loss", 0, 500, cat="gpu_user_annotation"),
        call("cudaMemcpyAsync", 32, 1), copy("Memcpy DtoH (Device -> Pageable)", 1),
        call("cudaStreamSynchronize", 34, 2),
        call("cudaMemcpyAsync", 50, 3), copy("Memcpy HtoD (Pageable -> Device)", 3),
        call("cudaDeviceSynchronize", 60, 4), call("cudaLaunchKernel", 62, 5),
        call("cudaEventSynchronize", 100, 6),
        call("cudaDeviceSynchronize", 200, 7),  # the profiler's own, behind the step
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    ]  # fmt: skip
    assert count_waits(events) == {
        "synchronizations": {"sample": 1, "match": 1, "other": 1},
        "copies": {"sample": 1},
    }


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--impl", "fast"], "--impl is 'fast'; choose from: compiled, naive, static"),
        (["--impl", "naive+step"], "--impl is 'naive+step'; choose from: compiled, naive, static"),
        (["--images", "1", "0"], "--images is 0; at least 1"),
        (["--size", "256", "0"], "--size is 0; at least 32"),
        (["--device", "tpu"], "device is 'tpu'; cpu or cuda"),
        (["--device", "cpu:x"], "device is 'cpu:x'; cpu or cuda"),
        (["--images", str(10**12)], "--images 1000000000000 --size 256 256: out of memory"),
        (["--device", "cuda"], "this torch finds no CUDA device"),
        (["--config-file", "/nothing.yaml"], "/nothing.yaml"),
        (["--config-file", str(TOOLS / "profile_step.py")], "is not a Detectron2 config"),
        (["--output", "/proc/nothing"], "/proc/nothing"),
        (["--images", "1", "MODEL.NOTHING", "1"], "MODEL.NOTHING"),
        (["--impl", "naive", "MODEL.DEVICE"], "odd length"),
        (["MODEL.SAMPLER.SELECT", "best"], "MODEL.SAMPLER.SELECT is 'best'"),
        (["MODEL.ROI_HEADS.NAME", "NoHeads"], "NoHeads"),
        (["MODEL.RPN.BATCH_SIZE_PER_IMAGE", "-5"], "RPN.BATCH_SIZE_PER_IMAGE is -5; at least 0"),
        (["MODEL.RESNETS.DEPTH", "7"], "RESNETS.DEPTH is 7; choose one of: (18, 34, 50, 101, 152)"),
        (["MODEL.ROI_HEADS.NUM_CLASSES", "0"], "ROI_HEADS.NUM_CLASSES is 0; at least 1"),
        (["MODEL.PROPOSAL_GENERATOR.NAME", "RRPN"], "PROPOSAL_GENERATOR.NAME is 'RRPN'"),
    ],
)
def test_wrong_arguments_stop_at_once(tmp_path, monkeypatch, capsys, args, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        profile_step.main(args)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_running_out_of_memory_is_one_line(tmp_path, monkeypatch, capsys):
    """The allocator's own error, at an image that no address space holds."""
    monkeypatch.setattr(profile_step, "check_memory", lambda *_: None)
    huge = ["--size", str(10**8), str(10**8), "--images", "1", "--impl", "naive"]
    with pytest.raises(SystemExit) as stop:
        profile_step.main([*huge, "--output", str(tmp_path)])
    assert stop.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "error: out of memory at images of 100000000 x 100000000: " in error


def test_as_a_command(tmp_path):
    config = str(CONFIGS / "quick" / "Base-RCNN-R_18-FPN-shapes.yaml")
    options = ["--config-file", config, "--impl", "static", "--images", "1", "--size", "64", "96"]
    command = [str(TOOLS / "profile_step.py"), *options, "--output", str(tmp_path)]
    done = run_script(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "static, 1 images" in done.stderr  # the progress
    assert f"in {tmp_path}" in done.stdout
    assert done.stdout.startswith((tmp_path / "profile.txt").read_text())
    wrong = run_script([*command, "--images", "0"], tmp_path)
    assert wrong.returncode == 2
    assert "error: --images is 0; at least 1" in wrong.stderr
    assert "Traceback" not in wrong.stderr

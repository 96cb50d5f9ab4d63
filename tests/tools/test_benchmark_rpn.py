"""tools/benchmark_rpn.py and tools/benchmark_ap.py: rows from real runs, and wrong arguments."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import benchmark_ap
import benchmark_rpn
import pytest

TOOLS = Path(__file__).parents[2] / "tools"


def run(tool, monkeypatch, *args):
    monkeypatch.setattr(sys, "argv", [f"{tool.__name__}.py", *map(str, args)])
    tool.main()


def test_rows(monkeypatch, tmp_path, capsys):
    path = tmp_path / "rows.csv"
    small = "--size", 64, 96, "--images", 2, "--threads", 1, "--rounds", 2
    run(benchmark_rpn, monkeypatch, *small, "--impl", "static", "static+step", "--csv", path)
    rows = list(csv.DictReader(path.open()))
    assert [row["implementation"] for row in rows] == ["Detectron2", "static", "static+step"]
    waits = [int(row["waits"]) for row in rows]
    assert waits[0] > waits[1] > waits[2] == 0
    assert float(rows[0]["speedup"]) == 1
    assert all(float(row["p50_ms"]) > 0 < float(row["peak_mb"]) for row in rows)
    assert "static+step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--impl", "fast"], "--impl is 'fast'"),
        (["--size", "0", "9"], "at least 1"),
        (["--rounds", "1"], "at least 2"),
        (["--device", "tpu"], "--device is 'tpu'; cpu or cuda"),
        (["--size", "10000000", "10000000"], "out of memory"),
    ],
)
def test_wrong_arguments(monkeypatch, capsys, args, message):
    with pytest.raises(SystemExit) as stop:
        run(benchmark_rpn, monkeypatch, *args)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--config-file", "none.yaml"], "no such file"),
        (["--config-file", __file__, "--impl", "naive+step"], "--impl is 'naive+step'"),
        (["--config-file", __file__, "--jobs", "0"], "at least 1"),
        (["--config-file", __file__, "--csv", "."], "Is a directory"),
    ],
)
def test_wrong_arguments_for_ap(monkeypatch, capsys, args, message):
    with pytest.raises(SystemExit) as stop:
        run(benchmark_ap, monkeypatch, *args)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_the_last_ap_counts(tmp_path):
    path = tmp_path / "metrics.json"
    lines = [
        {"total_loss": 1.0},
        *({f"bbox/{n}": v for n in ("AP", "AP50", "AP75")} for v in (1, 2)),
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert benchmark_ap.read_figures(path) == {"AP": 2, "AP50": 2, "AP75": 2}
    path.write_text(json.dumps(lines[0]))
    with pytest.raises(RuntimeError, match="has no bbox/AP"):
        benchmark_ap.read_figures(path)


def test_means_and_spreads():
    row = {"AP": 1.0, "AP50": 4.0, "AP75": 0.0}
    rows = [{"impl": "naive", **row}, {"impl": "naive", **row, "AP": 3.0}]
    assert "2.00 ± 1.41" in benchmark_ap.summarize(rows)


def test_a_failure_keeps_what_was_trained(monkeypatch, tmp_path):
    def train(impl, seed, args):
        if seed == 2:
            raise RuntimeError("naive, seed 2: no memory")
        return {"impl": impl, "seed": seed, "AP": 1.0, "AP50": 4.0, "AP75": 0.0}

    monkeypatch.setattr(benchmark_ap, "train", train)
    path = tmp_path / "rows.csv"
    args = "--config-file", __file__, "--impl", "naive", "--csv", path
    with pytest.raises(SystemExit, match="error: naive, seed 2: no memory"):
        run(benchmark_ap, monkeypatch, *args)
    assert [row["seed"] for row in csv.DictReader(path.open())] == ["1"]

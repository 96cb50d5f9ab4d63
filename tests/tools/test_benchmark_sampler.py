"""The sampler's benchmark as a command: rows for all it was asked, clear errors."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "benchmark_sampler.py"


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *args]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_row_an_implementation_and_shape(tmp_path):
    path = tmp_path / "new" / "rows.csv"
    done = run("--work", "forms", "--threads", "1", "--rounds", "2", "--csv", str(path))
    assert done.returncode == 0, done.stderr
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 5 * 7
    assert {row["implementation"] for row in rows} == {
        "Detectron2's loop", "NumPy table", "NumPy blocks",
        "table", "blocks of 64", "blocks of 96", "blocks of 120",
    }  # fmt: skip
    for row in rows:
        is_loop = row["implementation"] == "Detectron2's loop"
        assert 0 < float(row["p20_ms"]) <= float(row["p50_ms"]) <= float(row["p80_ms"])
        assert int(row["waits"]) == (2 * int(row["B"]) if is_loop else 0)
        assert not is_loop or float(row["speedup"]) == 1
        assert row["torch"]
        assert row["commit"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--work", "mask"], "invalid choice: 'mask'"),
        (["--select", "fast"], "invalid choice: 'fast'"),
        (["--rounds", "1"], "--rounds is at least 2"),
        (["--threads", "0"], "--threads at least 1"),
        (["--device", "tpu"], "--device tpu: cpu or cuda"),
        (["--csv", "/proc/nothing/rows.csv"], "/proc/nothing"),
    ],
)
def test_wrong_arguments_stop_at_once(args, message):
    done = run(*args)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr

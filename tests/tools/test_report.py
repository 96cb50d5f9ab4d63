"""Figures and tables come from the benchmarks' CSV files, and the committed ones are up to date."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REPORTS = [ROOT / "README.md", *sorted((ROOT / "docs" / "benchmarks").glob("*.md"))]
SAMPLER_ROWS = [
    {"work": "RPN", "B": b, "N": 100, "K": 8, "threads": 1, "implementation": name,
     "p50_ms": 1.25 / b, "speedup": s * b, "waits": waits}
    for b in (1, 2)
    for name, s, waits in (("loop", 1, 2 * b), ("ours", 6.125, 0), ("compiled", 5, ""))
]  # fmt: skip
TRAIN_ROWS = [
    {"impl": impl, "images": 2, "data_p50_ms": 1, "forward_p50_ms": 20.5, "backward_p50_ms": 30,
     "optimizer_p50_ms": 4, "other_p50_ms": 0.5, "total_p50_ms": 56}
    for impl in ("naive", "static")
]  # fmt: skip
TABLE = "<!-- table csv=rows.csv rows=B columns=implementation value=p50_ms {} -->\n<!-- end -->\n"


def run(tool: str, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / tool), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def write(path: Path, rows: list[dict]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.mark.parametrize(
    ("rows", "figures", "words"),
    [
        (SAMPLER_ROWS, {"rows-speedup.svg", "rows-waits.svg"}, {"ours", "compiled"}),
        (TRAIN_ROWS, {"rows-phases.svg"}, {"naive", "static", "backward"}),
    ],
)
def test_figures_of_each_kind_of_rows(rows, figures, words, tmp_path):
    path = write(tmp_path / "rows.csv", rows)
    first = run("plot_results.py", path, "--output", tmp_path / "new" / "folder")
    assert first.returncode == 0, first.stderr
    drawn = {file.name: file.read_text() for file in (tmp_path / "new" / "folder").iterdir()}
    assert set(drawn) == figures
    comments = set(re.findall(r"<!-- (.*?) -->", "".join(drawn.values())))
    assert words <= comments  # matplotlib writes each text as a comment beside its glyphs
    assert run("plot_results.py", path).returncode == 0
    assert all((tmp_path / name).read_text() == text for name, text in drawn.items())


def test_a_table_is_filled_and_found_stale(tmp_path):
    write(tmp_path / "rows.csv", SAMPLER_ROWS)
    report = tmp_path / "report.md"
    report.write_text("Before.\n" + TABLE.format("'of=ours|loop' where=work:RPN") + "After.\n")
    assert run("fill_tables.py", "--check", report).returncode == 1
    assert run("fill_tables.py", report).returncode == 0
    lines = report.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("Before.", "After.")
    assert lines[2:6] == ["| B | ours | loop |", "|--:|--:|--:|", "| 1 | 1.25 | 1.25 |",
                          "| 2 | 0.625 | 0.625 |"]  # fmt: skip
    assert run("fill_tables.py", "--check", report).returncode == 0
    write(tmp_path / "rows.csv", [row | {"p50_ms": 7} for row in SAMPLER_ROWS])
    assert run("fill_tables.py", "--check", report).returncode == 1


@pytest.mark.parametrize(
    ("tool", "content", "message"),
    [
        ("plot_results.py", "a,b\n1,2\n", "not the columns of a benchmark: a, b"),
        ("plot_results.py", "a,b\n", "no rows"),
        ("plot_results.py", None, "No such file"),
        ("fill_tables.py", TABLE.format(""), "rows.csv"),
        ("fill_tables.py", TABLE.format("colour=red"), "knows"),
    ],
)
def test_wrong_files_stop_with_one_line(tool, content, message, tmp_path):
    path = tmp_path / "file"
    if content is not None:
        path.write_text(content)
    done = run(tool, path)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_the_committed_reports_show_the_committed_rows():
    done = run("fill_tables.py", "--check", *REPORTS)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("report", REPORTS, ids=lambda path: path.name)
def test_the_committed_figures_exist(report):
    for target in re.findall(r"!\[.*?\]\((.*?)\)", report.read_text()):
        assert (report.parent / target).is_file(), target

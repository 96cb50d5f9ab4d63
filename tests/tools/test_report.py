"""Figures and tables come from the benchmarks' CSV files, and the committed ones are up to date."""

from __future__ import annotations

import csv
import importlib
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
OPEN = TABLE.format("").splitlines(keepends=True)[0]


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


HEADER = "work,B,N,threads,implementation,p50_ms,speedup,waits\n"
LINE = "RPN,1,100,1,loop,1.25,1,2\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n1,2\n", ": not the columns of a benchmark: a, b"),
        ("a,b\n", ": no rows"),
        ("", ": no rows"),
        (
            HEADER.replace(",threads", "") + LINE.replace(",100,1", ",100"),
            ": no column 'threads'; ",
        ),
        (HEADER + LINE + "RPN,1,100\n", ", line 3: 3 cells for 8 columns"),
        (HEADER + "x," + LINE, ", line 2: 9 cells for 8 columns"),
        (HEADER + "x" * 200_000 + LINE, ", line 2: field larger than field limit"),
        (HEADER + LINE.replace(",1,2", ",,2"), ", line 2: speedup is ''; it must be a number"),
        (HEADER + LINE.replace(",1,2", ",nan,2"), ", line 2: speedup is 'nan'; it must be"),
        (HEADER + LINE.replace(",1,2", ",1,zz"), ", line 2: waits is 'zz'; it must be a number"),
        (HEADER + LINE.replace(",100", ",1.5").replace("RPN", "study"), ", line 2: N is 1.5; "),
        (HEADER + LINE.replace("RPN,1", "RPN,1e999"), ", line 2: B is '1e999'; it must be"),
        (b"\x89PNG\r\n\xff", " is not a CSV file: 'utf-8' codec can't decode"),
        (b"a,b\n\0,1\n", " is not a CSV file: it has a zero byte"),
    ],
)
def test_no_figure_of_a_wrong_file(content, message, tmp_path, monkeypatch, capsys):
    path = tmp_path / "rows.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    error = error_of("plot_results", [path], monkeypatch, capsys)
    assert str(path) in error
    assert message in error
    assert [file.name for file in tmp_path.iterdir()] == ["rows.csv"]


def error_of(tool, arguments, monkeypatch, capsys) -> str:
    """The one line that a tool says in this process before it stops."""
    monkeypatch.setattr(sys, "argv", [f"{tool}.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(tool).main()
    assert stop.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"{tool}.py: error: ")
    return line


@pytest.mark.parametrize(
    ("text", "rows", "message"),
    [
        (TABLE.format(""), None, "rows.csv"),
        (TABLE.format("colour=red"), HEADER + LINE, "line 1: table csv=rows.csv"),
        (TABLE.format("colour"), HEADER + LINE, "knows"),
        (TABLE.format("'of=loop"), HEADER + LINE, "line 1: No closing quotation"),
        (TABLE.format(""), HEADER + "RPN,1\n", "rows.csv, line 2: 2 cells for 8 columns"),
        (TABLE.format(""), HEADER + "x" * 200_000 + LINE, "rows.csv, line 2: field larger"),
        (TABLE.format(""), HEADER, "rows.csv: no rows"),
        (TABLE.format(""), "\0", "rows.csv is not a CSV file"),
        (TABLE.format("value=zz"), HEADER + LINE, "rows.csv: no column 'zz'; it has: work, B, N"),
        (TABLE.format("rows=zz"), HEADER + LINE, "rows.csv: no column 'zz'; it has: work"),
        (TABLE.format("columns=zz"), HEADER + LINE, "rows.csv: no column 'zz'; it has: work"),
        (TABLE.format("where=zz:1"), HEADER + LINE, "rows.csv: no column 'zz'; it has: work"),
        (TABLE.format("where=B:7"), HEADER + LINE, "rows.csv: no row where B:7"),
        (TABLE.format("where=B"), HEADER + LINE, "rows.csv: no row where B"),
        (TABLE.format("of=zz"), HEADER + LINE, "rows.csv: no implementation 'zz'; it has: loop"),
        ("Text.\n" + OPEN + "Text.\n" + TABLE.format(""), HEADER + LINE,
         "line 2: <!-- table without an <!-- end --> before the next table in line 4"),
        (TABLE.format("") + OPEN + "Text.\n", HEADER + LINE,
         "line 3: <!-- table without an <!-- end --> before the end"),
        (TABLE.format("") + "<!-- end -->\n", HEADER + LINE, "line 3: <!-- end --> without"),
        (TABLE.format("").replace("-->\n<", "\n<"), "", "line 1: <!-- table without a --> at"),
        (TABLE.format("").replace("-->\n<", "--> \n<"), "", "line 1: <!-- table without a --> at"),
    ],
)  # fmt: skip
def test_no_table_of_a_wrong_file(text, rows, message, tmp_path, monkeypatch, capsys):
    """And the report stays as it was."""
    report = tmp_path / "report.md"
    report.write_text(text)
    if rows is not None:
        (tmp_path / "rows.csv").write_text(rows)
    error = error_of("fill_tables", [report], monkeypatch, capsys)
    assert str(report) in error
    assert message in error
    assert report.read_text() == text


def test_a_missing_file_as_a_command(tmp_path):
    for tool in ("plot_results.py", "fill_tables.py"):
        done = run(tool, tmp_path / "nothing")
        assert done.returncode == 2
        assert "No such file" in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr


def test_the_committed_reports_show_the_committed_rows():
    done = run("fill_tables.py", "--check", *REPORTS)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("report", REPORTS, ids=lambda path: path.name)
def test_the_committed_figures_exist(report):
    for target in re.findall(r"!\[.*?\]\((.*?)\)", report.read_text()):
        assert (report.parent / target).is_file(), target

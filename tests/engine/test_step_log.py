"""The step log keeps what a resumed run needs, once, and in order."""

from __future__ import annotations

import json

import pytest

from d2_static_sampler.engine import StepLog, read_steps, summarize_steps


def write(path, iterations, start_iter):
    log = StepLog(path, start_iter)
    for i in iterations:
        log.append({"iteration": i, "start": start_iter})
    log.close()


def test_rows_are_readable_at_once(tmp_path):
    log = StepLog(tmp_path / "new" / "steps.jsonl", 0)
    for i in range(3):
        log.append({"iteration": i})
        assert [row["iteration"] for row in read_steps(log.path)] == list(range(i + 1))
    log.close()


@pytest.mark.parametrize("cut", [0, 5])
def test_a_resumed_run_writes_its_iterations_again(tmp_path, cut):
    path = tmp_path / "steps.jsonl"
    write(path, range(10), 0)
    path.write_text(path.read_text()[: -cut or None])  # as a kill may leave it
    write(path, range(6, 9), 6)
    rows = read_steps(path)
    assert [row["iteration"] for row in rows] == list(range(9))
    assert [row["start"] for row in rows] == [0] * 6 + [6] * 3


def test_a_new_run_keeps_the_old_file(tmp_path):
    path = tmp_path / "steps.jsonl"
    write(path, range(4), 0)
    write(path, range(2), 0)
    assert len(read_steps(path)) == 2
    assert len(read_steps(tmp_path / "steps.jsonl.old")) == 4


@pytest.mark.parametrize(
    "damage", ["garbage\n", "\n", "{}\n", "[1]\n", '{"iteration": "1"}\n', "\0\n", "\udcff\n"]
)
def test_damaged_lines_are_left_out(tmp_path, damage, warnings_of_detectron2):
    path = tmp_path / "steps.jsonl"
    write(path, range(3), 0)
    with path.open("a", errors="surrogateescape") as file:
        file.write(damage)
    write(path, range(3, 5), 3)
    assert [row["iteration"] for row in read_steps(path)] == list(range(5))
    assert len(warnings_of_detectron2) == 1
    assert "1 of 4 lines" in warnings_of_detectron2[0]


def test_summary():
    rows = [
        {"iteration": i, "impl": "static", "warmup": i < 5, "total_ms": float(i)}
        for i in range(105)
    ]
    table = summarize_steps(json.loads(json.dumps(rows)))
    assert "static: median of 100" in table
    assert "54.50" in table  # of 5 .. 104
    assert "99.00" in table
    rows[50]["of_a_later_version_ms"] = 1.0
    assert "of_a_later_version_ms" in summarize_steps(rows)
    assert summarize_steps([{"iteration": 0}]) == summarize_steps([])
    assert summarize_steps(rows[:5]) == "No step times outside warm-up"

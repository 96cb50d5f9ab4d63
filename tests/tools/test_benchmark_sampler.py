"""The sampler's benchmark as a command: rows for all it was asked, clear errors."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

from tests.helpers import needs_inductor
from tests.processes import Completed, run_script

SCRIPT = Path(__file__).parents[2] / "tools" / "benchmark_sampler.py"


def run(folder: Path, *args: str) -> Completed:
    return run_script([str(SCRIPT), *args], folder)


def test_a_row_an_implementation_and_shape(tmp_path):
    path = tmp_path / "new" / "rows.csv"
    done = run(tmp_path, "--work", "forms", "--threads", "1", "--rounds", "2", "--csv", str(path))
    assert done.returncode == 0, done.stderr
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 6 * 5
    assert {row["implementation"] for row in rows} == {
        "Detectron2's loop", "NumPy table", "NumPy blocks", "table", "blocks",
    }  # fmt: skip
    for row in rows:
        is_loop = row["implementation"] == "Detectron2's loop"
        assert 0 < float(row["p20_ms"]) <= float(row["p50_ms"]) <= float(row["p80_ms"])
        assert int(row["waits"]) == (2 * int(row["B"]) if is_loop else 0)
        assert not is_loop or float(row["speedup"]) == 1
        assert float(row["peak_mb"]) > 0
        assert row["torch"]
        assert row["commit"]


@needs_inductor
def test_every_peer_does_the_same_work(tmp_path):
    """Or its row says how it differs."""
    path = tmp_path / "rows.csv"
    shape = ["--shape", "2", "300", "300"]
    done = run(tmp_path, "--work", "small", *shape, "--rounds", "2", "--threads", "1",
               "--csv", str(path))  # fmt: skip
    assert done.returncode == 0, done.stderr
    with path.open() as file:
        rows = list(csv.DictReader(file))
    labels, balanced = 5 * 6, 5
    assert len(rows) == labels + balanced
    assert {row["work"] for row in rows} == {"RPN", "ROI", "balanced", "custom"}
    notes = {row["implementation"]: row["note"] for row in rows if row["note"]}
    assert set(notes) == {"torchvision", "top-k keys", "top-k keys, compiled"}
    for row in rows:
        assert (row["ops"] == "") == ("compiled" in row["implementation"])
        assert (row["first_s"] != "") == ("compiled" in row["implementation"])
        if "static" in row["implementation"]:
            assert row["waits"] == "0"


def test_a_peer_that_does_other_work_is_found(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from benchmark_peers import Peer, check
    from benchmark_works import roi

    work = roi(1)
    labels = work.labels("cpu")
    right = (labels[0] == 1).nonzero()[:128, 0], (labels[0] == 80).nonzero()[:384, 0]
    peer = Peer(lambda labels: None, picks=lambda result: result)
    check(work, peer, [right], labels)
    for wrong in (right[::-1], (right[0][:-1], right[1]), (right[0][[0] * 128], right[1])):
        with pytest.raises(AssertionError, match="not 128 positives and 384 negatives"):
            check(work, peer, [wrong], labels)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--work", "mask"], "invalid choice: 'mask'"),
        (["--select", "fast"], "invalid choice: 'fast'"),
        (["--rounds", "1"], "--rounds is at least 2"),
        (["--threads", "0"], "--threads at least 1"),
        (["--device", "tpu"], "--device is 'tpu'; cpu or cuda"),
        (["--device", "cpu:x"], "--device is 'cpu:x'; cpu or cuda"),
        (["--device", ""], "--device is ''; cpu or cuda"),
        (["--shape", "0", "9", "3"], "--shape 0 9 3: B is at least 1"),
        (["--shape", "1", "9", "10"], "--shape 1 9 10: B is at least 1, K from 1 to N"),
        (["--shape", "1", "9", "0"], "--shape 1 9 0"),
        (["--shape", "1", str(10**11), "5"], "--shape 1 100000000000 5: out of memory"),
        (["--shape", str(10**30), "9", "5"], "9 5: out of memory"),
        (["--csv", "/proc/nothing/rows.csv"], "/proc/nothing"),
    ],
)
def test_wrong_arguments_stop_at_once(args, message, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, *args])
    import benchmark_sampler

    with pytest.raises(SystemExit) as stop:
        benchmark_sampler.main()
    assert stop.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_running_out_of_memory_is_one_line(monkeypatch, capsys):
    """The allocator's own error: no address space holds that much."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, "--shape", "1", str(10**15), "5"])
    import benchmark_sampler

    monkeypatch.setattr(benchmark_sampler, "check_memory", lambda *_: None)
    with pytest.raises(SystemExit) as stop:
        benchmark_sampler.main()
    assert stop.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "error: out of memory at B N K of custom 1 1000000000000000 5: " in error


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_a_cuda_device_that_is_not_there(device, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import devices

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    devices.check_device("--device", device)
    with pytest.raises(ValueError, match="--device is 'cuda:2': this machine has 2 CUDA devices"):
        devices.check_device("--device", "cuda:2")

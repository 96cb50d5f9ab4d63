"""The training tool in two processes on the CPU, started by itself and by torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from d2_static_sampler.engine import read_steps
from tests.processes import run_script
from tests.tools.train_net_helpers import CONFIG, SMALL, TOOL

# As users start them: what such processes import takes most of the time of a test.
STARTERS = {
    "launch": [sys.executable, str(TOOL), "--num-gpus", "2", "--dist-url", "auto"],
    "torchrun": [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        str(TOOL),
    ],
}
# Half of the 30 minutes after which a process that waits in vain would end by torch.distributed.
TIME_TO_END = 900


@pytest.fixture
def start(data_folder, tmp_path):
    """A function that starts a run; what is left of it at the end of the test is killed."""
    runs = []

    def start(starter, *opts, folder=tmp_path):
        environment = os.environ | {"DETECTRON2_DATASETS": str(data_folder), "OMP_NUM_THREADS": "1"}
        command = [*STARTERS[starter], "--config-file", CONFIG, *SMALL, *opts]
        console = (folder / "console").open("w")
        output = {"stdout": console, "stderr": console, "start_new_session": True}
        command += ["OUTPUT_DIR", str(folder)]
        runs.append(subprocess.Popen(command, env=environment, **output))
        return runs[-1]

    yield start
    for process in runs:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def run_forked(data_folder, tmp_path):
    """A function that runs the tool, in two processes that need not import everything anew."""

    def run(*opts, folder=tmp_path):
        command = [str(TOOL), "--num-gpus", "2", "--dist-url", "auto", "--config-file", CONFIG]
        command += [*SMALL, *opts, "OUTPUT_DIR", str(folder)]
        environment = {"DETECTRON2_DATASETS": str(data_folder)}
        done = run_script(command, folder, environment=environment, forks=True)
        assert done.returncode == 0, done.stderr

    return run


def workers(process):
    """The two processes that train, in the order of their start."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    command_of = {int(pid): Path(f"/proc/{pid}/cmdline").read_text() for pid in children}
    return [pid for pid, command in command_of.items() if "resource_tracker" not in command]


def is_running(pid):
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes in /proc")
@pytest.mark.parametrize(("starter", "victim"), [("launch", 1), ("torchrun", 0)])
def test_a_killed_process_ends_the_run(start, tmp_path, starter, victim):
    process = start(starter, "SOLVER.MAX_ITER", "100000", "MODEL.SAMPLER.LOG_PERIOD", "2")
    log = tmp_path / "step_times.jsonl"
    while not (log.exists() and len(read_steps(log)) >= 2):
        assert process.poll() is None, (tmp_path / "console").read_text()
        time.sleep(0.1)
    pids = workers(process)
    assert len(pids) == 2
    os.kill(pids[victim], signal.SIGKILL)
    assert process.wait(TIME_TO_END) not in (0, None)
    assert not any(is_running(pid) for pid in pids)
    assert "SIGKILL" in (tmp_path / "console").read_text()
    iterations = [row["iteration"] for row in read_steps(log)]
    assert iterations == list(range(len(iterations)))


@pytest.mark.parametrize("starter", ["launch, forked", "torchrun"])
def test_two_processes(start, run_forked, tmp_path, starter):
    opts = ("SOLVER.MAX_ITER", "3", "SOLVER.CHECKPOINT_PERIOD", "2")
    opts += ("DATASETS.TEST", "('shapes_val',)")
    if starter == "torchrun":
        process = start(starter, *opts)
        assert process.wait() == 0, (tmp_path / "console").read_text()
    else:
        run_forked(*opts)
    rows = read_steps(tmp_path / "step_times.jsonl")
    assert [(row["iteration"], row["images"]) for row in rows] == [(0, 1), (1, 1), (2, 1)]
    # Before a checkpoint and in the last iteration the processes have met.
    assert all(row["slowest"]["rank"] in (0, 1) for row in rows)
    assert (tmp_path / "log.txt.rank1").exists()
    assert (tmp_path / "detections.png").exists()


def test_two_processes_with_the_static_step(run_forked, tmp_path):
    """Losses are averaged over the processes, at their own iterations."""
    lines = {}
    for step in ("False", "True"):
        (folder := tmp_path / step).mkdir()
        # Equal weights all along: of other ones the order of two proposals may differ.
        opts = ("SOLVER.MAX_ITER", "3", "SEED", "7", "MODEL.SAMPLER.SEED", "3")
        opts += ("SOLVER.BASE_LR", "0.0")
        run_forked(*opts, "MODEL.SAMPLER.STATIC_STEP", step, folder=folder)
        lines[step] = json.loads((folder / "metrics.json").read_text())
        rows = read_steps(folder / "step_times.jsonl")
        assert {row["impl"] for row in rows} == {"static+step" if step == "True" else "static"}
    assert lines["True"].keys() == lines["False"].keys()
    for name, value in lines["False"].items():
        if "loss" in name:
            assert lines["True"][name] == pytest.approx(value, rel=1e-4), name

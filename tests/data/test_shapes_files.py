"""The files of the shapes data set are written whole or not at all."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from d2_static_sampler.data import ShapesSpec, ensure_shapes
from tests.data.shapes_helpers import SMALL, contents

REPOSITORY = Path(__file__).parents[2]


WRITE = """
import os, sys, time
from d2_static_sampler.data import ShapesSpec, ensure_shapes
root, num_train, gate = sys.argv[1:]
print("ready", flush=True)
while not os.path.exists(gate):
    time.sleep(0.001)
ensure_shapes(root, ShapesSpec(num_train=int(num_train), num_val=20, size=64, empty_fraction=0.1))
"""


def start_writer(root, num_train, gate):
    """A process that writes once the file `gate` exists."""
    command = [sys.executable, "-c", WRITE, str(root), str(num_train), str(gate)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY
    )


def wait_for_images(root, writer):
    deadline = time.monotonic() + 120
    while len(list(root.glob(".shapes.part-*/train/*.png"))) < 5:
        assert writer.poll() is None, writer.stderr.read()
        assert time.monotonic() < deadline, "the writer never wrote an image"
        time.sleep(0.02)


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_a_killed_run_is_never_taken_for_complete(small_root, tmp_path):
    writer = start_writer(tmp_path, 100_000, gate=os.devnull)
    wait_for_images(tmp_path, writer)
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    assert not (tmp_path / "shapes").exists()
    assert list(tmp_path.glob(".shapes.part-*"))
    folder = ensure_shapes(tmp_path, SMALL)
    assert contents(folder) == contents(small_root / "shapes")
    assert not list(tmp_path.glob(".shapes.part-*"))


def test_of_two_processes_at_once_one_writes_and_one_waits(small_root, tmp_path):
    root, gate = tmp_path / "datasets", tmp_path / "gate"
    writers = [start_writer(root, 30, gate) for _ in range(2)]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n", writer.stderr.read()
    gate.touch()
    errors = [writer.communicate(timeout=120)[1] for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0], errors
    assert sum("drawing the shapes" in text for text in errors) == 1
    assert contents(root / "shapes") == contents(small_root / "shapes")
    assert not list(root.glob(".shapes.part-*"))


@pytest.mark.parametrize("lost", ["train/shapes_train_000007.png", "spec.json"])
def test_an_incomplete_folder_is_written_anew(small_root, tmp_path, lost):
    folder = ensure_shapes(tmp_path, SMALL)
    (folder / lost).unlink()
    ensure_shapes(tmp_path, SMALL)
    assert contents(folder) == contents(small_root / "shapes")


def test_a_complete_folder_is_left_alone_and_may_be_read_only(tmp_path):
    folder = ensure_shapes(tmp_path, SMALL)
    (folder / "train" / "shapes_train_000001.png").write_bytes(b"mark")
    (tmp_path / "shapes.lock").unlink()
    assert ensure_shapes(tmp_path) == folder
    assert (folder / "train" / "shapes_train_000001.png").read_bytes() == b"mark"
    assert not (tmp_path / "shapes.lock").exists()


def test_another_spec_is_refused_and_nothing_is_lost(tmp_path):
    folder = ensure_shapes(tmp_path, SMALL)
    before = contents(folder)
    with pytest.raises(ValueError, match=r"shapes holds .*num_train=30.* delete it") as error:
        ensure_shapes(tmp_path, ShapesSpec(num_train=31, num_val=20, size=64))
    assert "\n" not in str(error.value)
    assert contents(folder) == before


def test_images_of_another_drawing_version_are_refused(tmp_path):
    folder = ensure_shapes(tmp_path, SMALL)
    numbers = json.loads((folder / "spec.json").read_text())
    (folder / "spec.json").write_text(json.dumps({**numbers, "drawing_version": 0}))
    with pytest.raises(ValueError, match="drawing_version 0"):
        ensure_shapes(tmp_path)


def test_a_folder_with_other_files_is_refused_and_kept(tmp_path):
    mine = tmp_path / "shapes" / "train" / "holiday.png"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"mine")
    with pytest.raises(FileExistsError, match=r"1 files .* first train/holiday.png"):
        ensure_shapes(tmp_path, SMALL)
    assert mine.read_bytes() == b"mine"


def test_a_file_in_the_folders_place_is_refused(tmp_path):
    (tmp_path / "shapes").write_text("mine")
    with pytest.raises(FileExistsError, match="not a folder"):
        ensure_shapes(tmp_path, SMALL)


def test_shows_its_progress(tmp_path, capfd):
    ensure_shapes(tmp_path, SMALL)
    assert "drawing the shapes data set: 100%" in capfd.readouterr().err

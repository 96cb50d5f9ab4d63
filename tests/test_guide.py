"""The Python of docs/integration.md runs, as the one script that it says it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from d2_static_sampler.data import ShapesSpec, ensure_shapes
from tests.processes import run_script

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "integration.md"


def python_of(text: str) -> str:
    """The Python blocks of a Markdown text, each line at its place, all others empty."""
    lines, is_python = [], False
    for line in text.splitlines():
        if line.startswith("```"):
            is_python = line == "```python"
            lines.append("")
        else:
            lines.append(line if is_python else "")
    return "\n".join(lines)


def test_only_python_blocks_are_taken():
    text = "a\n```python\nb\n```\n```sh\nc\n```\n```python\nd\n```"
    assert python_of(text).split() == ["b", "d"]
    assert python_of(text).splitlines()[2] == "b"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the guide runs: the configs of this repository, and a small data set."""
    folder = tmp_path_factory.mktemp("guide")
    (folder / "configs").symlink_to(ROOT / "configs")
    ensure_shapes(folder / "datasets", ShapesSpec(num_train=24, num_val=6))
    return folder


def test_the_guide_runs(folder):
    script = folder / "guide.py"
    script.write_text(python_of(GUIDE.read_text()))
    environment = {"DETECTRON2_DATASETS": str(folder / "datasets")}
    done = run_script([str(script)], folder, environment=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "static: median of" in done.stdout
    assert "LargeROIHeads static" in done.stdout
    assert "LargeROIHeads overrides label_and_sample_proposals" in done.stdout + done.stderr

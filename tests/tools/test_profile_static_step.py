"""tools/profile_step.py on the static step: nothing depends on data; its phases and its graphs."""

from __future__ import annotations

import profile_step
import pytest

from tests.helpers import needs_inductor
from tests.tools.test_profile_step import SMALL, read_rows


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile")
    profile_step.main(
        ["--impl", "static+step", "--images", "1", "2", "--output", str(folder), *SMALL]
    )
    return read_rows(folder), (folder / "profile.txt").read_text()


def test_nothing_depends_on_data(profiled):
    rows, _ = profiled
    for images in (1, 2):
        row = rows["static+step", images]
        assert row["data_dependent"]["total"] == 0
        assert row["lines"] == []
        assert row["nms_topk"] == row["ops_by_name"]["d2_static_sampler::nms_topk"] == 1
        assert row["trace"] == f"trace_static+step_{images}.json"
    assert rows["static+step", 1]["ops"] == rows["static+step", 2]["ops"]


def test_every_phase_has_its_part(profiled):
    rows, text = profiled
    assert min(rows["static+step", 2]["ops"]["by_phase"].values()) > 10
    (line,) = (line for line in text.splitlines() if line.startswith("| static+step |        2 | ")
               and line.endswith(" 1 |"))  # fmt: skip
    assert [cell.strip() for cell in line.strip("|").split("|")[2:]] == ["0"] * 8 + ["1"]


@needs_inductor
def test_a_compiled_step_shows_its_graphs(tmp_path):
    profile_step.main(
        ["--impl", "compiled+step", "--images", "2", "--output", str(tmp_path), *SMALL]
    )
    row = read_rows(tmp_path)["compiled+step", 2]
    graphs = row["graphs"]
    assert (graphs["captured"], graphs["breaks"], graphs["is_eager"]) == (3, 0, False)
    for graph in graphs["each"]:
        assert graph["data_dependent"]["total"] == 0
        assert graph["ops"]["total"] > 10
    assert row["data_dependent"]["total"] == 0

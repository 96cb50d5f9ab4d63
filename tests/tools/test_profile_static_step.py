"""tools/profile_step.py on the static step: nothing depends on data; its phases and its graphs."""

from __future__ import annotations

import profile_step
import pytest
from detectron2.utils.events import EventStorage

from d2_static_sampler import install_sampler
from d2_static_sampler.engine.op_counter import count_data_dependent_ops
from tests.tools.test_profile_step import SMALL, read_rows

KNOWN = {1: 52, 8: 269}  # Detectron2's, at 1 and 8 images


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile")
    profile_step.main(
        ["--impl", "static+step", "--images", "1", "2", "--output", str(folder), *SMALL]
    )
    return read_rows(folder), (folder / "profile.txt").read_text()


def test_the_known_counts_and_none_in_the_static_step():
    """On the tool's own model and images, at the sizes that its table has by default."""
    cfg = profile_step.make_config(None, "cpu", [])
    ops = set()
    for static_step in (False, True):
        model = profile_step.make_model(cfg)
        if static_step:
            install_sampler(model, "static", static_step=True)
        with EventStorage():
            model(profile_step.make_batch(cfg, 1, 256, 256))
            for images, known in KNOWN.items():
                batch = profile_step.make_batch(cfg, images, 256, 256)
                with count_data_dependent_ops() as count:
                    model(batch)
                assert len(count.data_dependent) == (0 if static_step else known)
                ops |= {count.num_ops} if static_step else set()
    assert len(ops) == 1


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

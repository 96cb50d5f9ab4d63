"""A small data set, and the training tool in this process."""

from __future__ import annotations

import sys

import pytest
import train_net
from detectron2.data import DatasetCatalog, MetadataCatalog

from d2_static_sampler.data import ShapesSpec, ensure_shapes
from tests.tools.train_net_helpers import CONFIG, SMALL, TOOL


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("datasets")
    ensure_shapes(folder, ShapesSpec(num_train=24, num_val=6))
    return folder


@pytest.fixture
def run(data_folder, tmp_path, monkeypatch):
    """A function that runs the tool in this process and returns the output folder."""
    monkeypatch.setenv("DETECTRON2_DATASETS", str(data_folder))

    def run(*arguments, output="out", config=CONFIG, without=()):
        folder = tmp_path / output
        given = dict(zip(SMALL[::2], SMALL[1::2], strict=True))
        opts = [x for pair in given.items() if pair[0] not in (*arguments, *without) for x in pair]
        argv = [str(TOOL), "--config-file", config, *arguments, *opts, "OUTPUT_DIR", str(folder)]
        monkeypatch.setattr(sys, "argv", argv)
        train_net.run()
        return folder

    yield run
    for name in ("own_train", "own_val"):
        if name in DatasetCatalog:
            DatasetCatalog.remove(name)
            MetadataCatalog.remove(name)

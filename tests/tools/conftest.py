"""A small data set, and the tools for training and profiling in this process."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog

from d2_static_sampler.data import ShapesSpec, ensure_shapes
from tests.tools.train_net_helpers import CONFIG, ROOT, SMALL, TOOL, train_net


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


@pytest.fixture(scope="module")
def profile_step():
    """tools/profile_step.py as a module."""
    folder = ROOT / "tools"
    sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location("profile_step", folder / "profile_step.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(folder))

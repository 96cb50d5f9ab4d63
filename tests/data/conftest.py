"""A small data set, and catalogs that a test leaves as it found them."""

import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog

from d2_static_sampler.data import ensure_shapes
from tests.data.shapes_helpers import SMALL


@pytest.fixture(autouse=True)
def _restore_catalogs():
    datasets, metadata = dict(DatasetCatalog.data), dict(MetadataCatalog.data)
    yield
    for catalog, saved in ((DatasetCatalog, datasets), (MetadataCatalog, metadata)):
        catalog.data.clear()
        catalog.data.update(saved)


@pytest.fixture(scope="session")
def small_root(tmp_path_factory):
    root = tmp_path_factory.mktemp("datasets")
    ensure_shapes(root, SMALL)
    return root

"""Fixtures of the tests of models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from detectron2.utils.events import EventStorage


@pytest.fixture
def storage() -> Iterator[EventStorage]:
    """The current event storage."""
    with EventStorage() as storage:
        yield storage

"""Fixtures of the operators' tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from d2_static_sampler.ops import pooling


@pytest.fixture(params=["by rows", "in fixed shapes"])
def body(request: pytest.FixtureRequest) -> Iterator[str]:
    """Which body the operations have on this CPU: its own, or that of every other device."""
    with ExitStack() as stack:
        for op in (pooling.roi_align_levels, pooling.roi_align_level_backward):
            stack.enter_context(op.set_kernel_enabled("cpu", request.param == "by rows"))
        yield request.param

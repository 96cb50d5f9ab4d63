"""Shared by all tests: one CPU thread and a fixed seed, so that results repeat bit for bit.

What takes long to import is imported by whoever needs it: the process that hands out the tests
needs nothing of it, and the others wait for that process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import logging
import multiprocessing
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.helpers import SimulatedTime

# Here and in what tests start: a pool of compiling processes beside each worker of xdist has memory
# of its own, and the cores are taken.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


@pytest.fixture(autouse=True, scope="module")
def _give_back() -> Iterator[None]:
    """What a file's tests built and compiled ends with it: its graphs keep their models alive."""
    yield
    if "torch._inductor.compile_fx" in sys.modules:  # something was compiled
        sys.modules["torch"]._dynamo.reset()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc's alone
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _end_data_workers() -> None:
    """End what reads data for trainings that are over.

    When one is collected with its trainer, five seconds pass for each: the queues that tell it to
    end may go before it.
    """
    if multiprocessing.active_children():
        from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

        for each in gc.get_objects():
            if type(each) is _MultiProcessingDataLoaderIter:
                each._shutdown_workers()


@pytest.fixture(autouse=True)
def _repeatable() -> Iterator[None]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    _end_data_workers()


@pytest.fixture
def eager_graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that are captured; they run as they are, where Inductor takes 15 s for each."""
    import torch

    found = []

    def keep(graph: Any, inputs: Any, **_: Any) -> Any:
        found.append(graph)
        return graph.forward

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: keep)
    return found


@pytest.fixture
def warnings_of_detectron2(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """The warnings that were logged so far; Detectron2's logger does not propagate."""
    records: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    handler = Collect(level=logging.WARNING)
    loggers = [logging.getLogger(name) for name in ("detectron2", "d2_static_sampler")]
    for logger in loggers:
        logger.addHandler(handler)
    yield records
    for logger in loggers:
        logger.removeHandler(handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz", type=int, default=16, help="how many random models test_fuzz.py builds"
    )
    parser.addoption("--fuzz-from", type=int, default=0, help="the first of their seeds")


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> SimulatedTime:
    """The clock of the steps; what a busy machine takes for them is not in it."""
    from d2_static_sampler.engine import clock
    from tests.helpers import SimulatedTime

    simulated = SimulatedTime()
    monkeypatch.setattr(clock, "time", simulated)
    return simulated


def pytest_report_header() -> str:
    spec = importlib.util.find_spec("detectron2")
    return f"detectron2: {spec and spec.origin}"

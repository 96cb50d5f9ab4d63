"""Scripts and groups of processes, forked from one that has torch and Detectron2 already.

To import these takes ten seconds, more than most such tests. The process that others are forked
from is started once in each worker of xdist. tests/tools/test_train_net_processes.py starts
processes as users do.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import multiprocessing as torch_multiprocessing

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    ["detectron2.engine", "detectron2.evaluation", "d2_static_sampler.engine"]
)


class Completed(NamedTuple):
    """How a script ended, and what it wrote."""

    returncode: int | None
    stdout: str
    stderr: str


class Script:
    """A script of Python in a process and a session of its own, as `python ARGV` is.

    Args:
        argv: path of the script, and its arguments.
        folder: where ``stdout`` and ``stderr`` are written.
        environment: variables besides those of this process.
        cwd: the folder that it runs in; this process's without.
        forks: whether the processes that it starts by ``launch`` are forked, too.
    """

    def __init__(
        self,
        argv: list[str],
        folder: Path,
        *,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        forks: bool = False,
    ) -> None:
        self.files = folder / "stdout", folder / "stderr"
        variables = {**os.environ, **(environment or {})}
        arguments = argv, variables, str(cwd or Path.cwd()), self.files, forks
        self.process = FORKED.Process(target=_run, args=arguments)
        self.process.start()

    def wait(self) -> Completed:
        """What it came to, at its end."""
        self.process.join()
        return Completed(self.process.exitcode, *(file.read_text() for file in self.files))

    def kill(self) -> None:
        """End it and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()


def run_script(argv: list[str], folder: Path, **options: Any) -> Completed:
    """A :class:`Script` until its end."""
    return Script(argv, folder, **options).wait()


@contextlib.contextmanager
def forked_groups() -> Iterator[None]:
    """``torch.multiprocessing.spawn``, and with it ``launch``, forks its processes in here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_multiprocessing, "spawn", _fork_group)
        yield


def _fork_group(function: Callable[..., Any], args: tuple[Any, ...] = (), **options: Any) -> Any:
    in_group = functools.partial(_call_in, dict(os.environ), function)
    return torch_multiprocessing.start_processes(
        in_group, args, start_method="forkserver", **options
    )


def _call_in(
    variables: dict[str, str], function: Callable[..., Any], rank: int, *args: Any
) -> None:
    _set_environment(variables)
    function(rank, *args)


def _run(
    argv: list[str],
    variables: dict[str, str],
    cwd: str,
    files: tuple[Path, Path],
    forks: bool,
) -> None:
    os.setsid()
    _set_environment(variables)
    os.chdir(cwd)
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).parent))
    with forked_groups() if forks else contextlib.nullcontext():
        runpy.run_path(argv[0], run_name="__main__")


def _set_environment(variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)

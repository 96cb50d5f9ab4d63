"""Starting the processes of a run, on CUDA devices or on CPUs."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from detectron2.engine import defaults
from detectron2.engine import launch as launch_on_cuda
from detectron2.utils import comm
from torch import multiprocessing

DEFAULT_TIMEOUT = timedelta(minutes=30)


def launch(
    main_func: Callable[..., Any],
    num_gpus_per_machine: int,
    num_machines: int = 1,
    machine_rank: int = 0,
    dist_url: str | None = None,
    args: tuple[Any, ...] = (),
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> None:
    """Run ``main_func(*args)`` in every process of this machine.

    Under torchrun the processes are there already. Else Detectron2's own ``launch`` starts them
    where there is CUDA; release 0.6 knows no other device, so that without CUDA they are started
    here and talk through gloo.

    Args:
        main_func: what to run.
        num_gpus_per_machine: processes a machine, with or without GPUs.
        num_machines: machines of the run.
        machine_rank: number of this machine.
        dist_url: where the processes meet, such as ``tcp://127.0.0.1:8686``; "auto" is a free
            port of this machine.
        args: of ``main_func``.
        timeout: of the processes' collective calls.
    """
    if _under_torchrun():
        _join("env://", int(os.environ["LOCAL_WORLD_SIZE"]), timeout)
        main_func(*args)
        return
    if torch.cuda.is_available():
        launch_on_cuda(
            main_func, num_gpus_per_machine, num_machines, machine_rank, dist_url, args, timeout
        )
        return
    world_size = num_machines * num_gpus_per_machine
    if world_size == 1:
        main_func(*args)
        return
    if dist_url == "auto":
        dist_url = f"tcp://127.0.0.1:{_free_port()}"
    multiprocessing.spawn(
        _run_process,
        nprocs=num_gpus_per_machine,
        args=(
            main_func, args, world_size, num_gpus_per_machine, machine_rank, dist_url, timeout
        ),
    )  # fmt: skip


def num_processes(num_gpus_per_machine: int, num_machines: int) -> int:
    """Processes of all machines: what torchrun started, else what :func:`launch` will start."""
    if _under_torchrun():
        return int(os.environ["WORLD_SIZE"])
    return num_gpus_per_machine * num_machines


def _under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _run_process(
    local_rank: int,
    main_func: Callable[..., Any],
    args: tuple[Any, ...],
    world_size: int,
    processes_per_machine: int,
    machine_rank: int,
    dist_url: str,
    timeout: timedelta,
) -> None:
    rank = machine_rank * processes_per_machine + local_rank
    _join(dist_url, processes_per_machine, timeout, world_size=world_size, rank=rank)
    main_func(*args)


def _join(
    url: str,
    processes_per_machine: int,
    timeout: timedelta,
    *,
    world_size: int = -1,
    rank: int = -1,
) -> None:
    """Make this process one of the run's, and known to Detectron2; -1: the environment says."""
    has_cuda = torch.cuda.is_available()
    dist.init_process_group(
        "nccl" if has_cuda else "gloo",
        init_method=url,
        timeout=timeout,
        world_size=world_size,
        rank=rank,
    )
    rank = dist.get_rank()
    for first in range(0, dist.get_world_size(), processes_per_machine):
        group = dist.new_group(range(first, first + processes_per_machine))
        if first <= rank < first + processes_per_machine:
            comm._LOCAL_PROCESS_GROUP = group
    if has_cuda:
        torch.cuda.set_device(rank % processes_per_machine)
    else:
        # DefaultTrainer asks for the GPU of its local rank otherwise.
        defaults.create_ddp_model = functools.partial(defaults.create_ddp_model, device_ids=None)
    comm.synchronize()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

#!/usr/bin/env python
"""How long sampling takes, beside Detectron2's loop over the images.

Every round measures each implementation once, in turn, so that a machine's drift meets all alike.
A row of the table gives the times' 20th, 50th and 80th percentile over the rounds and the median
of the rounds' ratios to Detectron2's loop. ``ops`` counts operations, ``waits`` those among them
that make a GPU wait; ``first_s`` is the first call of a compiled sampler, which may compile.
"""

from __future__ import annotations

import argparse
import csv
import functools
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import detectron2
import torch
from benchmark_works import WORKS, Work
from detectron2.modeling.sampling import subsample_labels
from tabulate import tabulate
from torch import Tensor
from torch.utils.benchmark import Timer
from tqdm import tqdm

from d2_static_sampler import build_label_sampler
from d2_static_sampler.engine.op_counter import count_data_dependent_ops
from d2_static_sampler.samplers import LabelSampler, StaticSampler
from d2_static_sampler.samplers.selection import MemberBlocks, MemberTable
from d2_static_sampler.samplers.selection.host_members import HostBlocks, HostTable

Run = Callable[[Tensor], Any]
BLOCK_SECONDS = 0.02  # an implementation's time in one round, at least
LOOP = "Detectron2's loop"


class Formed(StaticSampler):
    """The static sampler with a form of its members that is fixed beforehand."""

    def __init__(self, form: type) -> None:
        in_numpy = form in (HostTable, HostBlocks)
        super().__init__("rank", use_numpy=in_numpy)
        if in_numpy:
            self.host_form = lambda *_: form  # type: ignore[method-assign]
        else:
            self.form = lambda *_: form  # type: ignore[method-assign]


def blocks(width: int) -> type:
    class Blocks(MemberBlocks):
        @classmethod
        def of(cls, labels: Tensor, background: int | None) -> MemberBlocks:
            return MemberBlocks.of(labels, background, width=width)

    return Blocks


@functools.cache
def sampler(impl: str, select: str, use_numpy: bool) -> LabelSampler:
    """One for all works, so that what is compiled serves them all."""
    return build_label_sampler(impl, select=select, use_numpy=use_numpy)


def implementations(work: Work, selections: Sequence[str], device: str) -> dict[str, Run]:
    request = work.request

    def loop(labels: Tensor) -> list[Any]:
        return [subsample_labels(row, *request.values()) for row in labels]

    if work.name == "forms":
        samplers = {"NumPy table": Formed(HostTable), "NumPy blocks": Formed(HostBlocks)}
        samplers |= {"table": Formed(MemberTable)}
        samplers |= {f"blocks of {width}": Formed(blocks(width)) for width in (64, 96, 120)}
    else:
        samplers = {
            f"{impl} {select}": sampler(impl, select, True)
            for select in selections
            for impl in ("static", "compiled")
        }
        if device == "cpu" and "rank" in selections:
            # What other devices run.
            samplers |= {
                f"{impl} rank in torch": sampler(impl, "rank", False)
                for impl in ("static", "compiled")
            }
    runs: dict[str, Run] = {LOOP: loop}
    for name, own in samplers.items():
        runs[name] = lambda labels, own=own: own(labels, **request)
    return runs


def measure(
    work: Work, threads: int, rounds: int, device: str, selections: Sequence[str]
) -> list[dict[str, Any]]:
    """One row an implementation."""
    labels, runs = work.labels(device), implementations(work, selections, device)
    torch.set_num_threads(threads)
    compile_s = {name: warm_up(run, labels) for name, run in runs.items()}
    timers = {
        name: Timer("run(labels)", globals={"run": run, "labels": labels}, num_threads=threads)
        for name, run in runs.items()
    }
    once = {name: timer.timeit(1).mean for name, timer in timers.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, timer in timers.items():
            number = max(1, min(50, int(BLOCK_SECONDS / once[name])))
            times[name].append(timer.timeit(number).mean * 1e3)
    return [
        summarize(work, name, threads, times[name], times[LOOP])
        | {"first_s": round(compile_s[name], 1) if "compiled" in name else ""}
        | ({"ops": "", "waits": ""} if "compiled" in name else count(runs[name], labels))
        for name in runs
    ]


def warm_up(run: Run, labels: Tensor) -> float:
    begin = time.perf_counter()
    run(labels)
    first = time.perf_counter() - begin
    for _ in range(2):
        run(labels)
    return first


def count(run: Run, labels: Tensor) -> dict[str, Any]:
    """Operations, and those among them that would make a GPU wait."""
    with count_data_dependent_ops() as ops:
        run(labels)
    return {"ops": ops.num_ops, "waits": len(ops.data_dependent)}


def summarize(
    work: Work, name: str, threads: int, times: list[float], loop: list[float]
) -> dict[str, Any]:
    p20, _, _, p80 = quantiles(times, n=5)
    speedup = median(base / own for base, own in zip(loop, times, strict=True))
    return {
        "work": work.name,
        "B": work.batch,
        "N": work.candidates,
        "K": work.num_samples,
        "threads": threads,
        "implementation": name,
        "p20_ms": round(p20, 4),
        "p50_ms": round(median(times), 4),
        "p80_ms": round(p80, 4),
        "speedup": round(speedup, 2),
    }


def versions(device: str) -> dict[str, str]:
    commit = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    gpu = torch.cuda.get_device_name() if device.startswith("cuda") else device
    return {
        "device": gpu,
        "torch": torch.__version__,
        "detectron2": detectron2.__version__,
        "commit": commit or "unknown",
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", nargs="+", choices=WORKS, default=["rpn", "roi"])
    parser.add_argument("--select", nargs="+", choices=("rank", "topk"), default=["rank"])
    parser.add_argument("--threads", nargs="+", type=int, default=[torch.get_num_threads()])
    parser.add_argument("--rounds", type=int, default=15, help="at least 2 (default: 15)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--csv", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    if args.rounds < 2 or min(args.threads) < 1:
        parser.error("--rounds is at least 2 and --threads at least 1")
    if args.device.split(":")[0] not in ("cpu", "cuda"):
        parser.error(f"--device {args.device}: cpu or cuda")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: this torch finds no CUDA device")
    if args.csv:
        try:
            args.csv.parent.mkdir(parents=True, exist_ok=True)
            args.csv.touch()
        except OSError as error:
            parser.error(f"--csv {args.csv}: {error}")
    return args


def main() -> None:
    args = parse_args()
    torch.manual_seed(0)
    jobs = [
        (work, threads) for name in args.work for work in WORKS[name]() for threads in args.threads
    ]
    rows = []
    for work, threads in tqdm(jobs, unit="shape"):
        rows += measure(work, threads, args.rounds, args.device, args.select)
    about = versions(args.device)
    print(tabulate(rows, headers="keys", tablefmt="github"))
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0], *about])
            writer.writeheader()
            writer.writerows(row | about for row in rows)


if __name__ == "__main__":
    main()

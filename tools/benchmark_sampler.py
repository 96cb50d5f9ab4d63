#!/usr/bin/env python
"""How long sampling takes, beside Detectron2's loop over the images and other peers.

Every round measures each implementation once, in turn, so that a machine's drift meets all alike.
A row of the table gives the times' 20th, 50th and 80th percentile over the rounds and the median
of the rounds' ratios to the baseline, which is the first implementation. ``ops`` counts
operations, ``waits`` those among them that make a GPU wait; ``peak_mb`` is the memory beyond the
labels and inputs; ``first_s`` is the first call of what compiles. Each implementation is checked
to do the work before it is measured; ``note`` says where what it does differs.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

# Read when torch is loaded. Compiled code and torch have a pool of threads each; those of one that
# spin while they wait can make a small call of the other a hundred times slower.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
from benchmark_peers import Peer, check, peers
from benchmark_works import WORKS, Work, half
from command_line import one_line
from csv_rows import check_can_write, write_rows
from devices import check_device, check_memory, is_out_of_memory
from tabulate import tabulate
from torch import Tensor
from torch.utils.benchmark import Timer
from tqdm import tqdm
from versions import versions

from d2_static_sampler.profiling.op_counter import count_data_dependent_ops
from d2_static_sampler.profiling.peak_memory import peak_bytes

BLOCK_SECONDS = 0.02  # an implementation's time in one round, at least

Run = Callable[[], Any]


def measure(
    work: Work, threads: int, rounds: int, device: str, selections: Sequence[str]
) -> list[dict[str, Any]]:
    """One row an implementation."""
    torch.set_num_threads(threads)
    labels = work.labels(device)
    inputs = (work.inputs(device),) if work.balanced else ()
    implementations = peers(work, selections, device)
    runs, first = {}, {}
    for name, peer in implementations.items():
        runs[name] = bind(peer, labels, inputs)
        first[name] = warm_up(work, peer, runs[name], labels)
    times = time_in_turn(runs, threads, rounds, device)
    baseline = next(iter(times.values()))
    return [
        summarize(work, name, threads, times[name], baseline)
        | count("compiled" in name, run)
        | {
            "peak_mb": round(peak_bytes(run, device) / 1e6, 3),
            "first_s": round(first[name], 1) if "compiled" in name else "",
            "note": implementations[name].note,
        }
        for name, run in runs.items()
    ]


def bind(peer: Peer, labels: Tensor, inputs: tuple[Tensor, ...]) -> Run:
    prepared = peer.prepare(labels)
    return lambda: peer.run(*inputs, prepared)


def warm_up(work: Work, peer: Peer, run: Run, labels: Tensor) -> float:
    """Seconds of the first call."""
    begin = time.perf_counter()
    result = run()
    first = time.perf_counter() - begin
    check(work, peer, result, labels)
    for _ in range(2):
        run()
    return first


def time_in_turn(
    runs: dict[str, Run], threads: int, rounds: int, device: str
) -> dict[str, list[float]]:
    """Milliseconds a call, for each round."""
    timers = {name: timer(run, threads, device) for name, run in runs.items()}
    once = {name: timed(1) for name, timed in timers.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, timed in timers.items():
            times[name].append(timed(max(1, min(50, int(BLOCK_SECONDS / once[name])))) * 1e3)
    return times


def timer(run: Run, threads: int, device: str) -> Callable[[int], float]:
    """Seconds a call, over so many calls; on CUDA by events."""
    if not device.startswith("cuda"):
        own = Timer("run()", globals={"run": run}, num_threads=threads)
        return lambda number: float(own.timeit(number).mean)

    def timed(number: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        begin.record()
        for _ in range(number):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / number

    return timed


def count(is_compiled: bool, run: Run) -> dict[str, Any]:
    """Operations, and those among them that would make a GPU wait."""
    if is_compiled:  # the counter would run it eagerly
        return {"ops": "", "waits": ""}
    with count_data_dependent_ops() as ops:
        run()
    return {"ops": ops.num_ops, "waits": len(ops.data_dependent)}


def summarize(
    work: Work, name: str, threads: int, times: list[float], baseline: list[float]
) -> dict[str, Any]:
    return {
        "work": work.name,
        "B": work.batch,
        "N": work.candidates,
        "K": work.num_samples,
        "threads": threads,
        "implementation": name,
    } | summarize_times(times, baseline)


def summarize_times(times: list[float], baseline: list[float]) -> dict[str, float]:
    """Percentiles of milliseconds, and the median of the rounds' ratios to a baseline."""
    p20, _, _, p80 = quantiles(times, n=5, method="inclusive")
    speedup = median(base / own for base, own in zip(baseline, times, strict=True))
    return {
        "p20_ms": round(p20, 4),
        "p50_ms": round(median(times), 4),
        "p80_ms": round(p80, 4),
        "speedup": round(speedup, 2),
    }


def parse_args() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--work", nargs="+", choices=WORKS, help="named works (default: rpn and roi)"
    )
    parser.add_argument(
        "--shape",
        nargs=3,
        type=int,
        action="append",
        metavar=("B", "N", "K"),
        help="K of N candidates, half of them positive, in B rows; may be repeated",
    )
    parser.add_argument("--select", nargs="+", choices=("rank", "topk"), default=["rank"])
    parser.add_argument("--threads", nargs="+", type=int, default=[torch.get_num_threads()])
    parser.add_argument("--rounds", type=int, default=15, help="at least 2 (default: 15)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--csv", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    check_args(parser, args)
    return parser, args


def check_args(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.rounds < 2 or min(args.threads) < 1:
        parser.error("--rounds is at least 2 and --threads at least 1")
    for batch, candidates, num_samples in args.shape or ():
        if batch < 1 or not 1 <= num_samples <= candidates:
            parser.error(
                f"--shape {batch} {candidates} {num_samples}: B is at least 1, K from 1 to N"
            )
    try:
        check_device("--device", args.device)
        for batch, candidates, num_samples in args.shape or ():
            labels_and_order = 8 * (batch + 1) * candidates
            check_memory(f"--shape {batch} {candidates} {num_samples}", labels_and_order)
    except ValueError as error:
        parser.error(one_line(error))
    try:
        check_can_write(args.csv)
    except OSError as error:
        parser.error(f"--csv {args.csv}: {error}")


def works_of(args: argparse.Namespace) -> list[Work]:
    names = args.work or ([] if args.shape else ["rpn", "roi"])
    named = [work for name in names for work in WORKS[name]()]
    return named + [half("custom", *shape) for shape in args.shape or ()]


def main() -> None:
    parser, args = parse_args()
    torch.manual_seed(0)
    # A peer that compiles every shape anew is not to stop at the eighth.
    torch._dynamo.config.recompile_limit = 64
    jobs = [(work, threads) for work in works_of(args) for threads in args.threads]
    about, rows = versions(args.device), []
    with tqdm(jobs, unit="shape") as progress:
        for work, threads in progress:
            try:
                rows += measure(work, threads, args.rounds, args.device, args.select)
                write_rows(args.csv, [row | about for row in rows])
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                progress.close()
                shape = f"{work.name} {work.batch} {work.candidates} {work.num_samples}"
                parser.error(f"out of memory at B N K of {shape}: {one_line(error)}")
    print(tabulate(rows, headers="keys", tablefmt="github"))
    print(", ".join(f"{key} {value}" for key, value in about.items()))


if __name__ == "__main__":
    main()

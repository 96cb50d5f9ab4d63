#!/usr/bin/env python
"""What each IMPL's detectors are worth: AP after training, for several seeds.

Every pair of an IMPL and a seed is a training of its own by tools/train_net.py, evaluated on the
config's test set. A row of the CSV is one training; the table has each IMPL's mean and spread.

    tools/benchmark_ap.py --config-file configs/quick/faster_rcnn_R_18_FPN_shapes.yaml \\
        --impl naive static static+step --seeds 1 2 3 --csv output/ap.csv
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

from command_line import one_line
from csv_rows import check_can_write, write_rows
from impl_names import IMPLS, check_impl, split_impl
from tabulate import tabulate
from tqdm import tqdm
from versions import versions

FIGURES = ("bbox/AP", "bbox/AP50", "bbox/AP75")
TRAIN = Path(__file__).with_name("train_net.py")

Row = dict[str, Any]


def train(impl: str, seed: int, args: argparse.Namespace) -> Row:
    """Train and evaluate once; the row of it.

    Raises:
        RuntimeError: the training failed, or wrote no AP.
    """
    output = Path(args.output) / f"{impl}-{seed}"
    name, has_step = split_impl(impl)
    command = [sys.executable, str(TRAIN), "--config-file", args.config_file]
    command += ["SEED", str(seed), "OUTPUT_DIR", str(output), "MODEL.SAMPLER.IMPL", name]
    command += ["MODEL.SAMPLER.STATIC_STEP", str(has_step), *args.opts]
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{impl}, seed {seed}: {(done.stderr.strip() or '?').splitlines()[-1]}")
    figures = read_figures(output / "metrics.json")
    return {"impl": impl, "seed": seed, **figures, "threads": args.threads, **versions("cpu")}


def read_figures(path: Path) -> dict[str, float]:
    """The last AP figures of a metrics.json, without their "bbox/"."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    last = next((line for line in reversed(lines) if FIGURES[0] in line), None)
    if last is None:
        raise RuntimeError(f"{path} has no {FIGURES[0]}: is DATASETS.TEST set?")
    return {name.removeprefix("bbox/"): round(last[name], 3) for name in FIGURES}


def summarize(rows: list[Row]) -> str:
    """Mean and standard deviation over the seeds."""
    table = []
    for impl, group in groupby(rows, key=lambda row: row["impl"]):
        runs = list(group)
        line = [impl, len(runs)]
        for name in (figure.removeprefix("bbox/") for figure in FIGURES):
            values = [row[name] for row in runs]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            line.append(f"{statistics.mean(values):.2f} ± {spread:.2f}")
        table.append(line)
    headers = ["impl", "seeds", *(figure.removeprefix("bbox/") for figure in FIGURES)]
    return tabulate(table, headers=headers, tablefmt="github")


def parse_args() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config-file", required=True, help="a YAML")
    parser.add_argument("--impl", nargs="+", default=list(IMPLS), metavar="IMPL")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], metavar="SEED")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    parser.add_argument("--threads", type=int, default=1, help="of each training")
    parser.add_argument("--output", default="output/ap", help="folder of the trainings")
    parser.add_argument("--csv", type=Path, default="output/ap.csv", help="file for the rows")
    parser.add_argument("opts", nargs="*", metavar="KEY VALUE", help="settings, after --")
    args = parser.parse_args()
    try:
        for impl in args.impl:
            check_impl(impl)
        check_can_write(args.csv)
    except (OSError, ValueError) as error:
        parser.error(one_line(error))
    if not Path(args.config_file).is_file():
        parser.error(f"--config-file is {args.config_file!r}: no such file")
    if min(args.jobs, args.threads) < 1:
        parser.error(f"--jobs {args.jobs} --threads {args.threads}; at least 1")
    return args


def main() -> None:
    """Train all, print the table, write the CSV."""
    args = parse_args()
    runs = [(impl, seed, args) for impl in args.impl for seed in args.seeds]
    rows: list[Row] = []
    failure = None
    with ThreadPoolExecutor(args.jobs) as pool:
        try:
            for row in tqdm(pool.map(lambda run: train(*run), runs), total=len(runs)):
                rows.append(row)
        except RuntimeError as error:
            pool.shutdown(cancel_futures=True)
            failure = f"benchmark_ap.py: error: {error}"
    if rows:  # also those before a failure: each took a training
        print(summarize(rows))
        write_rows(args.csv, rows)
    if failure:
        sys.exit(failure)


if __name__ == "__main__":
    main()

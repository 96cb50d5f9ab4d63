#!/usr/bin/env python
"""How long training steps take with each IMPL, phase by phase, beside Detectron2's own sampling.

All train in this process at once, from equal weights: every round each makes one step on the same
batch, in turn, so that a machine's drift meets all alike. The times are those that training logs
in step_times.jsonl. A row gives their medians, and the median of the rounds' ratios of the whole
step to naive's, with a 95 % bootstrap interval. Warm-up steps, and steps that compile, are left
out; ``first_s`` is what they took beyond as many median steps. ``peak_mb`` is CUDA memory. With
--synthetic and no weights the RPN proposes its anchors, about as many as it does in a training.

On a CPU that is busy with other work, --threads below the number of cores makes figures steadier.

    tools/benchmark_train.py --config-file configs/faster_rcnn_R_50_FPN_static.yaml \\
        --synthetic 800 1344 --images 2 4 -- MODEL.WEIGHTS "" SOLVER.BASE_LR 1e-6
"""

from __future__ import annotations

import argparse
import os
import shlex
import tempfile
from pathlib import Path

# Read when torch is loaded. Threads that spin while they wait make a step ten times slower where
# another process wants the core, and all figures with it. As the Makefile sets it for training.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import numpy as np
import torch
from benchmark_runs import ImplRun, Row, RunError, run_rounds, summarize
from command_line import one_line
from config_files import merge_file
from csv_rows import check_can_write, write_rows
from detectron2.config import CfgNode, get_cfg
from detectron2.data import DatasetCatalog
from detectron2.engine import default_argument_parser
from devices import check_device, check_memory, is_out_of_memory
from impl_names import IMPLS, check_impl
from tabulate import tabulate
from tqdm import tqdm
from versions import versions

from d2_static_sampler import add_sampler_config
from d2_static_sampler.data import ensure_shapes
from d2_static_sampler.engine import check_run

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "quick" / "faster_rcnn_R_18_FPN_shapes.yaml"
BASELINE = "naive"
LEAST_SIZE = 32  # the stride of a usual backbone
OWN_OPTIONS = {
    "MODEL.DEVICE": "--device",
    "MODEL.SAMPLER.IMPL": "--impl",
    "MODEL.SAMPLER.STATIC_STEP": "--impl",
    "SOLVER.IMS_PER_BATCH": "--images",
}


def measure(cfg: CfgNode, args: argparse.Namespace, progress: tqdm) -> list[Row]:
    """One row an IMPL, for the batch size of ``cfg``."""
    numbers = range(args.warmup + args.steps)
    with tempfile.TemporaryDirectory() as folder:
        runs = {impl: ImplRun(cfg, impl, args.synthetic, Path(folder, impl)) for impl in args.impl}
        logs = run_rounds(runs, numbers, progress)
    rounds = [i for i in numbers if not any(log[i]["warmup"] for log in logs.values())]
    if len(rounds) < 2:
        raise RunError(f"all but {len(rounds)} steps compiled: take more --steps")
    rows = []
    for impl, log in logs.items():
        row = {"images": cfg.SOLVER.IMS_PER_BATCH, "impl": log[-1]["impl"]}
        row |= summarize(log, logs[BASELINE], rounds)
        peaks = [runs[impl].peak_bytes[i] for i in rounds if runs[impl].peak_bytes]
        row["peak_mb"] = round(max(peaks) / 1e6) if peaks else "n/a"
        rows.append(row)
    return rows


def build_config(args: argparse.Namespace) -> CfgNode:
    """The complete config, checked as training checks it; ValueError and the like otherwise."""
    check_arguments(args)
    cfg = get_cfg()
    add_sampler_config(cfg)
    merge_file(cfg, args.config_file)
    cfg.merge_from_list(args.opts)
    cfg.MODEL.DEVICE = args.device
    cfg.MODEL.SAMPLER.IMPL, cfg.MODEL.SAMPLER.STATIC_STEP = BASELINE, False
    cfg.MODEL.SAMPLER.TIMING = True
    cfg.MODEL.SAMPLER.WARMUP_ITERS = args.warmup
    cfg.SOLVER.MAX_ITER = max(cfg.SOLVER.MAX_ITER, args.warmup + args.steps)
    args.images = args.images or [cfg.SOLVER.IMS_PER_BATCH]
    if args.synthetic:
        height, width = args.synthetic
        batch = f"--images {max(args.images)} --synthetic {height} {width}"
        check_memory(batch, max(args.images) * 3 * height * width)
    check_config(cfg, args.synthetic)
    check_can_write(args.csv)
    return cfg


def check_config(cfg: CfgNode, is_synthetic: bool) -> None:
    checked = cfg.clone()
    checked.DATASETS.TEST = ()
    if is_synthetic:
        # No data set is asked for, but a registered one is what the checks go by.
        checked.DATASETS.TRAIN = ("synthetic",)
        if "synthetic" not in DatasetCatalog:
            DatasetCatalog.register("synthetic", list)
        if cfg.MODEL.PROPOSAL_GENERATOR.NAME == "PrecomputedProposals":
            raise ValueError("--synthetic makes no proposals, but the config's model needs them")
    elif any(name.startswith("shapes_") for name in cfg.DATASETS.TRAIN):
        ensure_shapes()
    check_run(checked, default_argument_parser().parse_args([]), can_evaluate=())


def check_arguments(args: argparse.Namespace) -> None:
    """ValueError or OSError, in one line, for what no config is needed to see."""
    for name in args.impl:
        check_impl(name)
    least = {"images": 1, "steps": 2, "warmup": 0, "threads": 1, "synthetic": LEAST_SIZE}
    for option, limit in least.items():
        value = getattr(args, option)
        if value is not None and np.min(value) < limit:
            raise ValueError(f"--{option} is {value}; at least {limit}")
    check_device("--device", args.device)
    for key in args.opts[::2]:
        if key in OWN_OPTIONS:
            raise ValueError(f"{key} is what {OWN_OPTIONS[key]} sets")


def describe(cfg: CfgNode, args: argparse.Namespace) -> Row:
    """What the figures belong to."""
    size = args.synthetic
    return {
        "config": Path(args.config_file).name,
        "opts": shlex.join(args.opts),
        "data": "synthetic {}x{}".format(*size) if size else " ".join(cfg.DATASETS.TRAIN),
        "steps": args.steps,
        "threads": torch.get_num_threads(),
    } | versions(args.device)


def format_table(rows: list[Row]) -> str:
    """Medians in ms, a row an IMPL."""
    table = []
    for row in rows:
        cells = {"images": row["images"], "impl": row["impl"]}
        medians = (key for key in row if key.endswith("_p50_ms"))
        cells |= {key.removesuffix("_p50_ms"): f"{row[key]:.1f}" for key in medians}
        cells["ratio"] = f"{row['ratio']:.3f} [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]"
        cells |= {key: row[key] for key in ("images_per_s", "peak_mb", "first_s")}
        table.append(cells)
    return tabulate(table, headers="keys", tablefmt="github", disable_numparse=True)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config-file", default=str(CONFIG), metavar="FILE")
    parser.add_argument(
        "--impl",
        nargs="+",
        default=list(IMPLS),
        help="any registered sampler, with +step behind it for the static step too; naive is "
        f"always there (default: {' '.join(IMPLS)})",
    )
    parser.add_argument("--images", nargs="+", type=int, help="a step (default: the config's)")
    parser.add_argument("--steps", type=int, default=30, help="measured (default: 30)")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them (default: 5)")
    parser.add_argument(
        "--synthetic",
        nargs=2,
        type=int,
        metavar=("H", "W"),
        help="random images of this size instead of the config's training data",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the rows to this file")
    parser.add_argument("opts", nargs="*", help="KEY VALUE of the config; after a list, -- first")
    return parser


def main(argv: list[str] | None = None) -> list[Row]:
    """Run the command line ``argv``, by default the process's; returns the rows."""
    parser = make_parser()
    args = parser.parse_args(argv)
    args.impl = list(dict.fromkeys([BASELINE, *args.impl]))
    try:
        cfg = build_config(args)
    except (AssertionError, KeyError, OSError, ValueError) as error:
        parser.error(one_line(error))
    torch.set_num_threads(args.threads)
    torch.backends.cudnn.benchmark = cfg.CUDNN_BENCHMARK
    about, rows = describe(cfg, args), []
    try:
        with tqdm(total=len(args.images) * (args.warmup + args.steps), unit="round") as progress:
            for images in args.images:
                cfg.SOLVER.IMS_PER_BATCH = images
                rows += measure(cfg, args, progress)
                write_rows(args.csv, [about | row for row in rows])
    except FloatingPointError as error:
        hint = "a smaller SOLVER.BASE_LR keeps it from that, at the same work a step"
        parser.exit(1, f"{parser.prog}: error: {one_line(error)} ({hint})\n")
    except RunError as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        parser.error(f"out of memory at {cfg.SOLVER.IMS_PER_BATCH} images: {one_line(error)}")
    print(format_table(rows))
    print(", ".join(f"{key} {value}" for key, value in about.items() if value))
    return [about | row for row in rows]


if __name__ == "__main__":
    main()

#!/usr/bin/env python
"""What an RPN costs beside its convolutions: matching, sampling and losses, forward.

Detectron2's RPN and those of the IMPLs label and sample the same anchors and take the losses of the
same predictions, in turn. An IMPL with +step behind it has the static step.

    tools/benchmark_rpn.py --images 2 8 --threads 2 --csv output/rpn.csv
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmark_sampler import count, summarize_times, time_in_turn
from command_line import one_line
from csv_rows import check_can_write, write_rows
from detectron2.config import get_cfg
from detectron2.layers import ShapeSpec
from detectron2.modeling import build_proposal_generator
from detectron2.structures import Boxes, Instances
from detectron2.utils.events import EventStorage
from devices import check_device, check_memory
from impl_names import check_impl, split_impl
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm
from versions import versions

from d2_static_sampler import install_sampler
from d2_static_sampler.modeling import has_static_step
from d2_static_sampler.modeling.static_rpn import AnchorPredictions
from d2_static_sampler.profiling.peak_memory import peak_bytes

STRIDES = {"p2": 4, "p3": 8, "p4": 16, "p5": 32, "p6": 64}
STOCK = "Detectron2"
Run = Callable[[], Any]


def build_rpn(impl: str, device: str) -> nn.Module:
    """The RPN of a Faster R-CNN with an FPN, in training."""
    cfg = get_cfg()
    cfg.MODEL.ANCHOR_GENERATOR.SIZES = [[32], [64], [128], [256], [512]]
    cfg.MODEL.RPN.IN_FEATURES = list(STRIDES)
    shapes = {name: ShapeSpec(channels=8, stride=stride) for name, stride in STRIDES.items()}
    rpn = build_proposal_generator(cfg, shapes).to(device).train()
    if impl != STOCK:
        name, has_step = split_impl(impl)
        install_sampler(rpn, name, static_step=has_step)
    return rpn


class Inputs:
    """Anchors, ground truth and predictions of ``images`` images of H x W."""

    def __init__(self, size: tuple[int, int], images: int, truth: int, device: str) -> None:
        maps = [torch.empty(1, 1, *(-(-n // s) for n in size)) for s in STRIDES.values()]
        anchors = build_rpn(STOCK, "cpu").anchor_generator(maps)
        self.anchors = [Boxes(level.tensor.to(device)) for level in anchors]
        counts = [len(level) for level in self.anchors]
        self.truth = [_truth(size, truth, device) for _ in range(images)]
        self.logits = [_leaf(torch.randn(images, n), device) for n in counts]
        self.deltas = [_leaf(torch.randn(images, n, 4) / 10, device) for n in counts]

    def run(self, rpn: nn.Module) -> dict[str, Tensor]:
        """Label, sample, and the losses."""
        with EventStorage():
            if has_static_step(rpn):
                return rpn.static_losses(self._predictions(), self.truth)
            labels, boxes = rpn.label_and_sample_anchors(self.anchors, self.truth)
            return rpn.losses(self.anchors, self.logits, labels, self.deltas, boxes)

    def _predictions(self) -> AnchorPredictions:
        boxes = Boxes.cat(self.anchors).tensor
        logits, deltas = torch.cat(self.logits, dim=1), torch.cat(self.deltas, dim=1)
        return AnchorPredictions(boxes, self.logits, logits, deltas)


def measure(images: int, threads: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each implementation."""
    inputs = Inputs(tuple(args.size), images, args.truth, args.device)
    rpns = {impl: build_rpn(impl, args.device) for impl in (STOCK, *args.impl)}
    runs: dict[str, Run] = {impl: (lambda rpn=rpn: inputs.run(rpn)) for impl, rpn in rpns.items()}
    for run in runs.values():
        for _ in range(3):
            run()
    times = time_in_turn(runs, threads, args.rounds, args.device)
    shape = {"images": images, "size": "x".join(map(str, args.size)), "truth": args.truth}
    return [
        {**shape, "threads": threads, "implementation": impl}
        | summarize_times(times[impl], times[STOCK])
        | count("compiled" in impl, run)
        | {"peak_mb": round(peak_bytes(run, args.device) / 1e6, 1)}
        for impl, run in runs.items()
    ]


def _truth(size: tuple[int, int], count: int, device: str) -> Instances:
    height, width = size
    limits = torch.tensor([width, height])
    center = torch.rand(count, 2) * limits
    # Sides from 12 to 245 pixels, as many small ones as large ones in the logarithm.
    extent = torch.exp(torch.rand(count, 2) * 3 + 2.5)
    low, high = center - extent / 2, center + extent / 2
    boxes = torch.cat([low.clamp(min=0), torch.minimum(high, limits)], dim=1)
    return Instances(size, gt_boxes=Boxes(boxes.to(device)))


def _leaf(values: Tensor, device: str) -> Tensor:
    return values.to(device).requires_grad_()


def parse_args() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--impl", nargs="+", default=["static", "static+step", "compiled+step"])
    parser.add_argument("--size", nargs=2, type=int, default=[800, 1344], metavar=("H", "W"))
    parser.add_argument("--images", nargs="+", type=int, default=[2, 8])
    parser.add_argument("--truth", type=int, default=12, help="ground-truth boxes an image")
    parser.add_argument("--threads", nargs="+", type=int, default=[torch.get_num_threads()])
    parser.add_argument("--rounds", type=int, default=9, help="at least 2 (default: 9)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--csv", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    if min(*args.size, *args.images, *args.threads, args.truth) < 1 or args.rounds < 2:
        parser.error("--size, --images, --truth and --threads are at least 1, --rounds at least 2")
    try:
        for impl in args.impl:
            check_impl(impl)
        check_device("--device", args.device)
        check_memory("--images and --size", max(args.images) * args.size[0] * args.size[1] * 5)
        check_can_write(args.csv)
    except (OSError, ValueError) as error:
        parser.error(one_line(error))
    return args


def main() -> None:
    """Measure all, print the table, write the CSV."""
    args = parse_args()
    torch.manual_seed(0)
    jobs = [(images, threads) for images in args.images for threads in args.threads]
    about, rows = versions(args.device), []
    for job in tqdm(jobs):
        rows += measure(*job, args)
        write_rows(args.csv, [row | about for row in rows])
    print(tabulate(rows, headers="keys", tablefmt="github"))
    print(", ".join(f"{key} {value}" for key, value in about.items()))


if __name__ == "__main__":
    main()

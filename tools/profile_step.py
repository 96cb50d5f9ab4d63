#!/usr/bin/env python
"""Which operations of a training step make a device wait, by phase and line.

For each IMPL and number of images, on random weights and made-up images: the operations of a
training forward, with the lines of those that depend on data, and the trace of a whole step for
ui.perfetto.dev or chrome://tracing. On CUDA also what waited in that step.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from command_line import one_line
from detectron2.config import CfgNode
from detectron2.utils.events import EventStorage
from devices import check_device, check_memory, is_out_of_memory
from impl_names import IMPLS, check_impl, split_impl
from profile_figures import figures, graph_figures, hide_sampling, waits
from profile_model import make_batch, make_config, make_model
from profile_report import report
from torch.profiler import profile, record_function
from tqdm import tqdm
from versions import versions

from d2_static_sampler import build_label_sampler, install_sampler
from d2_static_sampler.config import check_sampler_config
from d2_static_sampler.engine.checks import check_numbers
from d2_static_sampler.modeling import static_graphs
from d2_static_sampler.modeling.deferred import deferred_metrics
from d2_static_sampler.profiling.captured_graphs import CapturedGraphs
from d2_static_sampler.profiling.step_phases import STEP, StepPhases, count_ops_by_phase
from d2_static_sampler.samplers import CompiledSampler

MIN_SIZE = 32  # smaller images leave no room for three boxes
CONFIG_KEY = re.compile(r"[A-Z][A-Z0-9_]*(\.[A-Z0-9_]+)*")


def make_sampler(cfg: CfgNode, name: str) -> Any:
    """What ``install_sampler`` takes; one for all numbers of images, as in a training run."""
    impl, has_step = split_impl(name)
    if impl == "naive":
        return impl
    cfg = cfg.clone()
    cfg.MODEL.SAMPLER.IMPL = impl
    # In a compiled static step other operations are compiled anyway.
    options = {"compiles_cpu": True} if impl == "compiled" and not has_step else {}
    return build_label_sampler(cfg, **options)


def measure(
    cfg: CfgNode, sampler: Any, has_step: bool, batch: list[dict[str, Any]], trace: Path
) -> dict[str, Any]:
    """All figures of a sampler at one number of images; leaves the trace in a file."""
    model = make_model(cfg)
    install_sampler(model, sampler, static_step=has_step, seed=cfg.MODEL.SAMPLER.SEED)
    graphs, count = observe(model, batch, trace)
    row = figures(count)
    if isinstance(sampler, CompiledSampler):
        if not has_step:
            hide_sampling(row)
        is_eager = any(each.is_eager for each in (sampler, *static_graphs(model)))
        row["graphs"] = graph_figures(graphs) | {"is_eager": is_eager}
    if cfg.MODEL.DEVICE.startswith("cuda"):
        row["waits"] = waits(trace)
    return row


def observe(
    model: torch.nn.Module, batch: list[dict[str, Any]], trace: Path
) -> tuple[CapturedGraphs, count_ops_by_phase]:
    """Three steps: what the first compiles, the operations of a forward, the trace of the last."""
    graphs, phases = CapturedGraphs(), StepPhases()
    count = count_ops_by_phase(phases)
    with EventStorage() as storage:
        with graphs.watch():
            run_step(model, batch)
        deferred_metrics().flush()
        with phases.watch(model, storage), count:
            model(batch)
        deferred_metrics().flush()
        with StepPhases(trace=True).watch(model, storage), profile() as profiler:
            run_step(model, batch)
        deferred_metrics().flush()
    profiler.export_chrome_trace(str(trace))
    return graphs, count


def measure_all(cfg: CfgNode, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each IMPL and number of images."""
    samplers = {impl: make_sampler(cfg, impl) for impl in args.impl}
    jobs = [(impl, images) for impl in args.impl for images in args.images]
    rows = []
    with tqdm(jobs, unit="step") as works:
        for impl, images in works:
            works.set_description(f"{impl}, {images} images")
            trace = args.output / f"trace_{impl}_{images}.json"
            batch = make_batch(cfg, images, *args.size)
            row = measure(cfg, samplers[impl], split_impl(impl)[1], batch, trace)
            rows.append({"impl": impl, "images": images, "trace": trace.name} | row)
    return rows


def run_step(model: torch.nn.Module, batch: list[dict[str, Any]]) -> None:
    """A training step at a rate of 0: the weights stay as they are."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with record_function(STEP):
        with record_function("forward"):
            losses = model(batch)
        with record_function("backward"):
            sum(losses.values()).backward()
        with record_function("optimizer"):
            optimizer.step()
    optimizer.zero_grad()


def describe(cfg: CfgNode, args: argparse.Namespace) -> dict[str, Any]:
    """What the figures belong to."""
    return {
        "config": str(args.config_file or "default"),
        "overrides": " ".join(args.opts) or "none",
        "size": "x".join(map(str, args.size)),
        "threads": torch.get_num_threads(),
    } | versions(cfg.MODEL.DEVICE)


def parse_args(
    arguments: Sequence[str],
) -> tuple[argparse.ArgumentParser, argparse.Namespace, CfgNode]:
    """The command line and its config, checked: what is wrong stops here, in one line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--config-file", type=Path, metavar="YAML", help="default: a small Faster R-CNN, R18-FPN")
    add("--impl", nargs="+", metavar="IMPL", default=list(IMPLS),
        help="naive, static, compiled or a registered name; with +step behind it, but for naive, "
        f"the static step too (default: {' '.join(IMPLS)})")  # fmt: skip
    add("--images", nargs="+", type=int, metavar="N", default=[1, 2, 4, 8],
        help="images in a step (default: 1 2 4 8)")  # fmt: skip
    add("--size", nargs=2, type=int, metavar=("H", "W"), default=[256, 256],
        help="of an image (default: 256 256)")  # fmt: skip
    add("--device", default="cpu", help="cpu or cuda (default: cpu)")
    add("--output", type=Path, metavar="DIR", default=Path("output/profile_step"),
        help="for the tables, figures and traces (default: output/profile_step)")  # fmt: skip
    add("opts", nargs="*", metavar="KEY VALUE", help="changes to the config, at the end")
    args = parser.parse_args(with_separator(arguments))
    try:
        return parser, args, check(args)
    except (AssertionError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        parser.error(one_line(error))


def with_separator(arguments: Sequence[str]) -> list[str]:
    """Put "--" before the first KEY, which an option of many values would take for another one."""
    for i, argument in enumerate(arguments):
        follows_option = i > 0 and arguments[i - 1].startswith("--")
        if CONFIG_KEY.fullmatch(argument) and not follows_option:
            return [*arguments[:i], "--", *arguments[i:]]
    return list(arguments)


def check(args: argparse.Namespace) -> CfgNode:
    args.impl, args.images = list(dict.fromkeys(args.impl)), list(dict.fromkeys(args.images))
    for impl in args.impl:
        check_impl(impl)
    require("--images", args.images, lambda images: images >= 1, "at least 1")
    require("--size", args.size, lambda size: size >= MIN_SIZE, f"at least {MIN_SIZE}")
    height, width = args.size
    batch = f"--images {max(args.images)} --size {height} {width}"
    check_memory(batch, 4 * max(args.images) * 3 * height * width)
    cfg = make_config(args.config_file, args.device, args.opts)
    check_sampler_config(cfg)
    check_numbers(cfg)
    check_device("device", cfg.MODEL.DEVICE)
    make_model(cfg)  # names in the config that nobody registered, say
    args.output.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=args.output).close()
    return cfg


def require(
    option: str, values: Iterable[Any], is_right: Callable[[Any], bool], choices: str
) -> None:
    for value in values:
        if not is_right(value):
            raise ValueError(f"{option} is {value!r}; {choices}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser, args, cfg = parse_args(sys.argv[1:] if arguments is None else arguments)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's lines would tear the bar
    try:
        rows = measure_all(cfg, args)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        height, width = args.size
        parser.error(f"out of memory at images of {height} x {width}: {one_line(error)}")
    about = describe(cfg, args)
    text = report(rows, about)
    (args.output / "profile.txt").write_text(text + "\n")
    (args.output / "profile.json").write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    print(f"{text}\n\nTables, figures and traces are in {args.output}")


if __name__ == "__main__":
    main()

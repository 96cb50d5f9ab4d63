"""The ``MODEL.SAMPLER`` node of a Detectron2 config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from detectron2.config import CfgNode

from .samplers import LABEL_SAMPLER_REGISTRY
from .samplers.selection import SELECTIONS


def add_sampler_config(cfg: CfgNode) -> None:
    """Add ``MODEL.SAMPLER`` to ``cfg``; a second call keeps what was set in between."""
    defaults = _defaults()
    if "SAMPLER" not in cfg.MODEL:
        cfg.MODEL.SAMPLER = defaults
        return
    for key, value in defaults.items():
        if key not in cfg.MODEL.SAMPLER:
            cfg.MODEL.SAMPLER[key] = value


def check_sampler_config(cfg: CfgNode) -> None:
    """Raise ValueError, naming key, value and choices, where ``MODEL.SAMPLER`` cannot be used."""
    if "SAMPLER" not in cfg.MODEL:
        raise ValueError("the config has no MODEL.SAMPLER: call add_sampler_config(cfg) first")
    sampler = cfg.MODEL.SAMPLER
    if missing := sorted(set(_defaults()) - set(sampler)):
        raise ValueError(
            f"MODEL.SAMPLER has no {', '.join(missing)}: call add_sampler_config(cfg) first"
        )
    names = sorted(name for name, _ in LABEL_SAMPLER_REGISTRY)
    _check("IMPL", sampler.IMPL, sampler.IMPL in names, _choices(names))
    _check("SELECT", sampler.SELECT, sampler.SELECT in SELECTIONS, _choices(SELECTIONS))
    step = sampler.STATIC_STEP
    _check("STATIC_STEP", step, isinstance(step, bool), _choices(("True", "False")))
    if step and sampler.IMPL == "naive":
        others = ", ".join(name for name in names if name != "naive")
        raise ValueError(
            "MODEL.SAMPLER.STATIC_STEP is True, but MODEL.SAMPLER.IMPL is 'naive', which leaves "
            f"the whole step to Detectron2; choose one of: {others}; or "
            "MODEL.SAMPLER.STATIC_STEP False"
        )
    _check("SEED", sampler.SEED, sampler.SEED >= -1, "-1 or at least 0")
    _check("LOG_PERIOD", sampler.LOG_PERIOD, sampler.LOG_PERIOD >= 1, "at least 1")
    _check("WARMUP_ITERS", sampler.WARMUP_ITERS, sampler.WARMUP_ITERS >= 0, "at least 0")


def _check(key: str, value: Any, is_right: bool, choices: str) -> None:
    if not is_right:
        raise ValueError(f"MODEL.SAMPLER.{key} is {value!r}; {choices}")


def _choices(names: Sequence[str]) -> str:
    return f"choose one of: {', '.join(names)}"


def _defaults() -> CfgNode:
    node = CfgNode()
    # Who samples the labels in the RPN and the ROI heads:
    #   "naive"     Detectron2 itself; nothing is installed
    #   "static"    the whole batch at once, with fixed shapes
    #   "compiled"  the static sampler through torch.compile (ranks on a CPU: as "static")
    # or the name of a sampler of your own in LABEL_SAMPLER_REGISTRY.
    node.IMPL = "naive"
    # How "static" and "compiled" find a sample:
    #   "rank"  two random words a slot: exact, and equal on every device for equal words
    #   "topk"  a random key for each candidate, and top-k: fewer operations, more work
    #   "auto"  "rank"; later versions may choose by size and device where SEED is -1
    node.SELECT = "auto"
    # Seed of the samples alone: at least 0, and they depend on nothing but the seed, the rank,
    # the head and the number of the call. -1 draws from torch's global generator.
    # Without meaning for "naive".
    node.SEED = -1
    # Whether the rest of the training step has fixed shapes too, so that the host never waits for
    # the device but for the suppression of overlapping proposals; with "static" and "compiled".
    # Parts of a model that are not Detectron2's own keep their step, with a warning.
    node.STATIC_STEP = False
    # Measure every iteration: OUTPUT_DIR/step_times.jsonl and Detectron2's own logs.
    node.TIMING = True
    # Iterations between two lines of step times on the console. With STATIC_STEP also the most
    # until losses reach the host and are checked; every 20th iteration does that anyway.
    node.LOG_PERIOD = 20
    # First iterations of a run that its summary leaves out.
    node.WARMUP_ITERS = 10
    return node

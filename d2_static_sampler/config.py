"""The ``MODEL.SAMPLER`` node of a Detectron2 config."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from detectron2.config import CfgNode

from .samplers import LABEL_SAMPLER_REGISTRY
from .samplers.static import SELECTIONS

LARGEST = 2**63 - 1  # of an int64


def add_sampler_config(cfg: CfgNode) -> None:
    """Add ``MODEL.SAMPLER`` to ``cfg``; a second call keeps what was set in between.

    Raises:
        TypeError: ``cfg`` is no config of Detectron2.
        ValueError: it has a ``MODEL.SAMPLER`` that is no node of keys.
    """
    check_is_config(cfg)
    defaults = _defaults()
    if "SAMPLER" not in cfg.MODEL:
        cfg.MODEL.SAMPLER = defaults
        return
    _check_is_node(cfg.MODEL.SAMPLER)
    for key, value in defaults.items():
        if key not in cfg.MODEL.SAMPLER:
            cfg.MODEL.SAMPLER[key] = value


def check_sampler_config(cfg: CfgNode) -> None:
    """Raise ValueError, naming key, value and choices, where ``MODEL.SAMPLER`` cannot be used.

    TypeError where ``cfg`` is no config at all.
    """
    check_is_config(cfg)
    if "SAMPLER" not in cfg.MODEL:
        raise ValueError("the config has no MODEL.SAMPLER: call add_sampler_config(cfg) first")
    sampler = cfg.MODEL.SAMPLER
    _check_is_node(sampler)
    if missing := sorted(set(_defaults()) - set(sampler)):
        raise ValueError(
            f"MODEL.SAMPLER has no {', '.join(missing)}: call add_sampler_config(cfg) first"
        )
    _check("IMPL", sampler.IMPL, sampler.IMPL in sampler_names(), _choices(sampler_names()))
    _check("SELECT", sampler.SELECT, sampler.SELECT in SELECTIONS, _choices(SELECTIONS))
    for key in ("STATIC_STEP", "TIMING"):
        _check(key, sampler[key], isinstance(sampler[key], bool), _choices(("True", "False")))
    check_step_has_sampler(sampler.STATIC_STEP, sampler.IMPL)
    for key, smallest in (("SEED", -1), ("LOG_PERIOD", 1), ("WARMUP_ITERS", 0)):
        value = sampler[key]
        _check(key, value, is_integer(value, smallest), integer_choices(smallest))


def check_is_config(cfg: Any) -> None:
    """Raise TypeError where ``cfg`` is not the whole of a Detectron2 config."""
    if isinstance(cfg, CfgNode) and isinstance(cfg.get("MODEL"), CfgNode):
        return
    if isinstance(cfg, CfgNode) and "IMPL" in cfg:
        raise TypeError("expected the whole config, not its MODEL.SAMPLER alone: pass cfg")
    raise TypeError(f"expected a config of Detectron2's get_cfg(), not {shown(cfg)}")


def check_step_has_sampler(static_step: bool, impl: str) -> None:
    """Raise ValueError for a static step without a sampler to go with it."""
    if static_step and impl == "naive":
        others = ", ".join(name for name in sampler_names() if name != "naive")
        raise ValueError(
            "MODEL.SAMPLER.STATIC_STEP is True, but MODEL.SAMPLER.IMPL is 'naive', which leaves "
            f"the whole step to Detectron2; choose one of: {others}; or "
            "MODEL.SAMPLER.STATIC_STEP False"
        )


def is_integer(value: Any, smallest: int) -> bool:
    """Whether ``value`` is an integer from ``smallest`` on that fits an int64; a bool is none."""
    is_number = isinstance(value, Integral) and not isinstance(value, bool)
    return is_number and smallest <= value <= LARGEST


def integer_choices(smallest: int) -> str:
    """What :func:`is_integer` takes, in words."""
    first = "-1, or an integer from 0" if smallest == -1 else f"an integer from {smallest}"
    return f"choose {first} to 2**63 - 1"


def sampler_names() -> list[str]:
    """What ``MODEL.SAMPLER.IMPL`` can be."""
    return sorted(name for name, _ in LABEL_SAMPLER_REGISTRY)


def shown(value: Any) -> str:
    """``value`` in a line of an error, however large it is."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:60]}... ({type(value).__name__})"


def _check_is_node(sampler: Any) -> None:
    if not isinstance(sampler, CfgNode):
        keys = ", ".join(sorted(_defaults()))
        raise ValueError(f"MODEL.SAMPLER is {shown(sampler)}; set one of its keys: {keys}")


def _check(key: str, value: Any, is_right: bool, choices: str) -> None:
    if not is_right:
        raise ValueError(f"MODEL.SAMPLER.{key} is {shown(value)}; {choices}")


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

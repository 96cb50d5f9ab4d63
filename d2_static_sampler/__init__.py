"""Batched, fixed-shape label sampling for Detectron2's R-CNN detectors."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import add_sampler_config
    from .engine import SamplerHook
    from .modeling import install_sampler, installed_samplers, uninstall_sampler
    from .modeling.deferred import flush_metrics
    from .samplers import (
        LABEL_SAMPLER_REGISTRY,
        LabelSample,
        build_label_sampler,
        sample_balanced,
        subsample_labels,
    )

__all__ = [
    "LABEL_SAMPLER_REGISTRY",
    "LabelSample",
    "SamplerHook",
    "add_sampler_config",
    "build_label_sampler",
    "flush_metrics",
    "install_sampler",
    "installed_samplers",
    "sample_balanced",
    "subsample_labels",
    "uninstall_sampler",
]

_HOME = {
    "LABEL_SAMPLER_REGISTRY": "samplers",
    "LabelSample": "samplers",
    "SamplerHook": "engine",
    "add_sampler_config": "config",
    "build_label_sampler": "samplers",
    "flush_metrics": "modeling.deferred",
    "install_sampler": "modeling",
    "installed_samplers": "modeling",
    "sample_balanced": "samplers",
    "subsample_labels": "samplers",
    "uninstall_sampler": "modeling",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for: the samplers alone need no Detectron2."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f".{_HOME[name]}", __name__)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "detectron2":
            raise
        raise ImportError(
            f"{name} needs Detectron2, which is not installed: "
            "run `python tools/install_detectron2.py`, or install it from its repository",
            name="detectron2",
        ) from None
    return getattr(module, name)

"""Plugs a label sampler into the RPN and the ROI heads of a built Detectron2 model."""

from .head_sampler import HeadSampler
from .install import install_sampler, installed_samplers, uninstall_sampler
from .static_install import has_static_step, static_graphs

__all__ = [
    "HeadSampler",
    "has_static_step",
    "install_sampler",
    "installed_samplers",
    "static_graphs",
    "uninstall_sampler",
]

"""Plugs a label sampler into the RPN and the ROI heads of a built Detectron2 model."""

from .head_sampler import HeadSampler
from .install import install_sampler, installed_samplers, uninstall_sampler

__all__ = ["HeadSampler", "install_sampler", "installed_samplers", "uninstall_sampler"]

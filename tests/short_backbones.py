"""Detectron2's ResNet backbones with one block a stage: a model's step takes half the time."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

from detectron2.modeling import BACKBONE_REGISTRY, ResNet
from torch import nn

_MAKE_STAGE = ResNet.make_stage
_NAMES = (
    "build_resnet_backbone",
    "build_resnet_fpn_backbone",
    "build_retinanet_resnet_fpn_backbone",
)


def short(name: str) -> str:
    """The name in the registry of the short form of a backbone."""
    return name.replace("build_", "build_short_")


def _make_short_stage(*args: Any, num_blocks: int, **options: Any) -> list[nn.Module]:
    short_options = {
        name: value[:1] if name.endswith("_per_block") else value for name, value in options.items()
    }
    return _MAKE_STAGE(*args, num_blocks=1, **short_options)


def _build_short(name: str, *args: Any) -> nn.Module:
    with mock.patch.object(ResNet, "make_stage", staticmethod(_make_short_stage)):
        return BACKBONE_REGISTRY.get(name)(*args)


for _name in _NAMES:
    BACKBONE_REGISTRY._do_register(short(_name), functools.partial(_build_short, _name))

"""How the tools here read a config file."""

from __future__ import annotations

import yaml
from detectron2.config import CfgNode


def merge_file(cfg: CfgNode, path: str) -> None:
    """Merge a YAML file into ``cfg``, with PointRend's keys where the file has some of them.

    Raises:
        AssertionError, KeyError: a wrong type, or a key that there is not.
        OSError: there is no such file.
        ValueError: it is no Detectron2 config, or asks for a PointRend that is not installed.
    """
    try:
        model = CfgNode.load_yaml_with_base(path).get("MODEL", {})
        if not isinstance(model, dict):
            raise TypeError(f"MODEL is {model!r}; it must be a mapping")
        if "POINT_HEAD" in model:
            _add_point_rend_config(cfg, path)
        cfg.merge_from_file(path)
    except (AttributeError, RecursionError, TypeError, UnicodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is not a Detectron2 config: {error}") from error


def _add_point_rend_config(cfg: CfgNode, path: str) -> None:
    try:
        from detectron2.projects.point_rend import add_pointrend_config
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{path} has MODEL.POINT_HEAD, but this Detectron2 has no PointRend: {error}"
        ) from error
    add_pointrend_config(cfg)

"""A LazyConfig in the words of a YAML config, which the rest of this package reads."""

from __future__ import annotations

import re
from typing import Any

from detectron2.config import CfgNode, get_cfg
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .config import add_sampler_config, check_sampler_config, shown

# Where a Lazy config that fits Detectron2's own Lazy training script says the same.
_YAML_KEYS = {
    "train.output_dir": "OUTPUT_DIR",
    "train.init_checkpoint": "MODEL.WEIGHTS",
    "train.device": "MODEL.DEVICE",
    "train.max_iter": "SOLVER.MAX_ITER",
    "train.amp.enabled": "SOLVER.AMP.ENABLED",
    "dataloader.train.total_batch_size": "SOLVER.IMS_PER_BATCH",
    "dataloader.train.dataset.names": "DATASETS.TRAIN",
    "dataloader.test.dataset.names": "DATASETS.TEST",
    "model.roi_heads.num_classes": "MODEL.ROI_HEADS.NUM_CLASSES",
}
ANY_NUMBER_OF_CLASSES = 1_000_000


def yaml_config(lazy: DictConfig) -> CfgNode:
    """A config for ``install_sampler`` and ``SamplerHook`` from a Lazy config.

    ``lazy.sampler`` holds the keys of ``MODEL.SAMPLER`` in lower case; those that it leaves out,
    all of them where it is missing, have their defaults. Of the rest it takes what the checks of
    a run look at: output folder, weights, device, iterations, batch, data sets and classes.

    Raises:
        TypeError: ``lazy`` is no Lazy config.
        ValueError: a key of ``lazy.sampler`` that does not exist, or a value that it cannot have.
    """
    if not isinstance(lazy, DictConfig):
        raise TypeError(f"expected a Lazy config (DictConfig), not {shown(lazy)}")
    cfg = get_cfg()
    add_sampler_config(cfg)
    # Unless the config says it, a model has as many classes as the data set asks for.
    cfg.MODEL.ROI_HEADS.NUM_CLASSES = ANY_NUMBER_OF_CLASSES
    cfg.MODEL.SAMPLER.update(_sampler_values(lazy, sorted(cfg.MODEL.SAMPLER)))
    try:
        check_sampler_config(cfg)
    except ValueError as error:
        raise ValueError(lazy_message(str(error))) from None
    pairs = {}
    for key, name in _YAML_KEYS.items():
        value = OmegaConf.select(lazy, key, default=None)
        if value is not None:
            pairs[name] = _names(value) if name.startswith("DATASETS.") else value
    # merge_from_list evaluates what it is given: a string in quotes stays a string.
    cfg.merge_from_list([x for key, value in pairs.items() for x in (key, repr(value))])
    return cfg


def lazy_message(message: str) -> str:
    """``message`` with Lazy keys in the place of the YAML keys that they set."""
    for key, name in _YAML_KEYS.items():
        message = message.replace(name, key)
    return re.sub(r"MODEL\.SAMPLER\.(\w+)", lambda key: f"sampler.{key[1].lower()}", message)


def _sampler_values(lazy: DictConfig, known: list[str]) -> dict[str, Any]:
    try:
        # Not to a dict: a key need not be a string, nor a value one of YAML's.
        sampler = lazy.get("sampler", {})
        choices = ", ".join(key.lower() for key in known)
        if not hasattr(sampler, "items"):
            raise ValueError(f"sampler is {shown(sampler)}; set one of its keys: {choices}")
        if unknown := [key for key in sampler if str(key).upper() not in known]:
            raise ValueError(f"sampler has {unknown[0]!r}; choose one of: {choices}")
        return {key.upper(): value for key, value in sampler.items()}
    except OmegaConfBaseException as error:  # ??? or an interpolation of what there is not
        raise ValueError(" ".join(str(error).split())) from None


def _names(value: Any) -> tuple[str, ...]:
    return tuple(value) if isinstance(value, list | tuple | ListConfig) else (value,)

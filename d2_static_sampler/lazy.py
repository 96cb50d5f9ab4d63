"""A LazyConfig in the words of a YAML config, which the rest of this package reads."""

from __future__ import annotations

from typing import Any

from detectron2.config import CfgNode, get_cfg
from omegaconf import DictConfig, ListConfig, OmegaConf

from .config import add_sampler_config

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
}
_SAMPLER = "sampler"


def yaml_config(lazy: DictConfig) -> CfgNode:
    """A config for ``install_sampler`` and ``SamplerHook`` from a Lazy config.

    ``lazy.sampler`` holds the keys of ``MODEL.SAMPLER`` in lower case; those that it leaves out,
    all of them where it is missing, have their defaults. Of the rest it takes what the checks of
    a run look at: output folder, weights, device, iterations, batch and data sets.

    Raises:
        AssertionError: a key of ``lazy.sampler`` that does not exist.
        ValueError: a value of another type than the key's default. Both name the YAML key;
            :func:`lazy_message` puts the Lazy one there.
    """
    cfg = get_cfg()
    add_sampler_config(cfg)
    # Registered data sets can have more classes than the default, which no Lazy config knows.
    cfg.MODEL.ROI_HEADS.NUM_CLASSES = _classes(lazy)
    sampler = OmegaConf.select(lazy, _SAMPLER, default={})
    pairs = {f"MODEL.SAMPLER.{key.upper()}": value for key, value in sampler.items()}
    for key, name in _YAML_KEYS.items():
        value = OmegaConf.select(lazy, key, default=None)
        if value is not None:
            pairs[name] = _names(value) if name.startswith("DATASETS.") else value
    # A string in quotes stays a string: merge_from_list evaluates what it is given.
    cfg.merge_from_list(
        [x for key, value in pairs.items() for x in (key, repr(value))],
    )
    return cfg


def lazy_message(message: str) -> str:
    """``message`` with the Lazy keys in the place of the YAML keys that :func:`yaml_config` sets."""
    for key, name in _YAML_KEYS.items():
        message = message.replace(name, key)
    parts = message.split("MODEL.SAMPLER.")
    words = [part.partition(" ") for part in parts[1:]]
    return parts[0] + "".join(f"{_SAMPLER}.{key.lower()}{gap}{rest}" for key, gap, rest in words)


def _names(value: Any) -> tuple[str, ...]:
    return tuple(value) if isinstance(value, list | tuple | ListConfig) else (value,)


def _classes(lazy: DictConfig) -> int:
    return OmegaConf.select(lazy, "model.roi_heads.num_classes", default=None) or 1_000_000

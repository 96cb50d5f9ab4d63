"""Checks of a run's config, made before anything slow begins."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection

import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog

from ..config import check_sampler_config


def check_run(cfg: CfgNode, *, num_processes: int, can_evaluate: Collection[str]) -> None:
    """Raise ValueError or FileNotFoundError, in one line, where ``cfg`` cannot be run.

    Args:
        cfg: the complete config.
        num_processes: of all machines.
        can_evaluate: the kinds of data set, by evaluator_type, that the caller can evaluate.
    """
    check_sampler_config(cfg)
    _check_device(cfg)
    _check_weights(cfg.MODEL.WEIGHTS)
    _check_batch(cfg.SOLVER.IMS_PER_BATCH, num_processes)
    if not cfg.DATASETS.TRAIN:
        raise ValueError("DATASETS.TRAIN is empty: name a registered data set")
    for key in ("TRAIN", "TEST"):
        for name in cfg.DATASETS[key]:
            _check_data_set(key, name)
            _check_classes(cfg, name)
    for name in cfg.DATASETS.TEST:
        _check_evaluator(name, can_evaluate)


def _check_device(cfg: CfgNode) -> None:
    if cfg.MODEL.DEVICE.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"MODEL.DEVICE is {cfg.MODEL.DEVICE!r}, but torch finds no CUDA: use cpu")
    if cfg.SOLVER.AMP.ENABLED and not cfg.MODEL.DEVICE.startswith("cuda"):
        raise ValueError("SOLVER.AMP.ENABLED is True, but Detectron2's AMP needs MODEL.DEVICE cuda")


def _check_weights(weights: str) -> None:
    if weights and "://" not in weights and not os.path.isfile(weights):
        raise FileNotFoundError(f"MODEL.WEIGHTS is {weights!r}: there is no such file")


def _check_batch(images: int, num_processes: int) -> None:
    if images < num_processes or images % num_processes:
        raise ValueError(
            f"SOLVER.IMS_PER_BATCH is {images}, which {num_processes} processes cannot share evenly"
        )


def _check_data_set(key: str, name: str) -> None:
    if name not in DatasetCatalog:
        close = difflib.get_close_matches(name, DatasetCatalog.list()) or DatasetCatalog.list()
        raise ValueError(
            f"DATASETS.{key} has {name!r}, which is not registered; "
            f"choose one of: {', '.join(sorted(close))}"
        )
    metadata = MetadataCatalog.get(name)
    for attribute in ("json_file", "image_root"):
        path = metadata.get(attribute)
        if path and "://" not in path and not os.path.exists(path):
            raise FileNotFoundError(
                f"DATASETS.{key} has {name!r}, whose {attribute} {path} does not exist; "
                "DETECTRON2_DATASETS is where Detectron2 looks for data sets"
            )


def _check_classes(cfg: CfgNode, name: str) -> None:
    classes = MetadataCatalog.get(name).get("thing_classes")
    heads = {"GeneralizedRCNN": "ROI_HEADS", "PanopticFPN": "ROI_HEADS", "RetinaNet": "RETINANET"}
    head = heads.get(cfg.MODEL.META_ARCHITECTURE)
    if classes and head and len(classes) > cfg.MODEL[head].NUM_CLASSES:
        raise ValueError(
            f"MODEL.{head}.NUM_CLASSES is {cfg.MODEL[head].NUM_CLASSES}, but {name} has "
            f"{len(classes)} classes: set MODEL.{head}.NUM_CLASSES {len(classes)}"
        )


def _check_evaluator(name: str, can_evaluate: Collection[str]) -> None:
    kind = MetadataCatalog.get(name).get("evaluator_type")
    if kind not in can_evaluate:
        raise ValueError(
            f"DATASETS.TEST has {name}, of evaluator type {kind!r}; choose data sets of type "
            f"{', '.join(can_evaluate)}, or none: DATASETS.TEST '()'"
        )

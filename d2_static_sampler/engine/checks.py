"""Checks of a run's config, made before anything slow begins."""

from __future__ import annotations

import argparse
import difflib
import functools
import os
from collections.abc import Collection
from typing import Any

import torch
from detectron2.config import CfgNode, get_cfg
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.modeling import (
    BACKBONE_REGISTRY,
    META_ARCH_REGISTRY,
    PROPOSAL_GENERATOR_REGISTRY,
    ROI_HEADS_REGISTRY,
)
from fvcore.common.registry import Registry

from ..config import check_sampler_config
from .launch import num_processes

RESNET_DEPTHS = (18, 34, 50, 101, 152)
COCO_KEYPOINTS = 17
MASK_FORMATS = ("polygon", "bitmask")
FLIPS = ("horizontal", "vertical", "none")


def check_run(cfg: CfgNode, args: argparse.Namespace, *, can_evaluate: Collection[str]) -> None:
    """Raise ValueError or FileNotFoundError, in one line, where a run would fail later.

    Args:
        cfg: the complete config.
        args: of Detectron2's ``default_argument_parser``.
        can_evaluate: the kinds of data set, by evaluator_type, that the caller can evaluate.
    """
    check_sampler_config(cfg)
    check_complete(cfg)
    _check_processes(args)
    _check_device(cfg)
    _check_names(cfg)
    check_numbers(cfg)
    _check("SOLVER.MAX_ITER", cfg.SOLVER.MAX_ITER, cfg.SOLVER.MAX_ITER >= 1, "at least 1")
    _check_batch(cfg.SOLVER.IMS_PER_BATCH, num_processes(args.num_gpus, args.num_machines))
    _check_weights(cfg, args)
    used = "TEST" if args.eval_only else "TRAIN"
    if not cfg.DATASETS[used]:
        raise ValueError(f"DATASETS.{used} is empty: name a registered data set")
    for key in ("TEST",) if args.eval_only else ("TRAIN", "TEST"):
        for name in cfg.DATASETS[key]:
            _check_data_set(key, name)
            _check_classes(cfg, name)
            if cfg.MODEL.KEYPOINT_ON:
                _check_keypoints(cfg, key, name)
    for name in cfg.DATASETS.TEST:
        _check_evaluator(name, can_evaluate)


def _check(key: str, value: Any, is_right: bool, choices: str) -> None:
    if not is_right:
        raise ValueError(f"{key} is {value!r}; {choices}")


def check_complete(cfg: CfgNode, defaults: CfgNode | None = None, path: str = "") -> None:
    """Raise ValueError for a value of None, which a config takes in the place of any other."""
    for key, default in (get_cfg() if defaults is None else defaults).items():
        value = cfg.get(key)
        if isinstance(default, CfgNode) and isinstance(value, CfgNode):
            check_complete(value, default, f"{path}{key}.")
        elif value is None and default is not None:
            kind = "a mapping" if isinstance(default, CfgNode) else f"a value such as {default!r}"
            raise ValueError(f"{path}{key} is None; it must be {kind}")


def _check_processes(args: argparse.Namespace) -> None:
    for option in ("num_gpus", "num_machines"):
        value = getattr(args, option)
        _check(f"--{option.replace('_', '-')}", value, value >= 1, "at least 1")
    rank, machines = args.machine_rank, args.num_machines
    _check("--machine-rank", rank, 0 <= rank < machines, f"0 to {machines - 1}")
    if torch.cuda.is_available():
        devices = torch.cuda.device_count()
        _check("--num-gpus", args.num_gpus, args.num_gpus <= devices, f"at most {devices} here")
    if machines > 1:
        _check("--dist-url", args.dist_url, args.dist_url != "auto", "tcp://HOST:PORT of machine 0")


def _check_device(cfg: CfgNode) -> None:
    name = cfg.MODEL.DEVICE
    has_cuda = torch.cuda.is_available()
    is_known = name == "cpu" or (has_cuda and name.split(":")[0] == "cuda")
    _check("MODEL.DEVICE", name, is_known, f"cpu, or cuda where torch finds it (here: {has_cuda})")


def _check_names(cfg: CfgNode) -> None:
    known = {
        "META_ARCHITECTURE": _names(META_ARCH_REGISTRY),
        "BACKBONE.NAME": _names(BACKBONE_REGISTRY),
        "PROPOSAL_GENERATOR.NAME": [*_names(PROPOSAL_GENERATOR_REGISTRY), "PrecomputedProposals"],
        "ROI_HEADS.NAME": _names(ROI_HEADS_REGISTRY),
    }
    for key, names in known.items():
        value = functools.reduce(getattr, key.split("."), cfg.MODEL)
        _check(f"MODEL.{key}", value, value in names, f"choose one of: {', '.join(names)}")
    for key, choices in (("MASK_FORMAT", MASK_FORMATS), ("RANDOM_FLIP", FLIPS)):
        value = cfg.INPUT[key]
        _check(f"INPUT.{key}", value, value in choices, f"choose one of: {', '.join(choices)}")
    schedules = ("WarmupMultiStepLR", "WarmupCosineLR", "WarmupStepWithFixedGammaLR")
    name = cfg.SOLVER.LR_SCHEDULER_NAME
    _check("SOLVER.LR_SCHEDULER_NAME", name, name in schedules, f"choose one of: {schedules}")


def _names(registry: Registry) -> list[str]:
    return sorted(name for name, _ in registry)


def check_numbers(cfg: CfgNode) -> None:
    """Raise ValueError for numbers of a model with which nothing trains."""
    depth = cfg.MODEL.RESNETS.DEPTH
    is_resnet = cfg.MODEL.BACKBONE.NAME in ("build_resnet_backbone", "build_resnet_fpn_backbone")
    is_known = depth in RESNET_DEPTHS or not is_resnet
    _check("MODEL.RESNETS.DEPTH", depth, is_known, f"choose one of: {RESNET_DEPTHS}")
    classes = cfg.MODEL.ROI_HEADS.NUM_CLASSES
    _check("MODEL.ROI_HEADS.NUM_CLASSES", classes, classes >= 1, "at least 1")
    if "POINT_HEAD" in cfg.MODEL and cfg.MODEL.MASK_ON:
        of_points = cfg.MODEL.POINT_HEAD.NUM_CLASSES
        what = f"it must be MODEL.ROI_HEADS.NUM_CLASSES, which is {classes}"
        _check("MODEL.POINT_HEAD.NUM_CLASSES", of_points, of_points == classes, what)
    for head in ("RPN", "ROI_HEADS"):
        size, fraction = cfg.MODEL[head].BATCH_SIZE_PER_IMAGE, cfg.MODEL[head].POSITIVE_FRACTION
        _check(f"MODEL.{head}.BATCH_SIZE_PER_IMAGE", size, size >= 0, "at least 0")
        _check(f"MODEL.{head}.POSITIVE_FRACTION", fraction, 0 <= fraction <= 1, "0 to 1")


def _check_weights(cfg: CfgNode, args: argparse.Namespace) -> None:
    if args.resume and os.path.isfile(os.path.join(cfg.OUTPUT_DIR, "last_checkpoint")):
        return
    weights = cfg.MODEL.WEIGHTS
    if weights and "://" not in weights and not os.path.isfile(weights):
        raise FileNotFoundError(f"MODEL.WEIGHTS is {weights!r}: there is no such file")
    if args.eval_only and not weights:
        raise ValueError(
            "--eval-only needs weights: set MODEL.WEIGHTS, or --resume with the OUTPUT_DIR of a "
            f"run that left a checkpoint ({cfg.OUTPUT_DIR} has none)"
        )


def _check_batch(images: int, processes: int) -> None:
    if images < processes or images % processes:
        raise ValueError(
            f"SOLVER.IMS_PER_BATCH is {images}, which {processes} processes cannot share evenly"
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


def _check_keypoints(cfg: CfgNode, key: str, name: str) -> None:
    number = cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS
    metadata = MetadataCatalog.get(name)
    names = metadata.get("keypoint_names")
    # A data set without a file may name its keypoints when it is loaded.
    if names is None and key == "TRAIN" and metadata.get("json_file"):
        raise ValueError(f"MODEL.KEYPOINT_ON is True, but {name} has no keypoints")
    if names is not None and len(names) != number:
        raise ValueError(
            f"MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS is {number}, but {name} has {len(names)} "
            f"keypoints: set it to {len(names)}"
        )
    sigmas = cfg.TEST.KEYPOINT_OKS_SIGMAS
    are_numbers = all(isinstance(sigma, int | float) and sigma > 0 for sigma in sigmas)
    is_right = are_numbers and (len(sigmas) or COCO_KEYPOINTS) == number
    if key == "TEST" and metadata.get("evaluator_type") == "coco" and not is_right:
        raise ValueError(
            f"TEST.KEYPOINT_OKS_SIGMAS is {list(sigmas)}; COCO evaluation needs {number} numbers "
            f"above 0, one a keypoint (empty: those of COCO's {COCO_KEYPOINTS} of a person)"
        )


def _check_evaluator(name: str, can_evaluate: Collection[str]) -> None:
    kind = MetadataCatalog.get(name).get("evaluator_type")
    if kind not in can_evaluate:
        raise ValueError(
            f"DATASETS.TEST has {name}, of evaluator type {kind!r}; choose data sets of type "
            f"{', '.join(can_evaluate)}, or none: DATASETS.TEST '()'"
        )

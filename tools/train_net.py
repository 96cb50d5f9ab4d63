#!/usr/bin/env python
"""Train a Detectron2 model with the label sampler that MODEL.SAMPLER.IMPL names.

Takes Detectron2's own command line (--config-file, --num-gpus, --num-machines, --resume,
--eval-only, KEY VALUE), and two options for one's own COCO-format files.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import Any

import torch
from config_files import merge_file
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import CfgNode, get_cfg
from detectron2.data import MetadataCatalog
from detectron2.engine import DefaultTrainer, default_argument_parser, default_setup, defaults
from detectron2.evaluation import (
    COCOEvaluator,
    DatasetEvaluator,
    LVISEvaluator,
    PascalVOCDetectionEvaluator,
    verify_results,
)
from detectron2.utils import comm
from torch import nn

from d2_static_sampler import SamplerHook, add_sampler_config, install_sampler
from d2_static_sampler.data import Needs, ensure_shapes, register_coco_files
from d2_static_sampler.engine import amp_trainer, check_complete, check_run, draw_detections, launch
from d2_static_sampler.engine.step_timer import replaced

EVALUATOR_TYPES = ("coco", "lvis", "pascal_voc")
PICTURE = "detections.png"

logger = logging.getLogger("detectron2.train_net")


class Trainer(DefaultTrainer):
    """Detectron2's trainer with the sampler of the config."""

    def __init__(self, cfg: CfgNode) -> None:
        # By this name DefaultTrainer finds what it trains with in mixed precision.
        with replaced(defaults, "AMPTrainer", amp_trainer(cfg.MODEL.DEVICE)):
            super().__init__(cfg)

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        """Detectron2's model, with the sampler installed."""
        return install_sampler(super().build_model(cfg), cfg)

    def build_hooks(self) -> list[Any]:
        """Detectron2's hooks, and the one for step times and the samplers' state."""
        return [*super().build_hooks(), SamplerHook(self.cfg)]

    @classmethod
    def build_evaluator(cls, cfg: CfgNode, dataset_name: str) -> DatasetEvaluator:
        """The evaluator for the data set's kind; results go to OUTPUT_DIR/inference."""
        kind = MetadataCatalog.get(dataset_name).evaluator_type
        if kind == "pascal_voc":
            return PascalVOCDetectionEvaluator(dataset_name)
        folder = os.path.join(cfg.OUTPUT_DIR, "inference")
        if kind == "lvis":
            return LVISEvaluator(dataset_name, output_dir=folder)
        sigmas = cfg.TEST.KEYPOINT_OKS_SIGMAS
        return COCOEvaluator(dataset_name, output_dir=folder, kpt_oks_sigmas=sigmas)

    def state_dict(self) -> dict[str, Any]:
        """Detectron2's state, and the optimizer's, which release 0.6 leaves out."""
        return {**super().state_dict(), "_trainer": self._trainer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` holds."""
        super().load_state_dict(state)
        self._trainer.load_state_dict(state["_trainer"])


def build_config(args: argparse.Namespace) -> CfgNode:
    """The complete config of the command line, checked; its data sets are registered."""
    cfg = get_cfg()
    add_sampler_config(cfg)
    if args.config_file:
        merge_file(cfg, args.config_file)
    cfg.merge_from_list(args.opts)
    if "MODEL.DEVICE" not in args.opts and not torch.cuda.is_available():
        cfg.MODEL.DEVICE = "cpu"
    check_complete(cfg)
    use_own_files(cfg, args)
    if any(name.startswith("shapes_") for name in (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST)):
        ensure_shapes()
    check_run(cfg, args, can_evaluate=EVALUATOR_TYPES)
    cfg.freeze()
    return cfg


def use_own_files(cfg: CfgNode, args: argparse.Namespace) -> None:
    """Register the files of --train-files and --val-files, and train and evaluate on them."""
    own = {"TRAIN": ("own_train", args.train_files), "TEST": ("own_val", args.val_files)}
    for key, (name, files) in own.items():
        if files:
            is_test = key == "TEST"
            register_coco_files(name, *files, needs=_needs(cfg), for_evaluation=is_test)
            cfg.DATASETS[key] = (name,)
    if args.train_files and not args.val_files:
        cfg.DATASETS.TEST = ()
    if args.train_files and args.val_files:
        for attribute, what in (("thing_classes", "categories"), ("keypoint_names", "keypoints")):
            names = [MetadataCatalog.get(name).get(attribute) for name in ("own_train", "own_val")]
            if names[0] != names[1]:
                raise ValueError(
                    f"{args.train_files[0]} and {args.val_files[0]} differ in their {what}: "
                    f"{names[0]} and {names[1]}"
                )


def _needs(cfg: CfgNode) -> Needs:
    """What the model of the config reads of annotations."""
    head = cfg.MODEL.ROI_KEYPOINT_HEAD
    return Needs(
        mask_format=cfg.INPUT.MASK_FORMAT if cfg.MODEL.MASK_ON else None,
        num_keypoints=head.NUM_KEYPOINTS if cfg.MODEL.KEYPOINT_ON else None,
        min_keypoints=head.MIN_KEYPOINTS_PER_IMAGE,
        flips=cfg.INPUT.RANDOM_FLIP == "horizontal",
    )


def main(args: argparse.Namespace) -> None:
    """Train or evaluate; what runs in every process."""
    cfg = build_config(args)
    default_setup(cfg, args)
    if args.eval_only:
        model = Trainer.build_model(cfg)
        checkpointer = DetectionCheckpointer(model, save_dir=cfg.OUTPUT_DIR)
        checkpointer.resume_or_load(cfg.MODEL.WEIGHTS, resume=args.resume)
        results = Trainer.test(cfg, model)
        if comm.is_main_process():
            verify_results(cfg, results)
    else:
        trainer = Trainer(cfg)
        trainer.resume_or_load(resume=args.resume)
        trainer.train()
        model = trainer.model
    if cfg.DATASETS.TEST and comm.is_main_process():
        picture = os.path.join(cfg.OUTPUT_DIR, PICTURE)
        draw_detections(cfg, model, picture)
        logger.info(f"Ground truth (left) and detections (right) are in {picture}")


def parse_args() -> argparse.Namespace:
    """Detectron2's command line, and two options for one's own files."""
    parser = default_argument_parser()
    for option, purpose in (("--train-files", "train on"), ("--val-files", "evaluate on")):
        parser.add_argument(
            option,
            nargs=2,
            metavar=("ANNOTATIONS", "IMAGES"),
            help=f"{purpose} one's own data: a COCO-format JSON file and the folder of its images",
        )
    return parser.parse_args()


def run() -> None:
    """Check the command line, then start the processes."""
    args = parse_args()
    try:
        build_config(args)
    except (AssertionError, KeyError, OSError, ValueError) as error:
        reason = error.args[0] if isinstance(error, KeyError) else error
        sys.exit(f"train_net.py: error: {' '.join(str(reason).split())}")
    launch(
        main,
        args.num_gpus,
        num_machines=args.num_machines,
        machine_rank=args.machine_rank,
        dist_url=args.dist_url,
        args=(args,),
    )


if __name__ == "__main__":
    run()

#!/usr/bin/env python
"""Train a model of a LazyConfig with the label sampler that its sampler.impl names.

Takes the command line of Detectron2's Lazy script: --config-file x.py (or a config.yaml that a
run has saved), --num-gpus, --num-machines, --resume, --eval-only, and key=value at the end.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import LazyConfig, instantiate
from detectron2.data import MetadataCatalog
from detectron2.engine import (
    SimpleTrainer,
    default_argument_parser,
    default_setup,
    default_writers,
    defaults,
    hooks,
)
from detectron2.evaluation import inference_on_dataset, print_csv_format
from detectron2.utils import comm
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn

from d2_static_sampler import SamplerHook, install_sampler
from d2_static_sampler.data import ensure_shapes
from d2_static_sampler.engine import amp_trainer, check_run, launch
from d2_static_sampler.engine.launch import num_processes
from d2_static_sampler.lazy import lazy_message, yaml_config

NEEDED = (
    "model", "optimizer", "lr_multiplier", "dataloader.train",
    "train.output_dir", "train.init_checkpoint", "train.max_iter", "train.device",
    "train.amp.enabled", "train.ddp", "train.checkpointer", "train.eval_period",
    "train.log_period",
)  # fmt: skip


def load_config(args: argparse.Namespace) -> DictConfig:
    """The config of the command line, checked; its data sets are there."""
    cfg = LazyConfig.apply_overrides(LazyConfig.load(args.config_file), args.opts)
    missing = [key for key in NEEDED if OmegaConf.select(cfg, key, default=None) is None]
    if missing:
        raise ValueError(f"{args.config_file} has no {', '.join(missing)}")
    is_device_given = any(opt.startswith("train.device=") for opt in args.opts)
    if not is_device_given and not torch.cuda.is_available():
        cfg.train.device = "cpu"
    view = yaml_config(cfg)
    if "total_batch_size" not in cfg.dataloader.train:
        # A loader of one's own shares its images as it likes.
        view.SOLVER.IMS_PER_BATCH = num_processes(args.num_gpus, args.num_machines)
    if cfg.dataloader.get("evaluator") is None:
        view.DATASETS.TEST = ()
    if any(name.startswith("shapes_") for name in (*view.DATASETS.TRAIN, *view.DATASETS.TEST)):
        ensure_shapes()
    kinds = {MetadataCatalog.get(name).get("evaluator_type") for name in view.DATASETS.TEST}
    check_run(view, args, can_evaluate=kinds)
    return cfg


def build_model(cfg: DictConfig) -> nn.Module:
    """The model on its device, with the sampler installed."""
    model = instantiate(cfg.model).to(cfg.train.device)
    # Without the key, a config that installs a sampler in its model by itself keeps it.
    return install_sampler(model, yaml_config(cfg)) if "sampler" in cfg else model


def evaluate(cfg: DictConfig, model: nn.Module) -> dict[str, Any]:
    """Results on dataloader.test; none where the config has no evaluator, or null."""
    if cfg.dataloader.get("evaluator") is None:
        return {}
    evaluator = instantiate(cfg.dataloader.evaluator)
    results = inference_on_dataset(model, instantiate(cfg.dataloader.test), evaluator)
    if comm.is_main_process():
        print_csv_format(results)
    return results


def build_trainer(cfg: DictConfig, model: nn.Module) -> SimpleTrainer:
    """The trainer of ``model``; as yet without hooks."""
    cfg.optimizer.params.model = model
    optimizer = instantiate(cfg.optimizer)
    # By its module: launch replaces it in processes on CPUs.
    model = defaults.create_ddp_model(model, **cfg.train.ddp)
    trainer = amp_trainer(cfg.train.device) if cfg.train.amp.enabled else SimpleTrainer
    return trainer(model, instantiate(cfg.dataloader.train), optimizer)


def register_hooks(
    cfg: DictConfig, trainer: SimpleTrainer, checkpointer: DetectionCheckpointer
) -> None:
    """Detectron2's hooks, and the one for step times and the samplers' state."""
    options, view = cfg.train, yaml_config(cfg)
    # Before a checkpoint processes bring their step times together, and losses are checked.
    view.SOLVER.CHECKPOINT_PERIOD = options.checkpointer.period
    view.TEST.EVAL_PERIOD = options.eval_period
    registered = [
        hooks.IterationTimer(),
        hooks.LRScheduler(scheduler=instantiate(cfg.lr_multiplier)),
        hooks.EvalHook(options.eval_period, lambda: evaluate(cfg, trainer.model)),
        SamplerHook(view, writer_period=options.log_period),
    ]
    if comm.is_main_process():
        writers = default_writers(options.output_dir, options.max_iter)
        registered += [
            hooks.PeriodicCheckpointer(checkpointer, **options.checkpointer),
            hooks.PeriodicWriter(writers, period=options.log_period),
        ]
    trainer.register_hooks(registered)


def main(args: argparse.Namespace) -> None:
    """Train or evaluate; what runs in every process."""
    cfg = load_config(args)
    default_setup(cfg, args)
    model = build_model(cfg)
    weights, folder = cfg.train.init_checkpoint, cfg.train.output_dir
    if args.eval_only:
        DetectionCheckpointer(model, folder).resume_or_load(weights, resume=args.resume)
        evaluate(cfg, model)
        return
    trainer = build_trainer(cfg, model)
    checkpointer = DetectionCheckpointer(trainer.model, folder, trainer=trainer)
    register_hooks(cfg, trainer, checkpointer)
    checkpointer.resume_or_load(weights, resume=args.resume)
    is_resumed = args.resume and checkpointer.has_checkpoint()
    trainer.train(trainer.iter + 1 if is_resumed else 0, cfg.train.max_iter)


def run() -> None:
    """Check the command line, then start the processes."""
    args = default_argument_parser().parse_args()
    try:
        load_config(args)
    except (
        AssertionError, HydraException, ImportError, KeyError, OSError, OmegaConfBaseException,
        SyntaxError, ValueError,
    ) as error:  # fmt: skip
        reason = error.args[0] if isinstance(error, KeyError) else error
        sys.exit(f"lazy_train_net.py: error: {lazy_message(' '.join(str(reason).split()))}")
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

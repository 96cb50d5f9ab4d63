"""Training runs to compare: one of each IMPL, alike in all else, that go on a step at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import CfgNode
from detectron2.data import build_detection_train_loader
from detectron2.data.detection_utils import (
    annotations_to_instances,
    annotations_to_instances_rotated,
)
from detectron2.engine import SimpleTrainer, hooks
from detectron2.modeling import build_model
from detectron2.solver import build_lr_scheduler, build_optimizer
from detectron2.structures import BoxMode
from detectron2.utils.env import seed_all_rng
from detectron2.utils.events import EventStorage
from impl_names import split_impl
from profile_model import propose_anchors
from tqdm import tqdm

from d2_static_sampler import SamplerHook, install_sampler
from d2_static_sampler.engine import amp_trainer, read_steps
from d2_static_sampler.engine.hooks import STEP_LOG
from d2_static_sampler.modeling import has_static_step, installed_samplers
from d2_static_sampler.modeling.deferred import deferred_metrics

BOXES_PER_IMAGE = 7  # COCO has 7.3
Row = dict[str, Any]
Size = tuple[int, int]  # height, width


class RunError(Exception):
    """A run that cannot be made, in one line for whoever asked for it."""


class ImplRun:
    """A training with one IMPL: Detectron2's trainer and the hook that measures its steps.

    Runs of equal ``cfg`` begin with equal weights and see equal batches, since they seed all
    random numbers alike at every step.

    Args:
        cfg: the complete config.
        impl: for ``MODEL.SAMPLER.IMPL``; with "+step" behind it STATIC_STEP is on.
        size: of synthetic images; None takes the config's training data. With synthetic images and
            random weights the RPN begins by proposing its anchors as they are.
        folder: for the step log.

    Attributes:
        peak_bytes: of each step on CUDA, without what other runs hold.
    """

    def __init__(self, cfg: CfgNode, impl: str, size: Size | None, folder: Path) -> None:
        cfg = cfg.clone()
        cfg.defrost()
        cfg.OUTPUT_DIR = str(folder)
        cfg.MODEL.SAMPLER.IMPL, cfg.MODEL.SAMPLER.STATIC_STEP = split_impl(impl)
        self.seed = max(cfg.SEED, 0)
        self.log = folder / STEP_LOG
        self.peak_bytes: list[int] = []
        seed_all_rng(self.seed)
        self.model = _model(cfg)
        if size and not cfg.MODEL.WEIGHTS:
            propose_anchors(self.model)
        self.optimizer = build_optimizer(cfg, self.model)
        self.loader = SyntheticLoader(cfg, size) if size else build_detection_train_loader(cfg)
        make = amp_trainer(cfg.MODEL.DEVICE) if cfg.SOLVER.AMP.ENABLED else SimpleTrainer
        self.trainer = make(self.model, self.loader, self.optimizer)
        schedule = hooks.LRScheduler(self.optimizer, build_lr_scheduler(cfg, self.optimizer))
        self.trainer.register_hooks([schedule, SamplerHook(cfg)])
        self.trainer.storage = EventStorage()
        self.trainer.before_train()

    def step(self, number: int) -> None:
        """One training step, over when the device has done it too."""
        seed_all_rng(self.seed + 1 + number)
        if isinstance(self.loader, SyntheticLoader):
            self.loader.draw(self.seed + 1 + number)
        self.trainer.iter = number
        others = self._start_peak()
        with self.trainer.storage:
            self.trainer.before_step()
            self.trainer.run_step()
            self.trainer.after_step()
        self._stop_peak(others)

    def finish(self) -> list[Row]:
        """The rows of all steps, as training logs them.

        Raises:
            FloatingPointError: a loss since the last flush was not finite.
        """
        if has_static_step(self.model):
            deferred_metrics(self.trainer.storage).flush()
        self.trainer.after_train()
        return read_steps(self.log)

    def _start_peak(self) -> int:
        """Bytes on the device that are not this run's."""
        if not torch.cuda.is_initialized():
            return 0
        torch.cuda.reset_peak_memory_stats()
        own = [*self.model.parameters(), *self.model.buffers()]
        own += [parameter.grad for parameter in self.model.parameters()]
        own += [value for state in self.optimizer.state.values() for value in state.values()]
        held = sum(x.nbytes for x in own if torch.is_tensor(x) and x.is_cuda)
        return torch.cuda.memory_allocated() - held

    def _stop_peak(self, others: int) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            self.peak_bytes.append(torch.cuda.max_memory_allocated() - others)


def _model(cfg: CfgNode) -> torch.nn.Module:
    model = build_model(cfg)
    if cfg.MODEL.WEIGHTS:
        try:
            DetectionCheckpointer(model).load(cfg.MODEL.WEIGHTS)
        except (AssertionError, OSError) as error:
            raise RunError(
                f"MODEL.WEIGHTS is {cfg.MODEL.WEIGHTS!r}, which cannot be loaded ({error}); "
                "MODEL.WEIGHTS '' starts from random weights"
            ) from error
    install_sampler(model, cfg)
    impl = cfg.MODEL.SAMPLER.IMPL
    if impl != "naive" and not installed_samplers(model):
        raise RunError(
            f"{cfg.MODEL.META_ARCHITECTURE} has nowhere to put {impl!r}: choose a model with an "
            "RPN or ROI heads of Detectron2's"
        )
    if cfg.MODEL.SAMPLER.STATIC_STEP and not has_static_step(model):
        raise RunError(f"{cfg.MODEL.META_ARCHITECTURE} has no part that the static step equals")
    return model.train()


class SyntheticLoader:
    """Hands out the batch that :meth:`draw` made before, so that drawing takes no step's time.

    Random images, each with ground truth of about COCO's amount, of the kinds that the config's
    heads learn from.
    """

    def __init__(self, cfg: CfgNode, size: Size) -> None:
        self.cfg = cfg
        self.size = size
        self.batch: list[dict[str, Any]] = []

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        while True:
            yield self.batch

    def draw(self, seed: int) -> None:
        """Make the batch that ``seed`` stands for."""
        random = np.random.default_rng(seed)
        self.batch = [self._image(random) for _ in range(self.cfg.SOLVER.IMS_PER_BATCH)]

    def _image(self, random: np.random.Generator) -> dict[str, Any]:
        height, width = self.size
        pixels = random.integers(256, size=(3, height, width), dtype=np.uint8)
        count = max(1, random.poisson(BOXES_PER_IMAGE))
        truth = [self._object(random) for _ in range(count)]
        if self.cfg.MODEL.PROPOSAL_GENERATOR.NAME == "RRPN":
            instances = annotations_to_instances_rotated(truth, self.size)
        else:
            instances = annotations_to_instances(truth, self.size, self.cfg.INPUT.MASK_FORMAT)
        image = {"image": torch.from_numpy(pixels), "instances": instances}
        if self.cfg.MODEL.META_ARCHITECTURE == "PanopticFPN":
            classes = self.cfg.MODEL.SEM_SEG_HEAD.NUM_CLASSES
            image["sem_seg"] = torch.from_numpy(random.integers(classes, size=self.size))
        return image | {"height": height, "width": width}

    def _object(self, random: np.random.Generator) -> dict[str, Any]:
        """An annotation in Detectron2's format, a 25th to nine tenths of the image a side."""
        model, (height, width) = self.cfg.MODEL, self.size
        extent = np.array([width, height]) * 0.9 * 0.045 ** random.random(2)
        x0, y0 = corner = random.random(2) * (np.array([width, height]) - extent)
        x1, y1 = corner + extent
        found: dict[str, Any] = {"category_id": int(random.integers(model.ROI_HEADS.NUM_CLASSES))}
        if model.PROPOSAL_GENERATOR.NAME == "RRPN":
            angle = random.uniform(-90, 90)
            return found | {"bbox": [*(corner + extent / 2), *extent, angle]}
        found |= {"bbox": [x0, y0, x1, y1], "bbox_mode": BoxMode.XYXY_ABS}
        if model.MASK_ON:
            found["segmentation"] = [np.array([x0, y0, x1, y0, x1, y1, x0, y1])]
        if model.KEYPOINT_ON:
            places = corner + extent * random.random((model.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS, 2))
            found["keypoints"] = np.pad(places, ((0, 0), (0, 1)), constant_values=2)
        return found


def run_rounds(
    runs: dict[str, ImplRun], numbers: Iterable[int], progress: tqdm
) -> dict[str, list[Row]]:
    """Let every run make a step a round, the first of them another one each time."""
    order = list(runs)
    for number in numbers:
        for impl in order:
            runs[impl].step(number)
        order.append(order.pop(0))
        progress.update()
    return {impl: run.finish() for impl, run in runs.items()}


def summarize(log: list[Row], baseline: list[Row], rounds: list[int]) -> Row:
    """The figures of the measured ``rounds``; the others make up first_s."""
    row: Row = {}
    for name in (key.removesuffix("_ms") for key in log[0] if key.endswith("_ms")):
        times = [log[i][f"{name}_ms"] for i in rounds]
        p20, _, _, p80 = quantiles(times, n=5, method="inclusive")
        figures = {"p20": p20, "p50": median(times), "p80": p80}
        row |= {f"{name}_{key}_ms": round(value, 3) for key, value in figures.items()}
    ratios = [log[i]["total_ms"] / baseline[i]["total_ms"] for i in rounds]
    low, high = bootstrap(ratios)
    row |= {"ratio": median(ratios), "ratio_low": low, "ratio_high": high}
    row |= {key: round(row[key], 4) for key in ("ratio", "ratio_low", "ratio_high")}
    total = median(log[i]["total_ms"] for i in rounds)
    row["images_per_s"] = round(log[0]["images"] / total * 1e3, 2)
    extra = [step["total_ms"] - total for i, step in enumerate(log) if i not in rounds]
    row["first_s"] = round(max(0.0, sum(extra) / 1e3), 2)
    return row


def bootstrap(values: list[float]) -> tuple[float, float]:
    """The 95 % interval of the median of successive ``values``.

    Drawn in stretches, since what disturbs a machine often lasts longer than a round.
    """
    count, length = len(values), round(len(values) ** (1 / 3))
    random = np.random.default_rng(0)
    starts = random.integers(count, size=(10_000, -(-count // length), 1))
    drawn = (starts + np.arange(length)).reshape(len(starts), -1)[:, :count]
    medians = np.median(np.take(values, drawn, mode="wrap"), axis=1)
    low, high = np.percentile(medians, (2.5, 97.5))
    return float(low), float(high)

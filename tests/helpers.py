"""Small real models and batches that the tests share."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import detectron2.modeling.proposal_generator.rpn as stock_rpn
import detectron2.modeling.roi_heads.roi_heads as stock_roi_heads
import pytest
import torch
from detectron2.config import CfgNode, get_cfg
from detectron2.modeling import build_model
from detectron2.structures import BitMasks, Boxes, Instances, PolygonMasks
from detectron2.utils.events import EventStorage
from torch import Tensor, nn

from d2_static_sampler import LabelSample, add_sampler_config
from d2_static_sampler.modeling.slots import every_slot
from d2_static_sampler.ops.matching import match_op
from d2_static_sampler.ops.pooling import roi_align_level_backward, roi_align_levels
from d2_static_sampler.ops.sampling import (
    SampleRequest,
    pick_ranks,
    sample_by_rank,
    sample_in_torch,
)
from d2_static_sampler.samplers import CompiledSampler, LabelSampler, NaiveSampler, StaticSampler
from tests.short_backbones import short


class BodySampler(StaticSampler):
    """The static sampler of a device without kernels of its own."""

    def _sample(self, labels: Tensor, words: Tensor, request: SampleRequest) -> LabelSample:
        return LabelSample(*sample_in_torch(labels, words, *request))


# Every way in which labels are sampled.
WAYS: dict[str, Callable[[], LabelSampler]] = {
    "naive": NaiveSampler,
    "static": StaticSampler,
    "static in torch": BodySampler,
    "compiled": functools.partial(CompiledSampler, compiles_cpu=True),
}
STATIC_WAYS = ("static", "static in torch")
CONFIGS = Path(__file__).parents[1] / "configs"
NUM_CLASSES = 3
# The quick configs' model with 0.3 million weights in place of 12: a step takes a quarter.
NARROW = (
    "MODEL.RESNETS.DEPTH", "50",
    "MODEL.RESNETS.STEM_OUT_CHANNELS", "8",
    "MODEL.RESNETS.RES2_OUT_CHANNELS", "16",
    "MODEL.RESNETS.WIDTH_PER_GROUP", "8",
    "MODEL.FPN.OUT_CHANNELS", "16",
    "MODEL.ROI_BOX_HEAD.FC_DIM", "32",
)  # fmt: skip


needs_inductor = pytest.mark.skipif(
    os.environ.get("ATEN_CPU_CAPABILITY") == "default",
    reason="with ATEN_CPU_CAPABILITY=default Inductor writes C++ that does not compile",
)
KERNELS = (sample_by_rank, pick_ranks, match_op, roi_align_levels, roi_align_level_backward)


@contextlib.contextmanager
def on_another_device() -> Iterator[None]:
    """In here a CPU has no kernels of its own, and computes every slot: as a GPU without Triton."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(every_slot())
        for each in KERNELS:
            stack.enter_context(each.set_kernel_enabled("cpu", enabled=False))
        yield


def sampler_by(way: str) -> LabelSampler:
    """A new sampler that samples in one of the ``WAYS``."""
    return WAYS[way]()


def small_config(*opts: Any, name: str = "", narrow: bool = True) -> CfgNode:
    """A config of ours for the CPU with ``KEY, VALUE`` pairs on top; without a name a quick one."""
    cfg = get_cfg()
    add_sampler_config(cfg)
    cfg.merge_from_file(str(CONFIGS / (name or "quick/Base-RCNN-R_18-FPN-shapes.yaml")))
    if narrow and not name:
        cfg.merge_from_list(list(NARROW))
        cfg.MODEL.BACKBONE.NAME = short(cfg.MODEL.BACKBONE.NAME)
    cfg.merge_from_list(["MODEL.DEVICE", "cpu", "MODEL.WEIGHTS", "", *opts])
    return cfg


def small_model(*opts: Any, seed: int = 0) -> nn.Module:
    """A detector in training mode, equal for equal arguments."""
    torch.manual_seed(seed)
    return build_model(small_config(*opts)).train()


def make_batch(num_gt: tuple[int, ...], *, size: int = 96, masks: str = "", seed: int = 0) -> Any:
    """One input a count of ground-truth boxes; ``masks`` is "", "polygon" or "bitmask"."""
    random = torch.Generator().manual_seed(seed)
    batch = []
    for count in num_gt:
        corner = torch.rand(count, 2, generator=random) * size * 0.6
        extent = torch.rand(count, 2, generator=random) * size * 0.3 + 8
        truth = Instances((size, size))
        truth.gt_boxes = Boxes(torch.cat([corner, corner + extent], dim=1))
        truth.gt_classes = torch.randint(NUM_CLASSES, (count,), generator=random)
        if masks == "polygon":
            truth.gt_masks = PolygonMasks([[_outline(box)] for box in truth.gt_boxes.tensor])
        elif masks == "bitmask":
            truth.gt_masks = BitMasks(torch.rand(count, size, size, generator=random) > 0.5)
        image = torch.rand(3, size, size, generator=random) * 255
        batch.append({"image": image, "instances": truth, "height": size, "width": size})
    return batch


def step(model: nn.Module, batch: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], dict]:
    """Losses, gradients by parameter, and logged scalars of one forward and backward."""
    model.zero_grad()
    with EventStorage() as storage:
        losses = model(batch)
        sum(losses.values()).backward()
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    logged = {name: value for name, (value, _) in storage.latest().items()}
    return {name: loss.detach() for name, loss in losses.items()}, gradients, logged


def record_picks(
    model: nn.Module, batch: Any, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any] = step
) -> tuple[Any, list[list[tuple[Tensor, Tensor]]]]:
    """What ``run``, :func:`step` say, gives with stock, and stock's picks, a list a head.

    Picking leaves torch's generator as it was: what a model draws behind it repeats in a replay.
    """
    picks: dict[str, list[tuple[Tensor, Tensor]]] = {"rpn": [], "roi": []}
    with monkeypatch.context() as patch:
        for key, module in (("rpn", stock_rpn), ("roi", stock_roi_heads)):

            def record(*args: Any, key: str = key, stock: Any = module.subsample_labels) -> Any:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(len(picks[key]))
                    picks[key].append(stock(*args))
                return picks[key][-1]

            patch.setattr(module, "subsample_labels", record)
        torch.manual_seed(0)
        result = run(model, batch)
    return result, [calls for calls in picks.values() if calls]


class ReplaySampler:
    """Returns recorded picks: a list a call of (positives, negatives), one pair an image."""

    def __init__(self, calls: list[list[tuple[Tensor, Tensor]]]) -> None:
        self.calls = list(calls)

    def __call__(self, labels: Tensor, *, num_samples: int, **_: Any) -> LabelSample:
        picks = self.calls.pop(0)
        assert len(picks) == len(labels)
        index = torch.zeros((len(picks), num_samples), dtype=torch.int64)
        for row, (positives, negatives) in zip(index, picks, strict=True):
            row[: len(positives) + len(negatives)] = torch.cat([positives, negatives])
        num_pos = torch.tensor([len(positives) for positives, _ in picks])
        num_neg = torch.tensor([len(negatives) for _, negatives in picks])
        return LabelSample(index, num_pos, num_neg)


class SimulatedTime:
    """Stands in for the module ``time`` of the steps' clock: moves by what it is told."""

    TICK = 1e-4  # at each look, so that nothing takes no time

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += self.TICK
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def _outline(box: Tensor) -> Any:
    x0, y0, x1, y1 = box.tolist()
    return torch.tensor([x0, y0, x1, y0, x1, y1, x0, y1], dtype=torch.float64).numpy()

"""Trainings of Detectron2's trainer, as it is and with deferred losses."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from detectron2.engine import SimpleTrainer
from detectron2.engine.hooks import CallbackHook, PeriodicWriter
from detectron2.utils import comm
from detectron2.utils.events import EventStorage, JSONWriter, get_event_storage
from torch import nn

from d2_static_sampler.engine.deferred_losses import DeferredLosses
from d2_static_sampler.modeling.deferred import deferred_metrics
from tests.modeling.deferred_helpers import written


class Model(nn.Module):
    """Two losses and a figure; at ``fails_at`` it does what ``failure`` says."""

    def __init__(self, is_ours: bool, fails_at: int = -1, failure: str = "nan") -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.is_ours, self.fails_at, self.failure = is_ours, fails_at, failure

    def forward(self, data: torch.Tensor) -> dict[str, torch.Tensor] | torch.Tensor:
        a, b = self.layer(data).square().mean(0)
        fails = get_event_storage().iter == self.fails_at
        put = deferred_metrics().put if self.is_ours else get_event_storage().put_scalar
        with get_event_storage().name_scope("roi"):
            put("accuracy", (a / b).detach())
        if fails and self.failure == "raise":
            raise ValueError("broken image")
        if self.failure == "check":
            if self.is_ours:
                deferred_metrics().check(a.new_tensor(not fails), AssertionError, "bad boxes")
            elif fails:
                raise AssertionError("bad boxes")
        if self.failure == "one loss":
            return a
        return {"loss_b": b * float("nan") if fails and self.failure == "nan" else b, "loss_a": a}


class DeferHook(CallbackHook):
    """What SamplerHook does with deferred losses."""

    def __init__(self, periods: tuple[int, ...]) -> None:
        super().__init__()
        self.periods = periods
        self.flushed_at: list[tuple[int, int]] = []

    def before_train(self) -> None:
        self.losses = DeferredLosses(self.trainer, *self.periods)
        assert self.losses.install()

    def after_step(self) -> None:
        self.most_pending = len(deferred_metrics().pending)
        if not self.most_pending:
            self.flushed_at.append(self.trainer.iter)

    def after_train(self) -> None:
        self.losses.remove()


def make_trainer(model: Model, **options) -> SimpleTrainer:
    """Detectron2's trainer; equal for equal ranks."""
    generator = torch.Generator().manual_seed(comm.get_rank())
    data = [torch.rand(4, 3, generator=generator) for _ in range(50)]
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    return SimpleTrainer(model, data, optimizer, **options)


def train(
    model: Model, periods=(5,), start=0, stop=23, json_file=None, **options
) -> tuple[SimpleTrainer, DeferHook | None]:
    trainer = make_trainer(model, **options)
    hook = DeferHook(periods) if model.is_ours else None
    writer = json_file and PeriodicWriter([JSONWriter(str(json_file))], period=10)
    trainer.register_hooks([hook, writer])
    trainer.train(start, stop)
    return trainer, hook


def figures(storage: EventStorage) -> dict[str, list]:
    """All histories; of times, which no two runs share, the iterations alone."""
    return {
        name: [(None if "time" in name else value, at) for value, at in history]
        for name, history in written(storage).items()
    }


def lines_of(path: Path) -> list[dict]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.endswith("time")} for line in lines]


def state(trainer: SimpleTrainer) -> list[torch.Tensor]:
    return list(trainer.model.state_dict().values())

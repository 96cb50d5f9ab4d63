"""Mixed precision on devices that Detectron2's own trainer refuses."""

from __future__ import annotations

import torch
from detectron2.engine import AMPTrainer, SimpleTrainer

from ..modeling.stock import WRAPPED
from .step_timer import replaced


class CpuAMPTrainer(SimpleTrainer):
    """Detectron2's plain training step, with the forward under autocast to bfloat16 on a CPU.

    The weights, their gradients and the optimizer stay in float32. bfloat16 has the range of
    float32, so that the loss needs no scale, and a checkpoint is the plain trainer's.
    """

    def run_step(self) -> None:
        """One step; backward and optimizer are outside autocast, as torch asks."""
        forward = torch.autocast("cpu", torch.bfloat16)(self.model.forward)
        setattr(forward, WRAPPED, self.model.forward)
        with replaced(self.model, "forward", forward):
            super().run_step()


def amp_trainer(device: str) -> type[SimpleTrainer]:
    """Who trains in mixed precision on ``device``: on CUDA Detectron2's own trainer."""
    return AMPTrainer if device.startswith("cuda") else CpuAMPTrainer

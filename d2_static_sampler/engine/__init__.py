"""What a training run adds to Detectron2's: checks, step times, sampler state, CPU processes."""

from .amp import CpuAMPTrainer, amp_trainer
from .checks import check_complete, check_run
from .deferred_losses import DeferredLosses
from .hooks import SamplerHook
from .launch import launch
from .picture import draw_detections
from .step_log import StepLog, read_steps, summarize_steps
from .step_timer import StepTimer

__all__ = [
    "CpuAMPTrainer",
    "DeferredLosses",
    "SamplerHook",
    "StepLog",
    "StepTimer",
    "amp_trainer",
    "check_complete",
    "check_run",
    "draw_detections",
    "launch",
    "read_steps",
    "summarize_steps",
]

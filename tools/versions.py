"""What measured figures belong to: the machine, the libraries and the commit."""

from __future__ import annotations

import datetime
import subprocess
from pathlib import Path

import detectron2
import torch


def versions(device: str) -> dict[str, str]:
    """Date, device, torch, Detectron2 and commit."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    on_cuda = device.startswith("cuda")
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(device) if on_cuda else device,
        "torch": torch.__version__,
        "detectron2": detectron2.__version__,
        "commit": commit or "unknown",
    }

"""Prints what this package and its tests need, a requirement a line; PyTorch is left out."""

from __future__ import annotations

import re
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
NOT_OURS = {"torch", "torchvision", "mypy", "ruff", "pre-commit"}


def requirements(text: str) -> list[str]:
    """The requirements in the lists `dependencies` and `dev` (Python 3.10 has no TOML parser)."""
    lists = re.findall(r"^(?:dependencies|dev) = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    names = re.findall(r'"([^"]+)"', "\n".join(lists))
    return [name for name in names if re.split(r"[<>=!~\[ ]", name)[0] not in NOT_OURS]


if __name__ == "__main__":
    print("\n".join([*requirements(PROJECT.read_text()), "setuptools<81", "wheel"]))

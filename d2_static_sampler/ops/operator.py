"""How an operator is made of its body."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.library import CustomOpDef

# An import under another name has operators of its own.
NAMESPACE = __name__.split(".")[0]
# By the operators' full names: what a counter of operations runs in their place.
BODIES: dict[str, Callable[..., Any]] = {}
OPERATORS: dict[str, CustomOpDef] = {}


def operator(
    name: str, body: Callable[..., Any], schema: str, *, waits: bool = False
) -> CustomOpDef:
    """An operator that runs its body wherever no kernel is registered.

    Args:
        name: of the operator, without its namespace.
        body: in torch; of fixed shapes, without side effects; no two results share memory.
        schema: types of the arguments and results, as torch writes them.
        waits: whether the body waits for the device. A counter shows such an operator itself.
    """
    qualified = f"{NAMESPACE}::{name}"
    if qualified not in OPERATORS:  # a module that is reloaded must not take it from the others
        OPERATORS[qualified] = torch.library.custom_op(
            qualified, body, mutates_args=(), schema=schema
        )
        if not waits:
            BODIES[qualified] = body
    return OPERATORS[qualified]

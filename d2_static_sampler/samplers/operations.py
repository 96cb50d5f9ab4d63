"""Custom operations of torch, each of which is defined once in a process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "d2_static_sampler"


def operation(name: str, body: Callable[..., Any] | None = None, **options: Any) -> Any:
    """``torch.library.custom_op`` without side effects, which another import leaves as it is.

    torch would replace the operation, and break what the first import has in its hands: a module
    that is reloaded, or imported under another path, takes the operation that is there.

    Args:
        name: without a namespace.
        body: what it does; without one, this is a decorator of it.
        options: as for ``custom_op``.
    """
    if hasattr(getattr(torch.ops, NAMESPACE), name):
        existing = _Existing(getattr(getattr(torch.ops, NAMESPACE), name))
        return existing if body else lambda _: existing
    return torch.library.custom_op(f"{NAMESPACE}::{name}", body, mutates_args=(), **options)


class _Existing:
    """An operation whose parts are registered already."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def register_fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    def register_kernel(self, *_: Any) -> None:
        pass

    def register_vmap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    def register_autograd(self, *_: Any, **__: Any) -> None:
        pass

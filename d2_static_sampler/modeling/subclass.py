"""Swapping a module's class for a subclass that samples, and back.

Attributes on the instance would be lost by pickling and copying, or would tie a copy to the
original; a class of its own stays with the module, and leaves every other model alone.

A module may have one class in training and another in evaluation, where TorchScript must be able
to read every method that inference runs.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import nn

# Behind every mixin stands a module's own class.
Module: Any = object


class SampledHead(Module):
    """Base of every mixin."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Stops here: what the head's owner does for each subclass of theirs (register it, ask
        # for arguments) is not meant for ours.
        pass

    def train(self, mode: bool = True) -> Any:
        """As ``nn.Module.train``; the module's class follows the mode."""
        super().train(mode)
        _follow_mode(self)
        return self


def enter_subclass(module: nn.Module, mixin: type, in_training: type | None = None) -> None:
    """Put ``mixin`` in front of the module's own class; in training ``in_training`` instead."""
    # Not through nn.Module's __setattr__, which is for children and parameters.
    module.__dict__["_mixins"] = mixin, in_training or mixin
    _follow_mode(module)


def leave_subclass(module: nn.Module) -> None:
    """Give the module its own class back."""
    module.__class__ = own_class(module)
    del module.__dict__["_mixins"]


def has_subclass(module: nn.Module) -> bool:
    """Whether the module is between :func:`enter_subclass` and :func:`leave_subclass`."""
    return "_mixins" in vars(module)


def _follow_mode(module: nn.Module) -> None:
    if has_subclass(module):
        own: Any = own_class(module)
        module.__class__ = _subclass(own, vars(module)["_mixins"][module.training])


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class that the module had before :func:`enter_subclass`."""
    return getattr(type(module), "_own_class", type(module))


@functools.cache
def _subclass(base: Any, mixin: type) -> Any:
    namespace = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        # TorchScript reads the annotations of the class itself, not those of its bases.
        "__annotations__": _annotations(base),
        "__reduce_ex__": _reduce_ex,
        "_own_class": base,
        "_mixin": mixin,
    }
    return type(base)(base.__name__, (mixin, base), namespace)


def _annotations(base: type) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for cls in reversed(base.__mro__):
        merged.update(inspect.get_annotations(cls))
    return merged


def _reduce_ex(self: Any, protocol: int) -> tuple[Any, ...]:
    # pickle finds classes by name, and under this name it finds the module's own class.
    _, _, *state = self._own_class.__reduce_ex__(self, protocol)
    return (_rebuild, (self._own_class, self._mixin), *state)


def _rebuild(base: Any, mixin: type) -> Any:
    cls = _subclass(base, mixin)
    return cls.__new__(cls)

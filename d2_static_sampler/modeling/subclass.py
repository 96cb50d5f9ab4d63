"""Swapping a module's class for a subclass that samples, and back.

Attributes on the instance would be lost by pickling and copying, or would tie a copy to the
original; a class of its own stays with the module, and leaves every other model alone.

A module may have one class in training and another in evaluation, where TorchScript must be able
to read every method that inference runs. Others swap classes too, before us or after us, as
``fully_shard`` of torch does: theirs stays, and only our own is exchanged within it.
"""

from __future__ import annotations

import functools
import inspect
import types
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

    @classmethod
    def namespace_for(cls, base: type) -> dict[str, Any]:
        """What a subclass of ``base`` has besides, where a mixin depends on the class behind it."""
        return {}

    def train(self, mode: bool = True) -> Any:
        """As ``nn.Module.train``; the module's class follows the mode."""
        super().train(mode)
        _follow_mode(self)
        return self


def enter_subclass(
    module: nn.Module, mixin: type[SampledHead], in_training: type[SampledHead] | None = None
) -> None:
    """Put ``mixin`` in front of the module's own class; in training ``in_training`` instead."""
    # Not through nn.Module's __setattr__, which is for children and parameters.
    module.__dict__["_mixins"] = mixin, in_training or mixin
    _follow_mode(module)


def leave_subclass(module: nn.Module) -> None:
    """Give the module its own class back, with what others have put in front of it since."""
    module.__class__ = own_class(module)
    del module.__dict__["_mixins"]


def has_subclass(module: nn.Module) -> bool:
    """Whether the module is between :func:`enter_subclass` and :func:`leave_subclass`."""
    return "_mixins" in vars(module)


def own_class(thing: Any) -> Any:
    """The class that an object would have without :func:`enter_subclass`."""
    cls: Any = type(thing)
    ours = _our_class(cls)
    return cls if ours is None else _exchange(cls, ours, ours._own_class)


def plain_class(thing: Any) -> type:
    """The class of an object without ours, and without those that torch's FSDP swaps in."""
    cls: Any = own_class(thing)
    plain: type = _plain_class(cls)
    return plain


@functools.cache
def _plain_class(cls: Any) -> Any:
    return next(c for c in cls.__mro__ if not c.__module__.startswith("torch.distributed."))


def _follow_mode(module: nn.Module) -> None:
    if not has_subclass(module):
        return
    cls: Any = type(module)
    mixin = vars(module)["_mixins"][module.training]
    ours = _our_class(cls)
    if ours is None:
        module.__class__ = _subclass(cls, mixin)
    else:
        module.__class__ = _exchange(cls, ours, _subclass(ours._own_class, mixin))


@functools.cache
def _our_class(cls: Any) -> Any:
    """The class of ours that ``cls`` is, or is made from; None where there is none."""
    return next((each for each in cls.__mro__ if "_own_class" in vars(each)), None)


@functools.cache
def _exchange(cls: Any, old: Any, new: Any) -> Any:
    """``cls`` with ``new`` in the place of ``old`` among what it is made from."""
    if cls is old:
        return new
    if old not in cls.__mro__:
        return cls
    left_out = ("__dict__", "__weakref__")
    namespace = {key: value for key, value in vars(cls).items() if key not in left_out}
    bases = tuple(_exchange(base, old, new) for base in cls.__bases__)
    exchanged = type(cls)(cls.__name__, bases, namespace)
    for key, value in namespace.items():
        if isinstance(value, types.FunctionType):
            setattr(exchanged, key, _with_class(value, cls, exchanged))
    return exchanged


def _with_class(function: types.FunctionType, cls: type, exchanged: type) -> types.FunctionType:
    """A method of ``cls`` as one of ``exchanged``: ``super()`` without arguments asks for it."""
    closure = function.__closure__ or ()
    cells = tuple(types.CellType(exchanged) if _holds(cell, cls) else cell for cell in closure)
    if cells == closure:
        return function
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copy, function)
    return copy


def _holds(cell: types.CellType, cls: type) -> bool:
    try:
        return cell.cell_contents is cls
    except ValueError:  # an empty cell
        return False


@functools.cache
def _subclass(base: Any, mixin: type[SampledHead]) -> Any:
    namespace = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        # TorchScript reads the annotations of the class itself, not those of its bases.
        "__annotations__": _annotations(base),
        "__reduce_ex__": _reduce_ex,
        "_own_class": base,
        "_mixin": mixin,
        **mixin.namespace_for(base),
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


def _rebuild(base: Any, mixin: type[SampledHead]) -> Any:
    pair: Any = base, mixin
    cls = _subclass(*pair)
    return cls.__new__(cls)

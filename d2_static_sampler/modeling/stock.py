"""Whether what the static step replaces is still what Detectron2 defined.

Functions and methods are kept as they are when this package is imported. What has been patched,
in a class, an instance or a module, before the import or at any time after, is another object.
"""

from __future__ import annotations

import itertools
import operator
import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import detectron2
import fvcore
import torch
import torchvision
from torch import nn
from torch.nn.modules import module as nn_module

from .subclass import plain_class

_PACKAGES = (detectron2, fvcore, torch, torchvision)
_FOLDERS = tuple(os.path.join(path, "") for package in _PACKAGES for path in package.__path__)
# Where a wrapper of this package, such as a timer's while a step runs, holds what it calls.
WRAPPED = "_wrapped_by_d2_static_sampler"
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Methods:
    """Methods of a class of Detectron2's, as it defined them.

    Args:
        kind: the class.
        names: of the methods; one that this Detectron2 does not have is passed over.
    """

    def __init__(self, kind: type, *names: str) -> None:
        self.kind = kind
        self._methods: dict[str, Any] = {
            name: method if is_stock(method) and method.__name__ == name else None
            for name in names
            if (method := getattr(kind, name, None)) is not None
        }

    def faults(self, thing: Any, *, subclass: bool = False) -> Iterator[str]:
        """Why ``thing`` does not do what Detectron2 defined; nothing where it does.

        Args:
            thing: an object that should be one of ``kind``, a module or not.
            subclass: whether a subclass will do that leaves the methods as they are.
        """
        cls = plain_class(thing)
        if cls is not self.kind and not (subclass and issubclass(cls, self.kind)):
            yield f"is a {cls.__name__}"
            return
        own = vars(thing)
        if self._are_as_defined(cls) and self._methods.keys().isdisjoint(own):
            return  # the usual case in every training step
        for name, method in self._methods.items():
            is_own = name in own and not _is_same(own[name], method)
            if is_own or not _is_same(getattr(cls, name), method):
                yield f"has a {name} of its own"

    def differs(self, thing: Any, name: str) -> bool:
        """Whether one method of ``thing`` is not the one that Detectron2 defined."""
        found = vars(thing).get(name, self._methods[name])
        found_in_class = getattr(plain_class(thing), name)
        return not all(_is_same(each, self._methods[name]) for each in (found, found_in_class))

    def faults_of_class(self) -> Iterator[str]:
        """Which methods of the class itself have been replaced."""
        if self._are_as_defined(self.kind):
            return
        for name, method in self._methods.items():
            if not _is_same(getattr(self.kind, name), method):
                yield f"{self.kind.__name__}.{name} has been replaced"

    def _are_as_defined(self, cls: type) -> bool:
        found = map(getattr, itertools.repeat(cls), self._methods)
        return all(map(operator.is_, found, self._methods.values()))


class Functions:
    """Functions as a module of Detectron2's finds them by name.

    Args:
        module: that looks them up.
        names: of the functions; one that this Detectron2 does not have is passed over.
    """

    def __init__(self, module: ModuleType, *names: str) -> None:
        self._namespace, self._module = vars(module), module.__name__
        self._functions: dict[str, Any] = {
            name: function if is_stock(function) else None
            for name in names
            if (function := self._namespace.get(name)) is not None
        }

    def faults(self) -> Iterator[str]:
        """Which of them have been replaced."""
        found = map(self._namespace.get, self._functions)
        if all(map(operator.is_, found, self._functions.values())):
            return
        for name, function in self._functions.items():
            if not _is_same(self._namespace.get(name), function):
                yield f"{self._module}.{name} has been replaced"


def faults_of_process() -> Iterator[str]:
    """What concerns every module: hooks that torch calls for all of them."""
    # The one name that tells it for all kinds of global hooks. It is private; without it a hook
    # would be shown padding, or nothing.
    if nn_module._has_any_global_hook():
        yield "there is a global hook of modules"


def has_hooks(module: nn.Module, *, but_fsdp: bool = False) -> bool:
    """Whether anyone sees what goes into the module or comes out of it, in either direction.

    Args:
        module: any.
        but_fsdp: whether torch's own hooks, which gather sharded parameters, do not count.
    """
    hooks = [each for each in map(vars(module).get, _HOOKS) if each]
    if but_fsdp and hooks:
        return not all(_is_of_torch(hook) for each in hooks for hook in each.values())
    return bool(hooks)


def _is_of_torch(hook: Any) -> bool:
    function = getattr(hook, "func", hook)  # of a functools.partial
    return str(getattr(function, "__module__", "")).startswith("torch.distributed.")


def _is_same(found: Any, expected: Callable[..., Any] | None) -> bool:
    if found is expected:
        return True
    if expected is None or not hasattr(found, WRAPPED):
        return False
    while hasattr(found, WRAPPED):
        found = getattr(found, WRAPPED)
    return getattr(found, "__func__", found) is expected  # of an instance: a bound method


def is_stock(function: Any) -> bool:
    """Whether all that the function is made of lies in a package of Detectron2's or torch's."""
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None and not code.co_filename.startswith(_FOLDERS):
            return False
        function = getattr(function, "__wrapped__", None)
    return True

"""Whether what the static step replaces is still what Detectron2 defined.

Functions and methods are kept as they are when this package is imported. What has been patched,
in a class, an instance or a module, before the import or at any time after, is another object.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import operator
import os
import sys
import types
from collections.abc import Callable, Iterator
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
_FILES = (*_FOLDERS, contextlib.__file__)  # a decorator of Detectron2's own is from there
# Where a wrapper of this package, such as a timer's while a step runs, holds what it calls.
WRAPPED = "_wrapped_by_d2_static_sampler"
_ASKED_OF = ("detectron2.", "fvcore.", "torch.nn.functional", "torchvision.")
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
            is_own = name in own and not is_same(own[name], method)
            if is_own or not is_same(getattr(cls, name), method):
                yield f"has a {name} of its own"

    def differs(self, thing: Any, name: str) -> bool:
        """Whether one method of ``thing`` is not the one that Detectron2 defined."""
        found = vars(thing).get(name, self._methods[name])
        found_in_class = getattr(plain_class(thing), name)
        return not all(is_same(each, self._methods[name]) for each in (found, found_in_class))

    def faults_of_class(self) -> Iterator[str]:
        """Which methods of the class itself have been replaced."""
        if self._are_as_defined(self.kind):
            return
        for name, method in self._methods.items():
            if not is_same(getattr(self.kind, name), method):
                yield f"{self.kind.__name__}.{name} has been replaced"

    def as_defined(self) -> list[Any]:
        """The functions themselves, below their decorators; not those that had been replaced."""
        return [inspect.unwrap(method) for method in self._methods.values() if method is not None]

    def _are_as_defined(self, cls: type) -> bool:
        found = map(getattr, itertools.repeat(cls), self._methods)
        return all(map(operator.is_, found, self._methods.values()))


class Functions:
    """All that methods of Detectron2's find by a global name, and what they call finds in turn.

    These are functions, classes and modules as they are when this package is imported, and the
    functions that are asked of such a module; what other packages' functions call is not followed.

    Args:
        methods: of classes of Detectron2's.
        but: a name that may stand for something else.
    """

    def __init__(self, *methods: Methods, but: str = "subsample_labels") -> None:
        self._namespaces: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._values: list[Any] = []
        functions = [function for each in methods for function in each.as_defined()]
        for function in functions:
            names = set(global_names(function.__code__)) - {but}
            found = self._keep(function.__globals__, names)
            modules = [value for value in found if isinstance(value, types.ModuleType)]
            for module in modules:
                if module.__name__.startswith(_ASKED_OF):
                    found += self._keep(vars(module), names)
            called = [inspect.unwrap(value) for value in found if _is_followed(value)]
            functions += [each for each in called if each not in functions]

    def _keep(self, namespace: dict[str, Any], names: set[str]) -> list[Any]:
        """Remember what stands in a namespace by these names; what that is."""
        found = sorted(name for name in namespace.keys() & names if _is_kept(namespace[name]))
        values = [namespace[name] for name in found]
        self._namespaces += [namespace] * len(found)
        self._names += found
        self._values += [value if is_stock(value) else None for value in values]
        return values

    def faults(self) -> Iterator[str]:
        """Which of them have been replaced."""
        found = map(dict.get, self._namespaces, self._names)
        if all(map(operator.is_, found, self._values)):
            return  # the usual case in every training step
        for names, name, value in zip(self._namespaces, self._names, self._values, strict=True):
            if not is_same(names.get(name), value):
                yield f"{names['__name__']}.{name} has been replaced"


def global_names(code: types.CodeType) -> Iterator[str]:
    """The names by which a function, and the functions within, look up what is global."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from global_names(constant)


def _is_kept(value: Any) -> bool:
    if isinstance(value, types.FunctionType):
        return value.__module__.split(".")[0] not in sys.stdlib_module_names
    return isinstance(value, types.ModuleType | type)


def _is_followed(value: Any) -> bool:
    if not isinstance(value, types.FunctionType) or not is_stock(value):
        return False
    return value.__module__.startswith(("detectron2.", "fvcore."))


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


def is_same(found: Any, expected: Callable[..., Any] | None) -> bool:
    """Whether it is what was expected, or a wrapper of this package around that."""
    if found is expected:
        return True
    if expected is None or not hasattr(found, WRAPPED):
        return False
    while hasattr(found, WRAPPED):
        found = getattr(found, WRAPPED)
    function = getattr(found, "__func__", found)  # of an instance: a bound method
    # Ours, where it has one in the place of Detectron2's.
    return function is expected or getattr(function, "__module__", "").startswith(f"{__package__}.")


def is_stock(function: Any) -> bool:
    """Whether all that the function is made of lies in a package of Detectron2's or torch's."""
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None and not code.co_filename.startswith(_FILES):
            return False
        function = getattr(function, "__wrapped__", None)
    return True

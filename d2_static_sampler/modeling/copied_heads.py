"""Heads that copy Detectron2's instead of subclassing them, and call its ``subsample_labels``.

A method of such a head finds that function by a name of its own module. The head's subclass runs
the method with that one name bound to the head's sampler, image by image; the user's class and
module stay as they are.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from detectron2.modeling import sampling
from torch import Tensor, nn

from .head_sampler import HeadSampler
from .stock import global_names
from .subclass import SampledHead, own_class

SUBSAMPLE_LABELS = sampling.subsample_labels  # kept: somebody may replace it later
_SAMPLING = (
    *("_subsample_labels", "label_and_sample_anchors"),
    *("_sample_proposals", "label_and_sample_proposals"),
)


class CopiedHead(SampledHead):
    """Runs the methods of its head that sample with the head's sampler."""

    _label_sampler: HeadSampler

    @classmethod
    def namespace_for(cls, base: type) -> dict[str, Any]:
        """The methods that a subclass of ``base`` has besides."""
        return {name: _served(method) for name, method in sampling_methods(base).items()}


def is_copied_head(module: nn.Module) -> bool:
    """Whether a method of the module calls Detectron2's function."""
    cls = own_class(module)
    # Layers are the most of a model, and none of them samples.
    return not cls.__module__.startswith("torch.nn.") and bool(sampling_methods(cls))


def samples_by_itself(module: nn.Module) -> bool:
    """Whether the module has a method that is named as those that sample in Detectron2."""
    return any(hasattr(module, name) for name in _SAMPLING)


def sampling_methods(cls: Any) -> dict[str, Callable[..., Any]]:
    """The methods of ``cls`` that call Detectron2's ``subsample_labels`` by a global name."""
    return {
        name: method
        for name in dir(cls)
        if isinstance(method := getattr(cls, name, None), types.FunctionType)
        and any(_names_of_function(method))
    }


def _names_of_function(method: types.FunctionType) -> Iterator[str]:
    """The global names by which a method finds Detectron2's function."""
    for name in _global_names(method.__code__):
        if method.__globals__.get(name) is SUBSAMPLE_LABELS:
            yield name


@functools.cache
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    return tuple(global_names(code))


def _served(method: Callable[..., Any]) -> Callable[..., Any]:
    function: Any = method

    @functools.wraps(method)
    def served(self: Any, *args: Any, **kwargs: Any) -> Any:
        sample = functools.partial(_subsample_labels, vars(self)["_label_sampler"])
        # Anew in each call: somebody may have replaced what else the method's module holds.
        names = function.__globals__ | dict.fromkeys(_names_of_function(function), sample)
        bound = types.FunctionType(
            function.__code__, names, method.__name__, function.__defaults__, function.__closure__
        )
        bound.__kwdefaults__ = function.__kwdefaults__
        return bound(self, *args, **kwargs)

    return torch.jit.unused(served)


def _subsample_labels(
    sampler: HeadSampler,
    labels: Tensor,
    num_samples: int,
    positive_fraction: float,
    bg_label: int,
) -> tuple[Tensor, Tensor]:
    """Detectron2's function of this name, by a head's sampler; the host waits for the counts."""
    sample = sampler(
        labels, num_samples=num_samples, positive_fraction=positive_fraction, bg_label=bg_label
    )
    num_pos, num_neg = torch.stack([sample.num_pos, sample.num_neg]).tolist()
    return sample.index[:num_pos], sample.index[num_pos : num_pos + num_neg]

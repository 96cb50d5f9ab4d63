"""Samplers by name, as ``MODEL.SAMPLER.IMPL`` chooses them."""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import torch
from fvcore.common.registry import Registry
from torch import Tensor

from .sample import LabelSample

LABEL_SAMPLER_REGISTRY = Registry("LABEL_SAMPLER")
LABEL_SAMPLER_REGISTRY.__doc__ = """
Label samplers by name. A registered class or function is called with the keyword options of
:func:`build_label_sampler` and returns a :class:`LabelSampler`.
"""


class LabelSampler(Protocol):
    """Draws positives and negatives from label rows; what a head of a model calls once a step."""

    def __call__(
        self,
        labels: Tensor,
        *,
        num_samples: int,
        positive_fraction: float,
        bg_label: int,
        generator: torch.Generator | None = None,
        words: Tensor | None = None,
    ) -> LabelSample:
        """Sample each row of ``labels``.

        A candidate is negative where its label equals ``bg_label``, ignored where it is -1 and
        positive otherwise. A row gets ``min(positives, int(num_samples * positive_fraction))``
        positives and ``min(negatives, num_samples - num_pos)`` negatives, without replacement,
        every ordered sample equally likely.

        Args:
            labels: (N,) or (B, N) integer or bool, never changed.
            num_samples: K, the slots a row.
            positive_fraction: in [0, 1], the most positives as a share of K.
            bg_label: the label of a negative; a value that the label type cannot hold means
                that there are no negatives.
            generator: draws the words; None is the device's global generator.
            words: (2, B, K) int64 on [0, 2**62), or (2, K) for (N,) labels: the random input
                itself, row 0 for the positives and row 1 for the negatives. A sampler with a
                method ``words_shape(labels, num_samples)`` may want another shape.

        Raises:
            TypeError: labels that are not integers.
            ValueError: any other argument out of its range.
        """
        ...


def build_label_sampler(cfg_or_name: Any, **options: Any) -> LabelSampler:
    """Build the sampler that a config's ``MODEL.SAMPLER.IMPL``, or a name, asks for.

    Args:
        cfg_or_name: a config with a ``MODEL.SAMPLER`` node, or a registered name.
        options: passed on to the registered class. The built-in "static" and "compiled" take
            ``select``, which a config's ``MODEL.SAMPLER.SELECT`` sets for them and for any other
            sampler that takes it.

    Raises:
        TypeError: neither a config nor a name; an option that the registered class does not have.
        ValueError: a name that is not registered, or an unknown ``select``.
    """
    name = cfg_or_name if isinstance(cfg_or_name, str) else _name_in(cfg_or_name)
    names = sorted(key for key, _ in LABEL_SAMPLER_REGISTRY)
    if name not in names:
        raise ValueError(f"MODEL.SAMPLER.IMPL is {name!r}; choose one of: {', '.join(names)}")
    factory = LABEL_SAMPLER_REGISTRY.get(name)
    if cfg_or_name is not name and "select" in inspect.signature(factory).parameters:
        options.setdefault("select", cfg_or_name.MODEL.SAMPLER.SELECT)
    return factory(**options)


def _name_in(cfg: Any) -> Any:
    try:
        return cfg.MODEL.SAMPLER.IMPL
    except AttributeError:
        raise TypeError(
            "expected a sampler's name, or a config with MODEL.SAMPLER, "
            f"not an object of type {type(cfg).__name__}"
        ) from None

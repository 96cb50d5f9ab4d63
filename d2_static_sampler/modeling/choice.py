"""What ``install_sampler`` is asked for, checked before it changes anything."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from detectron2.config import CfgNode
from detectron2.modeling.proposal_generator.rpn import RPN
from detectron2.modeling.roi_heads.roi_heads import ROIHeads
from torch import nn

from ..config import (
    check_sampler_config,
    check_step_has_sampler,
    integer_choices,
    is_integer,
    sampler_names,
    shown,
)
from ..samplers import LABEL_SAMPLER_REGISTRY, LabelSampler, build_label_sampler


class Choice(NamedTuple):
    """A sampler, None for Detectron2's own, with its name in logs, and how it is to be used."""

    impl: str
    sampler: LabelSampler | None
    static_step: bool
    seed: int


def resolve_choice(choice: Any, static_step: bool | None, seed: int | None) -> Choice:
    """What the arguments of ``install_sampler`` behind the model ask for.

    Raises:
        TypeError: ``choice`` is no config, name or sampler.
        ValueError: any other value that cannot be used, in the config or in an argument.
    """
    name = choice
    if isinstance(choice, CfgNode):
        check_sampler_config(choice)
        node = choice.MODEL.SAMPLER
        name = node.IMPL
        seed = node.SEED if seed is None else seed
        static_step = node.STATIC_STEP if static_step is None else static_step
    seed = -1 if seed is None else seed
    static_step = False if static_step is None else static_step
    if not is_integer(seed, -1):
        raise ValueError(f"seed is {shown(seed)}; {integer_choices(-1)}")
    if not isinstance(static_step, bool):
        raise ValueError(f"static_step is {shown(static_step)}; choose one of: True, False")
    if not isinstance(name, str):
        _check_sampler(choice)
        impl = getattr(choice, "__name__", type(choice).__name__)
        return Choice(impl, choice, static_step, int(seed))
    # Before the step is asked for: an unknown name is unknown whatever goes with it.
    sampler = None if name == "naive" else build_label_sampler(choice)
    check_step_has_sampler(static_step, name)
    return Choice(name, sampler, static_step, int(seed))


def check_model(model: Any) -> None:
    """Raise TypeError where ``model`` is no module."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"expected a model (torch.nn.Module) as the first argument, not {shown(model)}"
        )


def _check_sampler(choice: Any) -> None:
    """Raise TypeError for an object that no head of a model could call."""
    expected = f"a config, one of {', '.join(sampler_names())}, or a sampler"
    factories = [factory for _, factory in LABEL_SAMPLER_REGISTRY]
    if inspect.isclass(choice) or any(choice is factory for factory in factories):
        name = choice.__name__
        raise TypeError(f"{name} makes samplers and is none: pass {name}(), or its registered name")
    if not callable(choice):
        raise TypeError(f"expected {expected}, not {shown(choice)}")
    if isinstance(choice, nn.Module) and any(
        isinstance(module, RPN | ROIHeads) for module in choice.modules()
    ):
        raise TypeError(f"expected {expected}, not a model ({type(choice).__name__})")
    asked = {"num_samples": 1, "positive_fraction": 0.5, "bg_label": 0, "words": None}
    try:
        inspect.signature(choice).bind(None, **asked)
    except TypeError as error:
        raise TypeError(
            f"the sampler {shown(choice)} cannot be called as sampler(labels, "
            f"{', '.join(f'{key}=...' for key in asked)}): {error}"
        ) from None
    except ValueError:  # a builtin that has no signature
        pass

"""The names by which the tools compare: an IMPL, with or without the static step."""

from __future__ import annotations

from d2_static_sampler import LABEL_SAMPLER_REGISTRY

STEP = "+step"
IMPLS = ("naive", "static", "compiled", "static+step")


def split_impl(name: str) -> tuple[str, bool]:
    """IMPL and STATIC_STEP: ("static", True) of "static+step"."""
    return name.removesuffix(STEP), name.endswith(STEP)


def check_impl(name: str) -> None:
    """ValueError for a name that cannot be installed, with the choices."""
    impl, has_step = split_impl(name)
    names = sorted(name for name, _ in LABEL_SAMPLER_REGISTRY)
    if impl not in names or (has_step and impl == "naive"):
        raise ValueError(
            f"--impl is {name!r}; choose from: {', '.join(names)}; "
            f"for the static step put {STEP} behind a name that is not naive"
        )

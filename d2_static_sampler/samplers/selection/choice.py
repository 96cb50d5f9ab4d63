"""Which form of selection a call takes: ``MODEL.SAMPLER.SELECT``."""

from __future__ import annotations

from .members import MemberBlocks, MemberTable
from .topk import MemberKeys

SELECTIONS = ("auto", "rank", "topk")

Form = type[MemberTable] | type[MemberBlocks] | type[MemberKeys]


def check_selection(select: str) -> str:
    """Return ``select``; ValueError where it is no selection."""
    if select not in SELECTIONS:
        raise ValueError(f"select is {select!r}; choose one of: {', '.join(SELECTIONS)}")
    return select


def choose_form(select: str, num_candidates: int, num_samples: int) -> Form:
    """The form of selection for rows of N candidates and K slots.

    "auto" is "rank": exact, the same for equal words on every device, many times as fast as top-k
    for an RPN's rows, and two graphs serve all sizes.

    A table costs about 26 bytes of writing a candidate, blocks cost 3 and the search of one block
    a slot: they break even at 8 to 16 candidates a slot. Measured in docs/benchmarks.
    """
    if select == "topk":
        return MemberKeys
    return MemberTable if num_candidates < 16 * num_samples else MemberBlocks

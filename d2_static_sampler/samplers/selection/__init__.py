"""How a row's sample is found: by rank, or by random keys and top-k."""

from .choice import SELECTIONS, Form, check_selection, choose_form
from .members import MemberBlocks, MemberTable
from .ranks import pick_ranks
from .topk import MemberKeys

__all__ = [
    "SELECTIONS",
    "Form",
    "MemberBlocks",
    "MemberKeys",
    "MemberTable",
    "check_selection",
    "choose_form",
    "pick_ranks",
]

"""How a row's sample is found: by rank, or by random keys and top-k."""

from .choice import SELECTIONS, Form, check_selection, choose_form
from .host import (
    HostForm,
    choose_host_form,
    is_on_host,
    pick_ranks_on_host,
    take_in_graph,
    take_on_host,
)
from .members import MemberBlocks, MemberTable
from .ranks import pick_ranks
from .topk import MemberKeys

__all__ = [
    "SELECTIONS",
    "Form",
    "HostForm",
    "MemberBlocks",
    "MemberKeys",
    "MemberTable",
    "check_selection",
    "choose_form",
    "choose_host_form",
    "is_on_host",
    "pick_ranks",
    "pick_ranks_on_host",
    "take_in_graph",
    "take_on_host",
]

"""The two halves of rank selection: which ranks to take, and which candidate has a rank."""

from .members import MemberBlocks, Members, MemberTable, choose_members
from .ranks import pick_ranks

__all__ = ["MemberBlocks", "MemberTable", "Members", "choose_members", "pick_ranks"]

"""The two halves of rank selection: which ranks to take, and which candidate has a rank."""

from .rank_select import Blocks, block_width, count_blocks, select_by_rank
from .ranks import pick_ranks

__all__ = ["Blocks", "block_width", "count_blocks", "pick_ranks", "select_by_rank"]

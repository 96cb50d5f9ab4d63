"""The step times of all processes of a run, brought together in process 0 now and then."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from .step_log import Row


class RowExchange:
    """Gathers the rows of all processes; every process makes one, at the same place.

    The group is gloo's, so that no device is involved, and its own: what others gather meanwhile,
    from a thread say, cannot get between.
    """

    def __init__(self) -> None:
        self._group: Any = dist.new_group(backend="gloo")

    def gather(self, rows: list[Row]) -> list[Row]:
        """Every process calls it with its rows; process 0's come back with "slowest" added.

        Returns:
            in process 0 its own rows; in the others none.

        Raises:
            RuntimeError: another process has ended.
        """
        is_main = dist.get_rank() == 0
        ranks: list[list[Row]] | None = [[]] * dist.get_world_size() if is_main else None
        dist.gather_object(rows, ranks, dst=0, group=self._group)
        return add_slowest(ranks) if ranks else []


def add_slowest(ranks: list[list[Row]]) -> list[Row]:
    """The rows of rank 0, each with the times of the slowest rank of its iteration.

    The ranks wait for each other within backward, where gradients are averaged. So the totals of
    all are alike, and the one that makes the others wait has the shortest backward of all. What
    tells it apart is the time until then: the slowest has the largest data_ms + forward_ms.
    """
    of_iteration: dict[int, list[Row]] = {}
    for rank, rows in enumerate(ranks):
        for row in rows:
            times = {key: value for key, value in row.items() if key.endswith("_ms")}
            of_rank = {"rank": rank, "warmup": row["warmup"], **times}
            of_iteration.setdefault(row["iteration"], []).append(of_rank)
    return [
        row | {"slowest": max(of_iteration[row["iteration"]], key=_until_backward)}
        for row in ranks[0]
    ]


def _until_backward(row: Row) -> float:
    return row["data_ms"] + row["forward_ms"]

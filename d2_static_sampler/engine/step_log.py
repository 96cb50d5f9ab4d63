"""The step log: a file of one JSON object a line, strictly rising in "iteration"."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import statistics
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tabulate import tabulate

logger = logging.getLogger(f"detectron2.{__name__}")
Row = dict[str, Any]


class StepLog:
    """Appends rows to a step log.

    Args:
        path: the file. Rows before ``start_iter`` stay, as in a resumed run; later ones, which
            this run will write again, are dropped. A run that starts at 0 beside the log of an
            earlier run keeps that as ``<name>.old``, ``.old1`` and so on.
        start_iter: the first iteration of this run.
    """

    def __init__(self, path: str | Path, start_iter: int) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self._keep_before(start_iter)
        self._file = self.path.open("a")

    def append(self, row: Row) -> None:
        """Write one row, and flush it."""
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _keep_before(self, start_iter: int) -> None:
        if start_iter == 0:
            names = (f"{self.path.name}.old{i or ''}" for i in itertools.count())
            paths = (self.path.with_name(name) for name in names)
            old = next(path for path in paths if not path.exists())
            self.path.replace(old)
            logger.info(f"Kept the step times of an earlier run as {old}")
            return
        rows = [row for row in read_steps(self.path) if row["iteration"] < start_iter]
        part = self.path.with_name(self.path.name + ".part")
        part.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.replace(part, self.path)


def read_steps(path: str | Path) -> list[Row]:
    """The rows of a step log. Damaged lines, as a killed run can leave one, are left out."""
    lines = Path(path).read_text(errors="replace").splitlines(keepends=True)
    rows = [row for row in map(_parse, lines) if row is not None]
    if lost := len(lines) - len(rows):
        logger.warning(f"{path}: left out {lost} of {len(lines)} lines, which are damaged")
    return rows


def _parse(line: str) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not line.endswith("\n") or not isinstance(row, dict):
        return None
    return row if isinstance(row.get("iteration"), int) else None


def summarize_steps(rows: Iterable[Row]) -> str:
    """A table of each time's median and 95th percentile, warm-up iterations left out.

    One pair of columns for each IMPL that the rows name; where rows have the times of the slowest
    process, a second pair for those, and below the table which process it was how often.
    """
    steps: dict[str, list[Row]] = {}
    ranks: Counter[int] = Counter()
    for row in rows:
        impl, slowest = row.get("impl", "?"), row.get("slowest", {})
        for name, times in ((impl, row), (f"{impl}, slowest", slowest)):
            if times.get("warmup") is False:
                steps.setdefault(name, []).append(times)
        ranks.update([slowest["rank"]] if slowest.get("warmup") is False else [])
    if not steps:
        return "No step times outside warm-up"
    keys = dict.fromkeys(key for of_impl in steps.values() for row in of_impl for key in row)
    names = [key for key in keys if key.endswith("_ms")]
    table = [[name, *_figures(steps.values(), name)] for name in names]
    header = ["ms"]
    for impl, of_impl in steps.items():
        header += [f"{impl}: median of {len(of_impl)}", "p95"]
    text = tabulate(table, headers=header, floatfmt=".2f", tablefmt="pipe")
    if ranks:
        times = (f"rank {rank} in {count}" for rank, count in ranks.most_common())
        text += f"\nSlowest of {ranks.total()} iterations: {', '.join(times)}"
    return text


def _figures(groups: Iterable[list[Row]], name: str) -> list[float]:
    figures = []
    for rows in groups:
        values = sorted(row[name] for row in rows if name in row) or [math.nan]
        figures += [statistics.median(values), values[int(0.95 * (len(values) - 1) + 0.5)]]
    return figures

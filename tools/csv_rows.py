"""A benchmark's CSV file: written, and read with errors that name the line and the column."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Row(dict[str, str]):
    """A line's cells by column; ValueError for a column that the file does not have.

    Attributes:
        path: the file.
        line: its number, from 1.
    """

    def __init__(self, cells: dict[str, str], path: Path, line: int) -> None:
        super().__init__(cells)
        self.path, self.line = path, line

    def __missing__(self, column: str) -> str:
        raise ValueError(f"{self.path}: no column {column!r}; it has: {', '.join(self)}")

    def figure(self, column: str) -> float:
        """A number, 0 or more; ValueError for any other cell."""
        cell = self[column]
        try:
            figure = float(cell)
        except ValueError:
            figure = math.nan
        if 0 <= figure < math.inf:
            return figure
        raise ValueError(
            f"{self.path}, line {self.line}: {column} is {cell!r}; it must be a number, 0 or more"
        )

    def count(self, column: str) -> int:
        """A whole number, 0 or more; ValueError for any other cell."""
        figure = self.figure(column)
        if figure.is_integer():
            return int(figure)
        raise ValueError(
            f"{self.path}, line {self.line}: {column} is {figure}; it must be a whole number"
        )


def check_can_write(path: Path | None) -> None:
    """OSError where a file of rows could not be written, before the work for them is done."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()


def write_rows(path: Path | None, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write all rows, whose columns are those of the first; nothing without a path or a row."""
    if path and rows:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


def read_rows(path: Path) -> list[Row]:
    """All rows, at least one, each with a cell for every column.

    Raises:
        ValueError: what is no such file, in words that name it.
        OSError: there is no file to read.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")  # a spreadsheet writes that mark
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a CSV file: {error}") from error
    if "\0" in text:
        raise ValueError(f"{path} is not a CSV file: it has a zero byte")
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        rows = [_row(cells, path, reader) for cells in reader]
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.reader.line_num}: {error}") from error
    if not rows:
        raise ValueError(f"{path}: no rows")
    return rows


def _row(cells: dict[str, str], path: Path, reader: csv.DictReader) -> Row:
    columns = len(reader.fieldnames or ())
    # The reader's own marks: cells beyond the columns under None, and None in those that lack.
    beyond = cells.get(None, ())
    found = columns + len(beyond) - sum(cell is None for cell in cells.values())
    if found != columns:
        raise ValueError(f"{path}, line {reader.line_num}: {found} cells for {columns} columns")
    return Row(cells, path, reader.line_num)

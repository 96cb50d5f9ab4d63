#!/usr/bin/env python
"""Fills the tables of a report from the CSV files of the benchmarks.

A table stands in a Markdown file between two comments, the first of which says what it shows:

    <!-- table csv=FILE rows=B,threads columns=implementation value=p50_ms where=work:RPN -->
    <!-- end -->

``rows`` are the columns of the CSV that tell the table's lines apart, ``columns`` the one whose
values become columns, ``value`` what a cell shows (several, joined by "/"; a line without any is
left out), ``where`` which lines of the CSV count (NAME:VALUE,...), ``of`` which columns to take, in
this order (separated by "|"). FILE is looked for beside the report.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from command_line import one_line
from csv_rows import Row, read_rows

MARK = re.compile(r"<!-- (table\b|end -->)")
OPENING = re.compile(r"<!-- table (.*?) -->\n", re.DOTALL)
OPTIONS = {"csv", "rows", "columns", "value", "where", "of"}
REQUIRED = {"csv", "rows", "columns", "value"}


def fill(text: str, folder: Path) -> str:
    """The text with all its tables made anew; ValueError with the line of what cannot be."""
    parts, done = [], 0
    for spec, begin, end in find_tables(text):
        try:
            made = table(spec, folder)
        except ValueError as error:
            raise ValueError(f"line {line_of(text, begin) - 1}: {error}") from error
        parts += [text[done:begin], made]
        done = end
    return "".join(parts) + text[done:]


def find_tables(text: str) -> Iterator[tuple[str, int, int]]:
    """What each table's comment says, and from where to where the table stands."""
    marks = list(MARK.finditer(text))
    for i, mark in enumerate(marks):
        line = line_of(text, mark.start())
        if mark[1] != "table":
            if i == 0 or marks[i - 1][1] != "table":
                raise ValueError(f"line {line}: <!-- end --> without a <!-- table before it")
            continue
        end = marks[i + 1] if i + 1 < len(marks) else None
        if end is None or end[1] == "table":
            where = f"the next table in line {line_of(text, end.start())}" if end else "the end"
            raise ValueError(f"line {line}: <!-- table without an <!-- end --> before {where}")
        opening = OPENING.match(text, mark.start(), end.start())
        if not opening:
            raise ValueError(f"line {line}: <!-- table without a --> at the end of a line")
        yield opening[1], opening.end(), end.start()


def line_of(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1


def table(spec: str, folder: Path) -> str:
    """The Markdown table that a comment asks for."""
    options = dict(part.partition("=")[::2] for part in shlex.split(spec))
    if not REQUIRED <= set(options) <= OPTIONS:
        raise ValueError(f"table {spec}: needs {sorted(REQUIRED)}, knows {sorted(OPTIONS)}")
    path = folder / options["csv"]
    rows = select(read_rows(path), options.get("where", ""), path)
    keys, column = options["rows"].split(","), options["columns"]
    names = list(dict.fromkeys(row[column] for row in rows))
    if "of" in options:
        wanted = options["of"].split("|")
        if lacking := [name for name in wanted if name not in names]:
            raise ValueError(f"{path}: no {column} {lacking[0]!r}; it has: {', '.join(names)}")
        names = wanted
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        line = cells.setdefault(tuple(row[key] for key in keys), {})
        values = [row[name] for name in options["value"].split("/")]
        if any(values):
            line[row[column]] = " / ".join(map(number, values))
    return format_table(keys, names, cells)


def format_table(
    keys: list[str], names: list[str], cells: dict[tuple[str, ...], dict[str, str]]
) -> str:
    lines = [
        "| " + " | ".join([*keys, *names]) + " |",
        "|" + "--:|" * (len(keys) + len(names)),
        *(
            "| " + " | ".join([*map(number, key), *(line.get(name, "") for name in names)]) + " |"
            for key, line in cells.items()
            if any(name in line for name in names)
        ),
    ]
    return "\n".join(lines) + "\n"


def select(rows: list[Row], where: str, path: Path) -> list[Row]:
    """The rows whose columns have the values of NAME:VALUE,..."""
    wanted = [part.partition(":") for part in where.split(",") if part]
    kept = [row for row in rows if all(row[name] == value for name, _, value in wanted)]
    if not kept:
        raise ValueError(f"{path}: no row where {where}")
    return kept


def number(value: str) -> str:
    """Three digits of a measured figure; integers, words and nothing as they are."""
    try:
        return f"{int(value):,}"
    except ValueError:
        pass
    try:
        figure = float(value)
    except ValueError:
        return value
    return f"{figure:#.3g}".rstrip(".") if abs(figure) < 1000 else f"{figure:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", nargs="+", type=Path, help="Markdown files")
    parser.add_argument("--check", action="store_true", help="change nothing; fail where it would")
    args = parser.parse_args()
    stale = []
    for path in args.report:
        try:
            text = path.read_text()
            filled = fill(text, path.parent)
            if filled != text and not args.check:
                path.write_text(filled)
        except (OSError, ValueError) as error:
            parser.error(f"{path}: {one_line(error)}")
        if filled != text:
            stale.append(str(path))
    print("changed:" if stale else "nothing to change", *stale)
    sys.exit(bool(args.check and stale))


if __name__ == "__main__":
    main()

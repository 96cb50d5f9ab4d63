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
import csv
import re
import shlex
import sys
from pathlib import Path

TABLE = re.compile(r"(<!-- table (.*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
OPTIONS = {"csv", "rows", "columns", "value", "where", "of"}
REQUIRED = {"csv", "rows", "columns", "value"}

Row = dict[str, str]


def fill(text: str, folder: Path) -> str:
    """The text with all its tables made anew."""
    return TABLE.sub(lambda found: found[1] + table(found[2], folder) + found[4], text)


def table(spec: str, folder: Path) -> str:
    """The Markdown table that a comment asks for."""
    options = dict(part.split("=", 1) for part in shlex.split(spec))
    if not REQUIRED <= set(options) <= OPTIONS:
        raise ValueError(f"table {spec}: needs {sorted(REQUIRED)}, knows {sorted(OPTIONS)}")
    rows = select(read(folder / options["csv"]), options.get("where", ""))
    keys, column = options["rows"].split(","), options["columns"]
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        line = cells.setdefault(tuple(row[key] for key in keys), {})
        values = [row[name] for name in options["value"].split("/")]
        if any(values):
            line[row[column]] = " / ".join(map(number, values))
    names = options["of"].split("|") if "of" in options else list(dict.fromkeys(
        row[column] for row in rows
    ))  # fmt: skip
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


def read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def select(rows: list[Row], where: str) -> list[Row]:
    """The rows whose columns have the values of NAME:VALUE,..."""
    wanted = [part.split(":", 1) for part in where.split(",") if part]
    kept = [row for row in rows if all(row[name] == value for name, value in wanted)]
    if not kept:
        raise ValueError(f"no row where {where}")
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
        except (OSError, ValueError, KeyError) as error:
            parser.error(f"{path}: {error}")
        if filled != text:
            stale.append(str(path))
    print("changed:" if stale else "nothing to change", *stale)
    sys.exit(bool(args.check and stale))


if __name__ == "__main__":
    main()

#!/usr/bin/env python
"""Draws the CSV files of the benchmarks: speed-up over size, waits over images, step time by phase.

What a file holds is told by its columns. Each figure is an SVG file, named after its CSV file.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib
from command_line import one_line
from csv_rows import Row, read_rows
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

SAMPLER_COLUMNS = {"work", "B", "N", "implementation", "speedup", "waits"}
TRAIN_COLUMNS = {"impl", "images", "forward_p50_ms", "total_p50_ms"}
BY_SIZE = ("study", "balanced")  # works that differ in N; the others differ in B
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "figure.constrained_layout.use": True,
    "svg.hashsalt": "d2_static_sampler",  # equal files from equal rows
}
COLOURS = ("#444444", "#0072b2", "#56b4e9", "#d55e00", "#e69f00", "#009e73", "#cc79a7", "#999999",
           "#7f3c8d", "#a5aa99", "#80ba5a", "#f2b701")  # fmt: skip


def draw(path: Path, output: Path) -> list[Path]:
    """Draw all figures of one CSV file; returns their paths."""
    rows = read_rows(path)
    columns = set(rows[0])
    if columns >= SAMPLER_COLUMNS:
        figures = {"speedup": draw_speedup(rows), "waits": draw_waits(rows)}
    elif columns >= TRAIN_COLUMNS:
        figures = {"phases": draw_phases(rows)}
    else:
        raise ValueError(f"{path}: not the columns of a benchmark: {', '.join(rows[0])}")
    written = []
    for name, figure in figures.items():
        if figure is not None:
            written.append(output / f"{path.stem}-{name}.svg")
            figure.savefig(written[-1], metadata={"Date": None})
    return written


def draw_speedup(rows: list[Row]) -> Figure:
    """A panel a work, batch or number of threads; a line an implementation."""
    panels = _split(rows, lambda row: (row["work"], row["threads"], _fixed(row)))
    panels = {key: part for key, part in panels.items() if len({_x(row) for row in part}) > 1}
    panels = panels or _split(rows, lambda row: (row["work"], row["threads"], ""))
    figure, axes = _panels(len(panels))
    colours = _colours(row["implementation"] for row in rows)
    for ax, ((work, threads, fixed), part) in zip(axes, panels.items(), strict=False):
        for name, line in _split(part, lambda row: row["implementation"]).items():
            points = sorted((_x(row), row.figure("speedup")) for row in line)
            ax.plot(*zip(*points, strict=True), marker="o", ms=3, color=colours[name], label=name)
        ax.set(xscale="log", yscale="log", ylabel="times as fast as the loop")
        ax.set_title(f"{work}, {fixed}{threads} thread{'s' * (threads != '1')}")
        ax.set_xlabel("candidates" if work in BY_SIZE else "images")
        _plain_ticks(ax, sorted({_x(row) for row in part}))
    _legend(figure, axes)
    return figure


def draw_waits(rows: list[Row]) -> Figure | None:
    """Operations that make a GPU wait, over the images."""
    counted = [row for row in rows if row["waits"] != "" and row["work"] not in BY_SIZE]
    works = _split(counted, lambda row: row["work"])
    if not works:
        return None
    figure, axes = _panels(len(works))
    colours = _colours(row["implementation"] for row in rows)
    for ax, (work, part) in zip(axes, works.items(), strict=False):
        for name, line in _split(part, lambda row: row["implementation"]).items():
            points = sorted({(row.count("B"), row.count("waits")) for row in line})
            ax.plot(*zip(*points, strict=True), marker="o", ms=3, color=colours[name], label=name)
        ax.set(title=work, xlabel="images", ylabel="operations that make a GPU wait")
    _legend(figure, axes)
    return figure


def draw_phases(rows: list[Row]) -> Figure:
    """The median step of each implementation, stacked by phase."""
    phases = [
        (name, f"{name}_p50_ms") for name in ("data", "forward", "backward", "optimizer", "other")
    ]
    groups = _split(rows, lambda row: row["images"])
    figure, axes = _panels(len(groups))
    for ax, (images, part) in zip(axes, groups.items(), strict=False):
        left = [0.0] * len(part)
        for (name, column), colour in zip(phases, COLOURS[1:], strict=False):
            width = [row.figure(column) if row[column] else 0.0 for row in part]
            ax.barh([row["impl"] for row in part], width, left=left, color=colour, label=name)
            left = [a + b for a, b in zip(left, width, strict=True)]
        ax.set(title=f"{images} images a step", xlabel="ms")
        ax.invert_yaxis()
    _legend(figure, axes)
    return figure


def _fixed(row: Row) -> str:
    return f"{row['B']} row{'s' * (row['B'] != '1')}, " if row["work"] in BY_SIZE else ""


def _x(row: Row) -> int:
    return row.count("N" if row["work"] in BY_SIZE else "B")


def _split(rows: Iterable[Row], key: Any) -> dict[Any, list[Row]]:
    parts: dict[Any, list[Row]] = {}
    for row in rows:
        parts.setdefault(key(row), []).append(row)
    return parts


def _colours(names: Iterable[str]) -> dict[str, str]:
    return dict(zip(dict.fromkeys(names), COLOURS * 2, strict=False))


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    columns = min(count, 2)
    lines = -(-count // columns)
    figure = Figure(figsize=(4.2 * columns + 0.4, 2.7 * lines + 0.6))
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for unused in axes[count:]:
        unused.remove()
    return figure, axes[:count]


def _plain_ticks(ax: Axes, x: list[int]) -> None:
    ax.set_xticks(x, [f"{value:,}" for value in x])
    ax.minorticks_off()
    ax.axhline(1, color="#444444", lw=0.8)
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _legend(figure: Figure, axes: list[Axes]) -> None:
    by_label = {
        label: handle
        for ax in axes
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        by_label.values(), by_label, loc="outside lower center", ncols=5, frameon=False, fontsize=8
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("csv", nargs="+", type=Path, help="files of the benchmarks")
    parser.add_argument("--output", type=Path, help="a folder (default: that of each CSV file)")
    args = parser.parse_args()
    with matplotlib.rc_context(STYLE):
        for path in args.csv:
            output = args.output or path.parent
            try:
                output.mkdir(parents=True, exist_ok=True)
                for written in draw(path, output):
                    print(written)
            except (OSError, ValueError) as error:
                parser.error(one_line(error))


if __name__ == "__main__":
    main()

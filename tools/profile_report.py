"""The figures of tools/profile_step.py as tables."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import detectron2
from tabulate import tabulate

import d2_static_sampler
from d2_static_sampler.profiling.step_phases import PHASES

Rows = list[dict[str, Any]]
TITLES = {
    "data_dependent": "Operations of a training forward that depend on data",
    "ops": "All operations of a training forward",
    "synchronizations": "Synchronizations with the device in the traced step",
    "copies": "Copies from the device to the host in the traced step",
    "lines": "Operations that depend on data, by line and number of images",
    "graphs": "Graphs that compiled IMPLs captured, at each number of images the new ones",
}
NOTES = """\
Weights are random, the RPN's box deltas zero; counted is the second forward. Copies between host
and device (tolist(), to()) wait on CUDA too, but are no operation on a CPU and not counted.
naive is Detectron2 itself. static on a CPU is counted as the torch operations that other devices
run; where nobody counts, and so in its trace, it selects in NumPy.
compiled is installed with compiles_cpu=True: by default it compiles nothing on a CPU.
A compiled function runs eagerly under a counter, so its sampling has no count: see its graphs.
+step is the static step. Its nms_topk is one operation to the counter, which does not depend on
data by itself; inside, the suppression of overlapping boxes waits for the device, for each image.
Its figures reach the event storage in one copy every 20 iterations, which is not in the step here.
compiled+step is counted as what it runs eagerly, its three graphs in match and loss; on a CPU its
sampling is one operation of a graph, in NumPy.
logging is what the event storage does. Where Detectron2 reads a figure to be logged (.item()) in
a loss or a labelling, that belongs to match or loss."""


def report(rows: Rows, about: dict[str, Any]) -> str:
    """Every table that the rows have figures for, as text."""
    tables = {
        "data_dependent": [
            by_phase(row, row["data_dependent"]) | {"nms_topk": row["nms_topk"]} for row in rows
        ],
        "lines": by_line(rows),
        "ops": [by_phase(row, row["ops"]) for row in rows],
        "graphs": [graphs(row) for row in rows if "graphs" in row],
    }
    for kind in ("synchronizations", "copies"):
        tables[kind] = [by_phase(row, row["waits"][kind]) for row in rows if "waits" in row]
    parts = [", ".join(f"{key} {value}" for key, value in about.items())]
    for kind, table in tables.items():
        if table:
            text = tabulate(table, headers="keys", tablefmt="github", missingval="-")
            parts.append(f"{TITLES[kind]}\n{text}")
    return "\n\n".join([*parts, NOTES])


def by_phase(row: dict[str, Any], counts: dict[str, Any]) -> dict[str, Any]:
    return {"impl": row["impl"], "images": row["images"], **counts["by_phase"]} | {
        "total": counts["total"]
    }


def by_line(rows: Rows) -> Rows:
    """A row for each line, and for each IMPL its counts at all numbers of images."""
    impls = dict.fromkeys(row["impl"] for row in rows)
    images = dict.fromkeys((row["images"] for row in rows), 0)
    times: dict[tuple[str, ...], dict[str, dict[int, int]]] = defaultdict(
        lambda: {impl: images.copy() for impl in impls}
    )
    for row in rows:
        for line in row["lines"]:
            place = f"{short(line['file'])}:{line['line']}"
            key = (line["phase"], line["op"], place)
            times[key][row["impl"]][row["images"]] += line["times"]
    names = ("phase", "operation", "line")
    return [
        dict(zip(names, key, strict=True)) | {impl: cell(times[key][impl]) for impl in impls}
        for key in sorted(times, key=lambda key: PHASES.index(key[0]))
    ]


def cell(times: dict[int, int]) -> str:
    return " / ".join(map(str, times.values())) if any(times.values()) else "-"


def graphs(row: dict[str, Any]) -> dict[str, Any]:
    each = row["graphs"]["each"]
    return {
        "impl": row["impl"],
        "images": row["images"],
        "graphs": row["graphs"]["captured"],
        "breaks": row["graphs"]["breaks"],
        "operations of each": ", ".join(str(graph["ops"]["total"]) for graph in each),
        "data-dependent": sum(graph["data_dependent"]["total"] for graph in each),
        "fell back to eager": "yes" if row["graphs"]["is_eager"] else "no",
    }


def short(file: str) -> str:
    """Without the folder that holds the package, or the present folder."""
    packages = [Path(module.__path__[0]).parent for module in (detectron2, d2_static_sampler)]
    for folder in (*packages, Path.cwd()):
        if Path(file).is_relative_to(folder):
            return str(Path(file).relative_to(folder))
    return file

"""The figures of tools/profile_step.py, from what was counted and traced."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from d2_static_sampler.profiling.captured_graphs import CapturedGraphs
from d2_static_sampler.profiling.step_phases import PHASES, count_ops_by_phase, count_waits

NMS = "d2_static_sampler::nms_topk"


def figures(count: count_ops_by_phase) -> dict[str, Any]:
    """Counts by phase, how often each operation ran, and the lines of what depends on data."""
    ops, names = Counter[str](), Counter[str]()
    for (phase, name), times in count.ops.items():
        ops[phase] += times
        names[name] += times
    return {
        "data_dependent": by_phase(Counter(phase for phase, _ in count.issued)),
        "ops": by_phase(ops),
        "ops_by_name": dict(names.most_common()),
        "nms_topk": names[NMS],
        "lines": [
            {"phase": phase, "op": op.name, "file": op.file, "line": op.line, "times": times}
            for (phase, op), times in Counter(count.issued).items()
        ],
    }


def graph_figures(graphs: CapturedGraphs) -> dict[str, Any]:
    """How many graphs and breaks there were, and the figures of each graph."""
    return {
        "captured": graphs.num_captured,
        "breaks": graphs.num_breaks,
        "each": [figures(graph) for graph in graphs.counts],
    }


def by_phase(counts: Counter[str]) -> dict[str, Any]:
    return {"total": counts.total(), "by_phase": {phase: counts[phase] for phase in PHASES}}


def hide_sampling(row: dict[str, Any]) -> None:
    """Take out what a counter saw of a compiled sampler: the static one, run eagerly."""
    for counts in (row["data_dependent"], row["ops"]):
        counts["total"] = counts["by_phase"]["sample"] = None
    row["lines"] = [line for line in row["lines"] if line["phase"] != "sample"]
    row["ops_by_name"] = None


def waits(trace: Path) -> dict[str, Any]:
    """What waited for a CUDA device in a traced step."""
    counts = count_waits(json.loads(trace.read_text())["traceEvents"])
    return {kind: by_phase(each) for kind, each in counts.items()}

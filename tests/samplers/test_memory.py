"""How much memory a call takes beyond its labels: counted, not timed."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from d2_static_sampler import build_label_sampler
from d2_static_sampler.samplers.selection.planes import BLOCK_WIDTH


def peak_bytes(function) -> int:
    """The most that lives at once of what ``function`` allocates in a thread of its own."""

    def run():
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            function()
        events = prof.profiler.kineto_results.events()
        changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
        live = 0
        for _, size in sorted(changes, key=lambda change: change[0]):
            live += size
            peak[0] = max(peak[0], live)

    peak = [0]
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return peak[0]


def test_the_count_sees_what_is_allocated():
    assert peak_bytes(lambda: torch.zeros(1 << 20, dtype=torch.int64)) == 8 << 20
    assert peak_bytes(lambda: [torch.zeros(1 << 20) for _ in range(3)]) == 12 << 20


@pytest.mark.parametrize(
    ("rows", "n", "k", "dtype"),
    [
        (1, 268_569, 256, torch.int8),
        (16, 268_569, 256, torch.int8),
        (2, 268_569, 256, torch.int64),
        (8, 2_000, 512, torch.int64),
        (2, 16 * 512 - 1, 512, torch.int8),
        (2, 16 * 512, 512, torch.int8),
        (1, 100_000, 10_000, torch.int64),
    ],
)
def test_at_most_12_bytes_a_candidate_and_a_few_blocks_a_slot(rows, n, k, dtype):
    labels = torch.randint(-1, 2, (rows, n)).to(dtype)
    sampler = build_label_sampler("static")
    asked = {"num_samples": k, "positive_fraction": 0.5, "bg_label": 0}
    limit = 12 * rows * n + 5 * rows * k * BLOCK_WIDTH
    assert 0 < peak_bytes(lambda: sampler(labels, **asked)) <= limit

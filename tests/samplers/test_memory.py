"""How much memory a call takes beyond its labels: counted, not timed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from d2_static_sampler.ops.sampling import BLOCK_WIDTH
from d2_static_sampler.profiling.peak_memory import peak_bytes

from ..helpers import STATIC_WAYS, sampler_by


def test_the_count_sees_what_is_allocated():
    python = 10_000  # objects
    assert 0 <= peak_bytes(lambda: torch.zeros(1 << 20, dtype=torch.int64)) - (8 << 20) < python
    assert 0 <= peak_bytes(lambda: [torch.zeros(1 << 20) for _ in range(3)]) - (12 << 20) < python
    assert 0 <= peak_bytes(lambda: [np.zeros(1 << 20) for _ in range(3)]) - (24 << 20) < python


@pytest.mark.parametrize("way", STATIC_WAYS)
@pytest.mark.parametrize(
    ("rows", "n", "k", "dtype"),
    [
        (1, 268_569, 256, torch.int8),
        (16, 268_569, 256, torch.int8),
        (2, 268_569, 256, torch.int64),
        (8, 2_000, 512, torch.int64),
        (2, 16 * 512 - 1, 512, torch.int8),
        (2, 16 * 512, 512, torch.int8),
        (2, 64 * 512 - 1, 512, torch.int8),
        (2, 64 * 512, 512, torch.int8),
        (1, 100_000, 10_000, torch.int64),
    ],
)
def test_at_most_12_bytes_a_candidate_and_a_few_blocks_a_slot(way, rows, n, k, dtype):
    labels = torch.randint(-1, 2, (rows, n)).to(dtype)
    sampler = sampler_by(way)
    asked = {"num_samples": k, "positive_fraction": 0.5, "bg_label": 0}
    limit = 12 * rows * n + 5 * rows * k * BLOCK_WIDTH
    assert 0 < peak_bytes(lambda: sampler(labels, **asked)) <= limit

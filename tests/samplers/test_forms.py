"""The forms of the members, in torch and in NumPy: none changes a sample."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from d2_static_sampler import build_label_sampler
from d2_static_sampler.samplers.selection import MemberBlocks, MemberTable
from d2_static_sampler.samplers.selection.host_members import HostBlocks, HostTable

from ..helpers import sampler_by


def random_labels(rows: int, n: int) -> torch.Tensor:
    return torch.randint(-1, 4, (rows, n))


@pytest.mark.parametrize("width", [0, 8, 64, 120])
@pytest.mark.parametrize("n", [1, 119, 120, 1003])
def test_block_width_changes_nothing(width, n, monkeypatch):
    """Width 0 is the table of members."""
    labels, words = random_labels(2, n), torch.randint(1 << 62, (2, 2, 128))
    asked = {"num_samples": 128, "positive_fraction": 0.5, "bg_label": 0, "words": words}
    expected = build_label_sampler("naive")(labels, **asked)

    class Blocks(MemberBlocks):
        @classmethod
        def of(cls, labels, background):
            return MemberBlocks.of(labels, background, width=width)

    form = Blocks if width else MemberTable
    monkeypatch.setattr("d2_static_sampler.samplers.static.choose_form", lambda *_: form)
    sample = sampler_by("static in torch")(labels, **asked)
    assert torch.equal(sample.index, expected.index)


@pytest.mark.parametrize("form", [HostTable, HostBlocks])
@pytest.mark.parametrize("n", [1, 63, 64, 65, 1003])
@pytest.mark.parametrize("count", [np.bitwise_count, None])
def test_the_forms_of_numpy_change_nothing(form, n, count, monkeypatch):
    """With NumPy's count of bits and without: NumPy 1 has none."""
    labels, words = random_labels(3, n), torch.randint(1 << 62, (2, 3, 128))
    asked = {"num_samples": 128, "positive_fraction": 0.5, "bg_label": 0, "words": words}
    expected = build_label_sampler("naive")(labels, **asked)
    monkeypatch.setattr("d2_static_sampler.samplers.static.choose_host_form", lambda *_: form)
    if count is None:
        monkeypatch.delattr(np, "bitwise_count")
    sample = sampler_by("static")(labels, **asked)
    assert torch.equal(sample.index, expected.index)

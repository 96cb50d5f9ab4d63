"""The forms of the members, in torch and in NumPy: none changes a sample."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from d2_static_sampler import build_label_sampler
from d2_static_sampler.samplers.selection import (
    MemberBlocks,
    MemberTable,
    host,
    host_members,
    host_ranks,
)
from d2_static_sampler.samplers.selection.host_members import HostBlocks, HostTable

from ..helpers import STATIC_WAYS, sampler_by


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
@pytest.mark.parametrize("counts_bits", [True, False])
def test_the_forms_of_numpy_change_nothing(form, n, counts_bits, monkeypatch):
    """With NumPy's count of bits and without: NumPy 1 has none."""
    labels, words = random_labels(3, n), torch.randint(1 << 62, (2, 3, 128))
    asked = {"num_samples": 128, "positive_fraction": 0.5, "bg_label": 0, "words": words}
    expected = build_label_sampler("naive")(labels, **asked)
    monkeypatch.setattr("d2_static_sampler.samplers.static.choose_host_form", lambda *_: form)
    if not counts_bits:
        monkeypatch.delattr(np, "bitwise_count", raising=False)
    sample = sampler_by("static")(labels, **asked)
    assert torch.equal(sample.index, expected.index)


class OldArray(np.ndarray):
    """Takes at the indices only that NumPy 1 and 2.0 take at: none of type uint64."""

    def take(self, indices, *args, **kwargs):
        if not np.can_cast(np.asarray(indices).dtype, np.intp, "safe"):
            raise TypeError("Cannot cast array data according to the rule 'safe'")
        return super().take(indices, *args, **kwargs)


class OldNumpy:
    """The module numpy, but that all its functions return such arrays."""

    def __getattr__(self, name):
        value = getattr(np, name)
        if isinstance(value, type) or not callable(value):
            return value

        def call(*args, **kwargs):
            result = value(*args, **kwargs)
            return result.view(OldArray) if isinstance(result, np.ndarray) else result

        return call


@pytest.mark.parametrize("form", [HostTable, HostBlocks])
def test_numpy_takes_at_signed_indices(form, monkeypatch):
    labels, words = random_labels(3, 1003), torch.randint(1 << 62, (2, 3, 128))
    asked = {"num_samples": 128, "positive_fraction": 0.5, "bg_label": 0, "words": words}
    expected = sampler_by("static")(labels, **asked)
    monkeypatch.setattr("d2_static_sampler.samplers.static.choose_host_form", lambda *_: form)
    for module in (host_members, host_ranks):
        monkeypatch.setattr(module, "np", OldNumpy())
    monkeypatch.setattr(host_members, "_NTH_BIT", host_members._NTH_BIT.view(OldArray))
    with pytest.raises(TypeError, match="Cannot cast"):  # what it is that does not pass
        host_members._NTH_BIT.take(np.zeros(1, np.uint64))
    assert torch.equal(sampler_by("static")(labels, **asked).index, expected.index)


@pytest.mark.parametrize("way", STATIC_WAYS)
@pytest.mark.parametrize("n", [300, 40_000])
def test_tensors_that_stand_for_other_numbers_than_they_hold(way, n):
    """Those with torch's negative bit, and those of zeros only that have no memory."""
    labels, words = random_labels(2, n), torch.randint(1 << 62, (2, 2, 16))
    negated, negated_words = torch._neg_view(-labels), torch._neg_view(-words)
    assert negated.is_neg()
    nothing = torch._efficientzerotensor((2, n), dtype=torch.int64)
    asked = {"num_samples": 16, "positive_fraction": 0.5, "bg_label": 0}
    for given, plain in ((negated, labels), (nothing, torch.zeros_like(labels))):
        sample = sampler_by(way)(given, **asked, words=negated_words)
        expected = sampler_by("naive")(plain, **asked, words=words)
        assert torch.equal(sample.index, expected.index)
        assert torch.equal(sample.num_pos, expected.num_pos)
    counts = torch.tensor([[2], [1]])
    picked = host.pick_ranks_on_host(negated_words, counts, 2 * counts, counts)
    assert torch.equal(picked, host.pick_ranks_on_host(words, counts, 2 * counts, counts))

"""A model with a sampler is copied and saved as any other."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from d2_static_sampler import install_sampler
from d2_static_sampler.modeling import installed_samplers
from tests.helpers import make_batch, small_model, step


@pytest.mark.parametrize("impl", ["naive", "static", "compiled"])
def test_copies_and_files_after_a_step(impl):
    model = install_sampler(small_model(), impl)
    keys = list(small_model().state_dict())
    batch = make_batch((2, 1))
    step(model, batch)
    assert list(model.state_dict()) == keys
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    ]
    for clone in copies:
        assert type(clone.proposal_generator) is type(model.proposal_generator)
        assert type(clone.roi_heads) is type(model.roi_heads)
        assert list(clone.state_dict()) == keys
        losses, _, _ = step(clone, batch)
        assert all(torch.isfinite(loss) for loss in losses.values())
    stock = small_model(seed=5)
    stock.load_state_dict(model.state_dict())


def test_a_copy_samples_on_its_own():
    model = install_sampler(small_model(), "static", seed=3)
    step(model, make_batch((2,)))
    clone = copy.deepcopy(model)
    step(clone, make_batch((2,)))
    assert [head.calls for head in installed_samplers(model).values()] == [1, 1]
    assert [head.calls for head in installed_samplers(clone).values()] == [2, 2]

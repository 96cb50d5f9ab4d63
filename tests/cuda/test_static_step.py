"""The static step on a GPU: nothing waits but the suppression. Skipped without one."""

from __future__ import annotations

import copy

import pytest
import torch
from detectron2.utils.events import EventStorage

from d2_static_sampler import build_label_sampler, install_sampler
from d2_static_sampler.modeling import static_rpn
from d2_static_sampler.modeling.deferred import deferred_metrics
from tests.cuda.test_cuda import ASKED, make_labels, no_synchronisation
from tests.helpers import make_batch, small_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
IMPLS = ("static", "compiled")


@pytest.fixture
def suppression_may_wait(monkeypatch):
    nms_topk = static_rpn.nms_topk

    def waiting(*args):
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        try:
            return nms_topk(*args)
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    monkeypatch.setattr(static_rpn, "nms_topk", waiting)


@pytest.mark.usefixtures("suppression_may_wait")
@pytest.mark.parametrize("num_gt", [(3,), (2, 0, 4, 1)])
@pytest.mark.parametrize("impl", IMPLS)
def test_a_step_waits_nowhere_else(impl, num_gt):
    model = install_sampler(small_model().cuda(), impl, static_step=True)
    batch = make_batch(num_gt)
    with EventStorage():
        deferred_metrics().period = None
        for _ in range(2):  # the first may compile
            sum(model(batch).values()).backward()
        with no_synchronisation():
            loss = sum(model(batch).values())
            loss.backward()
        deferred_metrics().flush()
    assert torch.isfinite(loss)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_losses_are_detectron2s(impl):
    model = small_model().cuda()
    static = install_sampler(copy.deepcopy(model), impl, static_step=True, seed=1)
    install_sampler(model, impl, seed=1)
    batch = make_batch((3, 0, 5))
    with EventStorage():
        got, expected = static(batch), model(batch)
    assert got.keys() == expected.keys()
    for name, loss in expected.items():
        torch.testing.assert_close(got[name], loss, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_sample_stays_when_others_are_drawn(impl):
    sampler, other = build_label_sampler(impl), build_label_sampler(impl)
    kept = sampler(make_labels((3, 900)).cuda(), **ASKED)
    before = [x.clone() for x in (kept.index, kept.num_pos, kept.num_neg)]
    for again in (sampler, other):
        for num_samples in (64, 32):
            again(make_labels((3, 900)).cuda(), **(ASKED | {"num_samples": num_samples}))
    assert all(map(torch.equal, (kept.index, kept.num_pos, kept.num_neg), before))

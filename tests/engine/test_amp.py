"""Mixed precision on a CPU: the forward in bfloat16, the rest in float32, timed as ever."""

from __future__ import annotations

import pytest
import torch
from detectron2.engine import AMPTrainer

from d2_static_sampler import SamplerHook, install_sampler
from d2_static_sampler.engine import CpuAMPTrainer, amp_trainer, read_steps
from tests.helpers import make_batch, small_config, small_model


class WatchedSGD(torch.optim.SGD):
    """Knows whether it stepped under autocast, and what it was given."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []

    def step(self, closure=None):
        types = {p.grad.dtype for group in self.param_groups for p in group["params"]}
        self.seen.append((torch.is_autocast_enabled("cpu"), types))
        return super().step(closure)


@pytest.mark.parametrize("impl", ["naive", "static", "compiled"])
def test_only_the_forward_is_in_bfloat16(tmp_path, impl):
    model = install_sampler(small_model(), impl, seed=1)
    features, backward = [], []

    def watch(_, __, output):
        features.append(output["p2"].dtype)
        output["p2"].register_hook(lambda _: backward.append(torch.is_autocast_enabled("cpu")))

    model.backbone.register_forward_hook(watch)
    optimizer = WatchedSGD(model.parameters(), lr=1e-3)
    loader = iter([make_batch((2, 0), size=64)] * 3)
    trainer = CpuAMPTrainer(model, loader, optimizer)
    trainer.register_hooks([SamplerHook(small_config("OUTPUT_DIR", str(tmp_path)))])
    before = [p.detach().clone() for p in model.parameters()]
    trainer.train(0, 3)

    assert features == [torch.bfloat16] * 3
    assert backward == [False] * 3
    assert optimizer.seen == [(False, {torch.float32})] * 3
    changed = [not torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True)]
    assert any(changed)
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in model.parameters())
    rows = read_steps(tmp_path / "step_times.jsonl")
    assert [(row["iteration"], row["images"]) for row in rows] == [(0, 2), (1, 2), (2, 2)]
    for row in rows:
        assert min(row[key] for key in row if key.endswith("_ms")) > 0
        assert row["forward_ms"] > row["rpn_label_ms"] + row["roi_label_ms"]
    assert "forward" not in vars(model)


def test_the_trainer_of_a_device():
    assert amp_trainer("cpu") is CpuAMPTrainer
    assert amp_trainer("cuda:1") is amp_trainer("cuda") is AMPTrainer

"""MODEL.SAMPLER.SEED in two real processes: each draws its own, and goes on after a restart."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from detectron2.utils import comm

from d2_static_sampler import SamplerHook, install_sampler
from d2_static_sampler.engine.launch import launch
from d2_static_sampler.modeling import installed_samplers
from tests.helpers import small_config, small_model

LABELS = torch.tensor([-1, 0, 0, 1] * 500, dtype=torch.int8).expand(2, -1)


def start(select: str, seed: int) -> tuple[SamplerHook, list]:
    cfg = small_config(
        *("MODEL.SAMPLER.IMPL", "static", "MODEL.SAMPLER.SEED", seed),
        *("MODEL.SAMPLER.SELECT", select),
    )
    hook = SamplerHook(cfg)
    hook.trainer = SimpleNamespace(model=install_sampler(small_model(), cfg))
    return hook, list(installed_samplers(hook.trainer.model).values())


def draw(heads: list) -> torch.Tensor:
    """The picks of one step, whatever torch's own generator has drawn before."""
    torch.randn(3)
    asked = {"num_samples": 64, "positive_fraction": 0.5, "bg_label": 0}
    return torch.stack([head(LABELS, **asked).index for head in heads])


def steps_with_a_restart(folder: str, select: str) -> None:
    """Four steps at once; and two, a checkpoint of process 0 that all read, and two more."""
    path, rank = Path(folder), comm.get_rank()
    _, heads = start(select, seed=5)
    whole = torch.stack([draw(heads) for _ in range(4)])
    hook, heads = start(select, seed=5)
    first = [draw(heads) for _ in range(2)]
    if rank == 0:
        torch.save(hook.state_dict(), path / "checkpoint")
    comm.synchronize()
    hook, heads = start(select, seed=5)
    hook.load_state_dict(torch.load(path / "checkpoint"))
    resumed = torch.stack(first + [draw(heads) for _ in range(2)])
    torch.save((whole, resumed), path / f"rank{rank}")


@pytest.mark.parametrize("select", ["rank", "topk"])
def test_every_process_repeats_its_own_samples(tmp_path, select):
    launch(steps_with_a_restart, 2, dist_url="auto", args=(str(tmp_path), select))
    results = [torch.load(tmp_path / f"rank{rank}") for rank in range(2)]
    for whole, resumed in results:
        assert torch.equal(whole, resumed)
        assert len({tuple(picks.flatten().tolist()) for picks in whole.flatten(0, 2)}) == 16
    assert not torch.equal(results[0][0], results[1][0])

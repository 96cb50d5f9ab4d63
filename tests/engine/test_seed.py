"""Seeds in two real processes: each draws its own samples, and the same again."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from detectron2.engine import default_setup
from detectron2.modeling import build_model
from detectron2.utils import comm

from d2_static_sampler import SamplerHook, install_sampler
from d2_static_sampler.engine.launch import launch
from d2_static_sampler.modeling import installed_samplers
from tests.helpers import small_config, small_model
from tests.processes import forked_groups

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


def every_selection(folder: str) -> None:
    for select in ("rank", "topk"):
        (path := Path(folder, select)).mkdir(exist_ok=True)
        steps_with_a_restart(str(path), select)
    torch.save([picks_of_a_run(folder, seed) for seed in (7, 7, 8)], f"{folder}/{comm.get_rank()}")


def picks_of_a_run(folder: str, seed: int) -> torch.Tensor:
    """Without a seed of the samples: what Detectron2's SEED makes of torch's generator."""
    cfg = small_config("MODEL.SAMPLER.IMPL", "static", "SEED", seed, "OUTPUT_DIR", folder)
    default_setup(cfg, argparse.Namespace())
    model = install_sampler(build_model(cfg), cfg)
    return torch.stack([draw(list(installed_samplers(model).values())) for _ in range(2)])


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drawn")
    with forked_groups():
        launch(every_selection, 2, dist_url="auto", args=(str(folder),))
    return folder


@pytest.mark.parametrize("select", ["rank", "topk"])
def test_every_process_repeats_its_own_samples(drawn, select):
    results = [torch.load(drawn / select / f"rank{rank}") for rank in range(2)]
    for whole, resumed in results:
        assert torch.equal(whole, resumed)
        assert len({tuple(picks.flatten().tolist()) for picks in whole.flatten(0, 2)}) == 16
    assert not torch.equal(results[0][0], results[1][0])


def test_detectron2s_seed_repeats_each_process(drawn):
    results = [torch.load(drawn / str(rank)) for rank in range(2)]
    for first, again, other in results:
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
    assert not torch.equal(results[0][0], results[1][0])

"""Who samples in the sampler's benchmarks: Detectron2, torchvision, a published study, and ours.

B rows, N candidates, K samples, D features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from benchmark_works import Work
from detectron2.modeling.sampling import subsample_labels
from torch import Tensor
from torchvision.models.detection._utils import BalancedPositiveNegativeSampler

from d2_static_sampler import build_label_sampler, sample_balanced
from d2_static_sampler.ops import sampling, sampling_cpu
from d2_static_sampler.ops.sampling import SampleRequest
from d2_static_sampler.samplers import LabelSample, LabelSampler, StaticSampler

LOOP = "Detectron2's loop"
BALANCED_LOOP = "variable shapes, looped"

Batch = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Peer:
    """One way to do a work.

    Attributes:
        run: takes what ``prepare`` made of the labels; with the inputs before them for a
            balanced work.
        picks: what ``run`` returned as (positives, negatives) of each row; None for balanced.
        note: how what it does differs.
        prepare: makes the labels that it wants; not part of the measured time.
    """

    run: Callable[..., Any]
    picks: Callable[[Any], Iterable[tuple[Tensor, Tensor]]] | None = None
    note: str = ""
    prepare: Callable[[Tensor], Tensor] = lambda labels: labels


def peers(work: Work, selections: Sequence[str], device: str) -> dict[str, Peer]:
    """The peers that do a work; the first is the baseline."""
    if work.balanced:
        return _balanced_peers(work)
    if work.name == "forms":
        return {LOOP: _loop(work)} | {
            name: _ours(work, own) for name, own in _samplers_of_forms().items()
        }
    own = {
        f"{impl} {select}": _sampler(impl, select)
        for select in selections
        for impl in ("static", "compiled")
    }
    if device == "cpu" and "rank" in selections:
        # What other devices run.
        own["static rank in torch"] = _Formed(_in_torch)
        own["compiled rank in torch"] = _sampler("compiled", "rank", compiles_cpu=True)
    return {LOOP: _loop(work), "torchvision": _torchvision(work)} | {
        name: _ours(work, sampler) for name, sampler in own.items()
    }


def check(work: Work, peer: Peer, result: Any, labels: Tensor) -> None:
    """Raise where a result is not what the work asks for."""
    num_pos, num_neg = work.counts
    if peer.picks is None:
        inputs, picked, valid = result
        candidate = inputs[:, :, 0].long()
        right = bool(valid.all()) and torch.equal(labels.gather(1, candidate), picked)
        counts = {(int((row == 1).sum()), int((row == 0).sum())) for row in picked}
    else:
        parts = list(peer.picks(result))
        right = all(
            bool((row[pos] == 1).all()) and bool((row[neg] == work.background).all())
            for row, (pos, neg) in zip(labels, parts, strict=True)
        )
        counts = {(len(pos.unique()), len(neg.unique())) for pos, neg in parts}
    if not right or counts != {(num_pos, num_neg)}:
        raise AssertionError(f"{work}: not {num_pos} positives and {num_neg} negatives: {counts}")


def _loop(work: Work) -> Peer:
    def run(labels: Tensor) -> list[Any]:
        return [subsample_labels(row, *work.request.values()) for row in labels]

    return Peer(run, picks=lambda result: result)


def _torchvision(work: Work) -> Peer:
    sampler = BalancedPositiveNegativeSampler(work.num_samples, work.fraction)

    def prepare(labels: Tensor) -> Tensor:
        return torch.where(labels == work.background, 0, labels)

    def picks(masks: Any) -> Iterable[tuple[Tensor, Tensor]]:
        return ((pos.nonzero()[:, 0], neg.nonzero()[:, 0]) for pos, neg in zip(*masks, strict=True))

    note = "makes masks, without an order; background is 0"
    return Peer(lambda labels: sampler(list(labels)), picks, note, prepare)


def _ours(work: Work, sampler: LabelSampler) -> Peer:
    def picks(sample: Any) -> Iterable[tuple[Tensor, Tensor]]:
        rows = (sample.row(i) for i in range(work.batch))
        return ((row.index[row.is_pos], row.index[row.is_neg]) for row in rows)

    return Peer(lambda labels: sampler(labels, **work.request), picks)


@functools.cache
def _sampler(impl: str, select: str, **options: bool) -> LabelSampler:
    """One for all works, so that what is compiled serves them all."""
    return build_label_sampler(impl, select=select, **options)


class _Formed(StaticSampler):
    """The static sampler by one of its operator's forms, which the operator would choose from."""

    def __init__(self, sample: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> None:
        super().__init__("rank")
        self._by_form = sample

    def _sample(self, labels: Tensor, words: Tensor, request: SampleRequest) -> LabelSample:
        return LabelSample(*self._by_form(labels, words, request))


def _in_torch(labels: Tensor, words: Tensor, request: SampleRequest) -> Any:
    return sampling.sample_in_torch(labels, words, *request)


def _samplers_of_forms() -> dict[str, StaticSampler]:
    forms = {
        "NumPy table": (sampling_cpu.sample_with, sampling_cpu.CpuTable),
        "NumPy blocks": (sampling_cpu.sample_with, sampling_cpu.CpuBlocks),
        "table": (sampling.sample_with, sampling.MemberTable),
        "blocks": (sampling.sample_with, sampling.MemberBlocks),
    }
    return {
        name: _Formed(functools.partial(sample, form)) for name, (sample, form) in forms.items()
    }


def _balanced_peers(work: Work) -> dict[str, Peer]:
    k = work.num_samples
    topk_note = "float32 keys, not told apart fairly where equal"
    compiled = torch.compile(functools.partial(topk_batch, num_samples=k), dynamic=False)
    return {
        BALANCED_LOOP: Peer(lambda inputs, labels: looped_batch(inputs, labels, k)),
        "top-k keys": Peer(lambda inputs, labels: topk_batch(inputs, labels, k), note=topk_note),
        "top-k keys, compiled": Peer(compiled, note=topk_note),
        "static": Peer(lambda inputs, labels: sample_balanced(inputs, labels, k)),
        "compiled": Peer(
            lambda inputs, labels: sample_balanced(inputs, labels, k, impl="compiled")
        ),
    }


def looped_batch(inputs: Tensor, labels: Tensor, num_samples: int) -> Batch:
    """Sample each row with shapes that depend on its labels: the study's starting point."""
    rows = [
        variable_sample(*row, num_samples=num_samples) for row in zip(inputs, labels, strict=True)
    ]
    sampled, sampled_labels = (torch.stack(part) for part in zip(*rows, strict=True))
    return sampled, sampled_labels, torch.ones_like(sampled_labels, dtype=torch.bool)


def variable_sample(inputs: Tensor, labels: Tensor, num_samples: int) -> tuple[Tensor, Tensor]:
    """K items of (N, D) inputs, half of each class, in random order."""
    positive, negative = (labels == 1).nonzero()[:, 0], (labels == 0).nonzero()[:, 0]
    num_pos = min(len(positive), max(num_samples // 2, num_samples - len(negative)))
    parts = (positive, num_pos), (negative, num_samples - num_pos)
    index = torch.cat(
        [part[torch.randperm(len(part), device=part.device)][:n] for part, n in parts]
    )
    index = index[torch.randperm(len(index), device=index.device)]
    return inputs[index], labels[index]


def topk_batch(inputs: Tensor, labels: Tensor, num_samples: int) -> Batch:
    """The study's static form of (B, N, D) inputs: two top-k of random keys, merged by a third."""
    positive, negative = labels == 1, labels == 0
    num_pos = torch.minimum(
        positive.sum(1), (num_samples - negative.sum(1)).clamp(min=num_samples // 2)
    )
    num_neg = torch.minimum(negative.sum(1), num_samples - num_pos)
    key = torch.rand(labels.shape, device=labels.device)
    picks = [(key * part).topk(num_samples).indices for part in (positive, negative)]
    slot = torch.arange(num_samples, device=labels.device)
    valid = torch.cat([slot < num[:, None] for num in (num_pos, num_neg)], 1)
    merged = (torch.rand(valid.shape, device=labels.device) * valid).topk(num_samples).indices
    index = torch.cat(picks, 1).gather(1, merged)
    wide = index[:, :, None].expand(-1, -1, inputs.shape[2])
    return inputs.gather(1, wide), labels.gather(1, index), valid.gather(1, merged)

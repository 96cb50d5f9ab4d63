"""Random models: Detectron2, the sampler and the static step do the same with the same picks.

``--fuzz 1000`` builds a thousand of them; ``--fuzz-from`` is the first seed. The number of each
outcome is printed at the end; in several processes ``--junitxml`` has it.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from detectron2.utils.events import EventStorage

from d2_static_sampler import LabelSample, build_label_sampler, install_sampler
from d2_static_sampler.modeling.deferred import deferred_metrics
from tests.helpers import record_picks
from tests.modeling.customised import PLANTS
from tests.modeling.random_models import Case, random_case

OUTCOMES: Counter[str] = Counter()
SKIPPED = "kpts_num_skipped_batches"  # counted over the life of the process


class Replay:
    """Recorded picks, an image after the other, for whole batches and for single images."""

    def __init__(self, calls: list[list[Any]]) -> None:
        self.picks = [pick for call in calls for pick in call]

    def __call__(self, labels: torch.Tensor, *, num_samples: int, **kwargs: Any) -> LabelSample:
        num_rows = len(labels) if labels.dim() == 2 else 1
        if len(self.picks) < num_rows:  # Detectron2 has refused the batch, as a check will later
            return build_label_sampler("static")(labels, num_samples=num_samples, **kwargs)
        rows = [self._row(num_samples) for _ in range(num_rows)]
        index, num_pos, num_neg = (torch.stack(part) for part in zip(*rows, strict=True))
        if labels.dim() == 1:
            index, num_pos, num_neg = index[0], num_pos[0], num_neg[0]
        return LabelSample(index, num_pos, num_neg)

    def _row(self, num_samples: int) -> tuple[torch.Tensor, ...]:
        positives, negatives = self.picks.pop(0)
        index = torch.zeros(num_samples, dtype=torch.int64)
        index[: len(positives) + len(negatives)] = torch.cat([positives, negatives])
        return index, torch.tensor(len(positives)), torch.tensor(len(negatives))


def one_step(model: Any, batch: Any) -> Any:
    """Losses, gradients and logs; or the exception of the step, or of its checks."""
    model.zero_grad()
    torch.manual_seed(0)
    try:
        with EventStorage() as storage:
            losses = model(batch)
            deferred_metrics().flush()
            sum(losses.values()).backward()
    except Exception as error:
        return error
    gradients = {k: v.grad.clone() for k, v in model.named_parameters() if v.grad is not None}
    logged = {k: v for k, (v, _) in storage.latest().items() if v == v and k != SKIPPED}
    return losses, gradients, logged


def difference(got: Any, expected: Any) -> str | None:
    """What differs; None where nothing does, or both are the same kind of exception."""
    if isinstance(expected, Exception) or isinstance(got, Exception):
        told = [repr(x)[:200] if isinstance(x, Exception) else "a step" for x in (got, expected)]
        return None if type(got) is type(expected) else " for ".join(told)
    trains_on = all(loss.isfinite() for loss in expected[0].values())
    # Behind a loss that is not finite Detectron2 stops, whatever the gradients are.
    for part, of_stock, bound in zip(got[: 1 + trains_on], expected, (1e-5, 1e-3), strict=False):
        if part.keys() != of_stock.keys():
            return f"{sorted(part.keys() ^ of_stock.keys())}"
        # What is nothing but rounding is measured by the largest.
        norms = [float(value.norm()) for value in of_stock.values()]
        largest = max(filter(math.isfinite, norms), default=0.0)
        for name, value in of_stock.items():
            if not is_close(part[name], value, bound, largest):
                return f"{name}: {part[name].norm()} for {value.norm()}"
    if got[2] != pytest.approx(expected[2], rel=1e-6):
        return f"{got[2]} for {expected[2]}"
    return None


def is_close(got: torch.Tensor, expected: torch.Tensor, bound: float, largest: float) -> bool:
    got, expected = got.detach(), expected.detach()
    if not expected.isfinite().all():
        return torch.equal(got.isfinite(), expected.isfinite())
    return bool((got - expected).norm() <= bound * expected.norm() + 1e-6 * largest)


def plant(case: Case, models: list[Any], patch: Any) -> None:
    for name in case.plants:
        each = PLANTS[name]
        for model in models if each.is_of_model else models[:1]:
            each.change(model, patch)


def compare(case: Case, monkeypatch: pytest.MonkeyPatch, warned: list[str]) -> str:
    """How the static step came out of a case: "equal", "left out" or "refused"."""
    models = [case.tiny.build(*case.opts) for _ in range(3)]
    stock, static, step = models
    with monkeypatch.context() as patch:
        if not case.is_planted_later:
            plant(case, models, patch)
        replays = [Replay([]), Replay([])]
        for model, replay, is_step in zip((static, step), replays, (False, True), strict=True):
            install_sampler(model, replay, static_step=is_step)
        if case.is_planted_later:
            plant(case, models, patch)
        expected, picks = record_picks(stock, case.batch(), patch, one_step)
        for model, replay, what in zip((static, step), replays, ("static", "step"), strict=True):
            replay.picks = Replay(picks).picks
            told = difference(one_step(model, case.batch()), expected)
            if told is not None:
                pytest.fail(f"{what}: {told}\n{case}", pytrace=False)
    if isinstance(expected, Exception):
        return "refused"
    return "left out" if any("STATIC_STEP" in text for text in warned) else "equal"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    first, number = (metafunc.config.getoption(name) for name in ("--fuzz-from", "--fuzz"))
    metafunc.parametrize("seed", range(first, first + number))


@pytest.fixture(scope="module", autouse=True)
def _tell_outcomes(request):
    yield
    if terminal := request.config.pluginmanager.get_plugin("terminalreporter"):
        terminal.write_line(f"\nrandom models: {dict(OUTCOMES)}")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of a mean of nothing
def test_random_models(seed, monkeypatch, warnings_of_detectron2, record_property):
    outcome = compare(random_case(seed), monkeypatch, warnings_of_detectron2)
    record_property("outcome", outcome)
    OUTCOMES[outcome] += 1

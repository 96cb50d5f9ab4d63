"""Ways of training in which Detectron2 models are used, with a sampler as without one."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.utils.checkpoint
from detectron2.engine import SimpleTrainer
from detectron2.utils.events import EventStorage
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from d2_static_sampler import build_label_sampler, install_sampler
from d2_static_sampler.modeling import installed_samplers
from tests.helpers import ReplaySampler, make_batch, record_picks, small_model, step

IMPLS = ("static", "compiled")


class Recorder:
    """A sampler that keeps the labels it was given and what it picked."""

    def __init__(self, impl: str = "static") -> None:
        self.sampler = build_label_sampler(impl)
        self.seen: list = []

    def __call__(self, labels, **kwargs):
        sample = self.sampler(labels, **kwargs)
        self.seen.append((labels, sample))
        return sample


def test_autocast_leaves_labels_and_picks_of_the_anchors_alone():
    """Anchors and truth do not depend on the precision; nor do the picks, under a seed."""
    plain, cast = Recorder(), Recorder()
    batch = make_batch((2, 0, 3))
    step(install_sampler(small_model(), plain, seed=5), batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses, gradients, _ = step(install_sampler(small_model(), cast, seed=5), batch)
    assert all(torch.isfinite(loss) for loss in losses.values())
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())
    (labels, expected), (labels_cast, got) = plain.seen[0], cast.seen[0]
    assert torch.equal(labels, labels_cast)
    assert torch.equal(expected.index, got.index)
    assert torch.equal(expected.num_pos, got.num_pos)


def test_losses_under_autocast_are_stocks(monkeypatch):
    """With stock's own picks, bit for bit."""
    batch = make_batch((2, 3))
    model = small_model()
    replayed = copy.deepcopy(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (expected, _, _), picks = record_picks(model, batch, monkeypatch)
        got, _, _ = step(install_sampler(replayed, ReplaySampler(picks)), batch)
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def dtypes_under_autocast(impl):
    """Of what a step labels and samples, by field, and of its losses."""
    model = install_sampler(small_model(), impl)
    rpn, heads, seen = model.proposal_generator, model.roi_heads, []
    label_anchors, label_proposals = rpn.label_and_sample_anchors, heads.label_and_sample_proposals

    def of_anchors(*args):
        labels, boxes = label_anchors(*args)
        seen.append([x.dtype for x in (*labels, *boxes)])
        return labels, boxes

    def of_proposals(*args):
        sampled = label_proposals(*args)
        fields = [x.get_fields().items() for x in sampled]
        seen.extend({name: getattr(x, "tensor", x).dtype for name, x in of} for of in fields)
        return sampled

    rpn.label_and_sample_anchors, heads.label_and_sample_proposals = of_anchors, of_proposals
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses, gradients, _ = step(model, make_batch((2, 0)))
    assert all(torch.isfinite(x).all() for x in (*losses.values(), *gradients.values()))
    return seen, {name: loss.dtype for name, loss in losses.items()}


@pytest.mark.parametrize("impl", IMPLS)
def test_dtypes_under_autocast_are_stocks(impl):
    expected = dtypes_under_autocast("naive")
    assert expected[0][0][:2] == [torch.int8, torch.int8]
    assert expected[0][1]["gt_classes"] == torch.int64
    assert dtypes_under_autocast(impl) == expected


@pytest.mark.parametrize("impl", IMPLS)
def test_a_sample_stays_when_others_are_drawn(impl):
    """Of another head, of the next step, and of another model."""
    sampler = Recorder(impl)
    model, other = install_sampler(small_model(), sampler), install_sampler(small_model(), impl)
    step(model, make_batch((2, 3)))
    kept = [[x.clone() for x in vars(sample).values()] for _, sample in sampler.seen]
    for seed in range(3):
        step(model, make_batch((3, 0), seed=seed))
        step(other, make_batch((3, 0), seed=seed))
    for (_, sample), values in zip(sampler.seen[:2], kept, strict=True):
        assert len(values) == 3
        assert all(map(torch.equal, vars(sample).values(), values))


def with_frozen_statistics():
    """A model whose images do not depend on the others of their batch, as BatchNorm's do."""
    return small_model("MODEL.RESNETS.NORM", "FrozenBN", "MODEL.FPN.NORM", "")


def test_accumulated_gradients_are_the_sum_of_their_steps():
    """Two forwards and one optimizer step; each forward draws its own sample."""
    batches = [make_batch((2, 1), seed=1), make_batch((0, 3), seed=2)]
    one = install_sampler(with_frozen_statistics(), "static", seed=3)
    single = [step(one, batch)[1] for batch in batches]

    model = install_sampler(with_frozen_statistics(), "static", seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer.zero_grad()
    with EventStorage():
        for batch in batches:
            sum(model(batch).values()).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            expected = single[0].get(name, 0) + single[1].get(name, 0)
            torch.testing.assert_close(parameter.grad, expected)
    before = model.roi_heads.box_predictor.cls_score.weight.clone()
    optimizer.step()
    assert not torch.equal(model.roi_heads.box_predictor.cls_score.weight, before)
    assert [head.calls for head in installed_samplers(model).values()] == [2, 2]


def test_an_averaged_model_follows_and_leaves_the_training_alone():
    """The same training with an average beside it, evaluated on the way, and without."""
    batch = make_batch((2, 1))

    def train(average: bool):
        model = install_sampler(small_model(), "static", seed=3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if average else None
        losses = []
        for _ in range(3):
            losses.append(step(model, batch)[0])
            optimizer.step()
            if ema is not None:
                ema.update_parameters(model)
                ema.eval()
                with torch.no_grad():
                    assert len(ema(batch)) == 2
        return model, ema, losses

    _, _, expected = train(average=False)
    model, ema, losses = train(average=True)
    assert all(
        torch.equal(a[name], b[name]) for a, b in zip(expected, losses, strict=True) for name in a
    )
    assert [head.calls for head in installed_samplers(model).values()] == [3, 3]
    assert [head.calls for head in installed_samplers(ema).values()] == [0, 0]
    assert type(ema.module.roi_heads) is type(model.roi_heads)
    keys = {key.removeprefix("module.") for key in ema.state_dict()} - {"n_averaged"}
    assert keys == set(small_model().state_dict())


@pytest.mark.parametrize("impl", IMPLS)
def test_eval_in_the_middle_of_training(impl):
    """Detections between two steps are those of stock's model with the same weights."""
    model = install_sampler(small_model(), impl, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    batch = make_batch((2, 1))
    for _ in range(2):
        step(model, batch)
        optimizer.step()
        stock = small_model(seed=5).eval()
        stock.load_state_dict(model.state_dict())
        model.eval()
        with torch.inference_mode():
            found, expected = model(batch), stock(batch)
        model.train()
        for a, b in zip(found, expected, strict=True):
            assert len(a["instances"]) == len(b["instances"]) > 0
            for name, value in b["instances"].get_fields().items():
                got = a["instances"].get(name)
                assert torch.equal(getattr(got, "tensor", got), getattr(value, "tensor", value))
    assert [head.calls for head in installed_samplers(model).values()] == [2, 2]


@pytest.mark.parametrize("no_gradient", [torch.no_grad, torch.inference_mode])
def test_losses_without_gradients(no_gradient):
    """Validation losses: a model in training mode that is not trained, then trained again."""
    model = install_sampler(with_frozen_statistics(), "static", seed=3)
    batch = make_batch((2, 1))
    with EventStorage(), no_gradient():
        validation = model(batch)
    assert not any(loss.requires_grad for loss in validation.values())
    model = install_sampler(model, "static", seed=3)
    losses, gradients, _ = step(model, batch)
    assert all(torch.equal(validation[name], losses[name]) for name in losses)
    assert gradients


def test_checkpointed_activations():
    """A backbone that is computed again in the backward does not sample again."""
    model = install_sampler(with_frozen_statistics(), "static", seed=3)
    _, expected, _ = step(model, make_batch((2, 1)))
    model = install_sampler(with_frozen_statistics(), "static", seed=3)
    forward = model.backbone.forward
    model.backbone.forward = lambda x: torch.utils.checkpoint.checkpoint(
        forward, x.requires_grad_(), use_reentrant=False
    )
    _, gradients, _ = step(model, make_batch((2, 1)))
    assert [head.calls for head in installed_samplers(model).values()] == [1, 1]
    assert expected.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name])


PLACES = {
    "box": lambda model: model.proposal_generator.rpn_head.anchor_deltas,
    "objectness": lambda model: model.proposal_generator.rpn_head.objectness_logits,
    "score": lambda model: model.roi_heads.box_predictor.cls_score,
}


def why_training_stops(impl, place):
    """What an iteration with a NaN in one of the predictors raises, without its figures."""
    model = install_sampler(small_model(), impl)
    with torch.no_grad():
        PLACES[place](model).bias[0] = float("nan")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    trainer = SimpleTrainer(model, [make_batch((2, 1))], optimizer)
    with EventStorage(), pytest.raises(FloatingPointError) as error:
        trainer.run_step()
    return str(error.value).partition("\n")[0]


@pytest.mark.parametrize("place", PLACES)
def test_a_nan_prediction_stops_training_as_in_stock(place):
    expected = why_training_stops("naive", place)
    for impl in IMPLS:
        assert why_training_stops(impl, place) == expected

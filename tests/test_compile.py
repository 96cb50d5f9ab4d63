"""The compiled static step: few graphs for all sizes, and the results of the one not compiled."""

from __future__ import annotations

import logging

import pytest
import torch
from detectron2.utils.events import EventStorage

from d2_static_sampler import install_sampler
from d2_static_sampler.compile import CompiledFunction
from d2_static_sampler.modeling.static_install import static_graphs
from d2_static_sampler.ops.matching import MatchRule, match_boxes, match_in_torch
from d2_static_sampler.profiling.op_counter import count_data_dependent_ops
from tests.helpers import needs_inductor
from tests.modeling.models import MODELS
from tests.modeling.test_step import SEED, assert_close, train_once

RULE = MatchRule((0.3, 0.7), (0, -1, 1), low_quality=True)
OTHER_RULE = MatchRule((0.5,), (0, 1))


def compiled_and_static(name, *opts):
    tiny = MODELS[name]()
    compiled = install_sampler(tiny.build(*opts), "compiled", static_step=True, seed=SEED)
    static = install_sampler(tiny.build(*opts), "static", static_step=True, seed=SEED)
    return tiny, compiled, static


def test_few_graphs_for_20_sizes_of_images_and_3_of_batches(eager_graphs):
    """Smallest first, so that every size is new; the ground truth has 0 to 6 boxes."""
    tiny, compiled, _ = compiled_and_static("faster_fpn")
    with EventStorage():
        for size in range(40, 120, 4):
            for num_gt in ((size // 4 % 5,), (2, size // 4 % 7), (0, 1, size // 4 % 3)):
                losses = compiled(tiny.batch(num_gt, size=size))
                assert all(loss.isfinite() for loss in losses.values())
    functions = static_graphs(compiled)
    assert len(functions) == 3
    for function in functions:
        assert not function.is_eager
        assert 1 <= function.num_graphs <= 3
    assert len(eager_graphs) == sum(function.num_graphs for function in functions)


NAMES = ("aten::nonzero", "item", "nonzero", "_local_scalar_dense", "unique")


@pytest.mark.parametrize("name", ["faster_fpn", "cascade", "faster_c4"])
def test_equals_the_static_step(eager_graphs, name):
    opts = ("MODEL.RESNETS.NORM", "FrozenBN") if name == "faster_c4" else ()
    tiny, compiled, static = compiled_and_static(name, *opts)
    for num_gt in ((3, 0, 4), (2,)):
        batch = tiny.batch(num_gt)
        assert_close(train_once(compiled, batch), train_once(static, batch))
    assert not any(function.is_eager for function in static_graphs(compiled))
    targets = [str(node.target) for graph in eager_graphs for node in graph.graph.nodes]
    assert len(targets) > 100
    assert not [x for x in targets if x in NAMES]


def test_no_sampler_of_its_own_in_a_graph():
    """A sampler that is not compiled keeps the step uncompiled."""
    tiny = MODELS["rpn_only"]()
    assert static_graphs(install_sampler(tiny.build(), "static", static_step=True)) == []


def matched(rule, truth, num_truth, boxes):
    how = rule.thresholds, rule.labels, rule.low_quality
    return match_in_torch(truth, num_truth, boxes, *how)


def compiled_function(function):
    return CompiledFunction(function, name=getattr(function, "__name__", "a function"))


def matching_case(num_images, num_truth, num_boxes):
    """On a grid, where overlaps are often equal."""
    random = torch.Generator().manual_seed(num_boxes)
    corner = torch.randint(0, 12, (num_images * num_truth + num_boxes, 2), generator=random)
    size = torch.randint(1, 8, corner.shape, generator=random)
    truth, boxes = (
        torch.cat([corner, corner + size], dim=1)
        .float()
        .div(3)
        .split([num_images * num_truth, num_boxes])
    )
    count = torch.arange(num_images) % (num_truth + 1)
    return truth.view(num_images, num_truth, 4), count, boxes


@pytest.mark.parametrize("rule", [RULE, OTHER_RULE])
def test_matching_in_a_graph(eager_graphs, rule):
    function = compiled_function(matched)
    for shape in [(3, 5, 200), (2, 2, 90), (4, 9, 301), (1, 3, 50), (1, 2, 70)]:
        case = matching_case(*shape)
        for value, expected in zip(function(rule, *case), match_boxes(*case, rule), strict=True):
            assert torch.equal(value, expected)
    assert not function.is_eager
    assert function.num_graphs <= 2


@needs_inductor
def test_matching_through_inductor():
    """One graph, and the bits of NumPy's overlaps: the low-quality matches compare for equality."""
    function = compiled_function(matched)
    for shape in [(3, 5, 200), (2, 3, 1000)]:
        case = matching_case(*shape)
        for value, expected in zip(function(RULE, *case), match_boxes(*case, RULE), strict=True):
            assert torch.equal(value, expected)
    assert (function.num_graphs, function.is_eager) == (1, False)


def test_a_break_is_not_accepted(eager_graphs, caplog):
    def waits(constant, x):
        return x + (constant if x.sum().item() > 0 else 0)

    function = compiled_function(waits)
    with caplog.at_level(logging.WARNING):
        for size in (3, 4):
            assert torch.equal(function(1, torch.ones(size)), torch.full((size,), 2.0))
    assert function.is_eager
    assert len(caplog.records) == 1
    assert "waits runs uncompiled" in caplog.text


def test_a_counter_counts_what_is_not_compiled(eager_graphs):
    function = compiled_function(lambda constant, x: x * constant + 1)
    value = torch.ones(3)
    with count_data_dependent_ops() as count:
        function(2, value)
    assert count.num_ops == 2
    assert (function.num_graphs, eager_graphs) == (0, [])

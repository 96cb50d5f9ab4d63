"""The pooler's operations: no waits, no shape that depends on data, in a graph."""

from __future__ import annotations

import pytest
import torch
from detectron2.modeling.poolers import ROIPooler
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from d2_static_sampler.modeling.pooling import can_pool, levels_of_boxes, pool_rois
from d2_static_sampler.ops import pooling
from d2_static_sampler.profiling.op_counter import count_data_dependent_ops
from tests.helpers import needs_inductor
from tests.ops.pooling_cases import (
    CHANNELS,
    SIDE,
    STRIDES,
    TYPES,
    assert_equals_stock,
    boundary_boxes,
    make_boxes,
    make_features,
    make_pooler,
    of_4_and_1,
    stock_pool,
)


def run_bodies(pooler: ROIPooler, features: list[Tensor], boxes: Tensor) -> list[Tensor]:
    """The bodies for other devices as plain functions: to a counter an operation is but one."""
    features = [feature.detach() for feature in features]
    rois, scales = torch.cat([torch.zeros_like(boxes[0, :, :1]), boxes[0]], 1), [0.25, 0.125]
    level, how = levels_of_boxes(pooler, boxes[:1]), (0, True)
    output = pooling.pool_in_fixed_shapes(features[:2], rois, level, scales, [SIDE, SIDE], *how)
    shape = features[1].shape
    grad = pooling.grad_in_fixed_shapes(output, rois, level == 1, shape, scales[1], *how)
    return [output, grad]


def test_nothing_depends_on_data() -> None:
    case = make_pooler(), make_features(), make_boxes()
    with count_data_dependent_ops() as ours:
        pool_rois(*case).sum().backward()
        run_bodies(*case)
    with count_data_dependent_ops() as stock:
        stock_pool(*case).sum().backward()
    assert len(ours.data_dependent) == 0 < len(STRIDES) <= len(stock.data_dependent)


@of_4_and_1
def test_no_shape_depends_on_data(strides: tuple[int, ...]) -> None:
    pooler, boxes = make_pooler(strides), make_boxes().to("meta")
    features = [f.detach().to("meta").requires_grad_() for f in make_features(strides)]
    output = pool_rois(pooler, features, boxes)
    grads = torch.autograd.grad(output.sum(), features)
    assert output.shape == (80, CHANNELS, SIDE, SIDE)
    assert [grad.shape for grad in grads] == [feature.shape for feature in features]
    if len(strides) > 1:
        output, grad = run_bodies(pooler, features, boxes)
        assert (output.shape, grad.shape) == ((40, CHANNELS, SIDE, SIDE), features[1].shape)
    with pytest.raises(RuntimeError):  # NotImplementedError is one
        stock_pool(pooler, features, boxes)


@pytest.mark.parametrize(
    ("dtype", "strides"), [(torch.float32, STRIDES), (torch.bfloat16, STRIDES[:2])], ids=str
)
def test_one_graph_for_every_count(dtype: torch.dtype, strides: tuple[int, ...]) -> None:
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled, pooler = (
        torch.compile(pool_rois, fullgraph=True, backend=graphs),
        make_pooler(strides),
    )
    for count in (40, 17):
        case = pooler, make_features(strides, 2, dtype), make_boxes(count=count)
        torch._dynamo.maybe_mark_dynamic(case[2], 1)
        assert_equals_stock(*case, pool=compiled, autocast=dtype == torch.bfloat16)
    assert graphs.frame_count == 1


@needs_inductor
@of_4_and_1
def test_inductor_gives_the_same_bits(strides: tuple[int, ...]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(pool_rois, fullgraph=True)
    case = make_pooler(strides, samples=2), make_features(strides, images=1), boundary_boxes()
    assert_equals_stock(*case, pool=compiled)


@pytest.mark.parametrize("how", [(0, True), (2, False)])
def test_the_operations_keep_the_rules(body: str, how: tuple[int, bool]) -> None:
    features, boxes, scales = make_features(), make_boxes(images=1), [1 / s for s in STRIDES]
    rois, level = torch.cat([torch.ones(40, 1), boxes[0]], 1), levels_of_boxes(make_pooler(), boxes)
    forward = features, rois, level, scales, [SIDE, 4], *how
    torch.library.opcheck(pooling.roi_align_levels, forward)
    grad, shape = torch.randn(40, CHANNELS, SIDE, 4), list(features[1].shape)
    backward = grad, rois, level == 1, shape, scales[1], *how
    torch.library.opcheck(pooling.roi_align_level_backward, backward)


def test_deterministic_algorithms_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernels would add in any order, Detectron2's own pooler runs."""
    pooler, features, boxes = make_pooler(), make_features(), make_boxes()
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.setattr(pooler, "forward", lambda *_: "stock")
    assert pool_rois(pooler, [f.to("meta") for f in features], boxes.to("meta")) == "stock"
    assert pool_rois(pooler, features, boxes).shape[0] == 80


def test_which_poolers_are_equalled() -> None:
    class Own(ROIPooler):
        pass

    mixed = make_pooler()
    mixed.level_poolers[2].sampling_ratio = 2
    assert all(can_pool(make_pooler(kind=kind)) for kind in TYPES)
    assert can_pool(make_pooler(STRIDES[:1]))
    for other in (mixed, make_pooler(kind="ROIPool"), torch.nn.Identity()):
        assert not can_pool(other)
    assert not can_pool(Own(SIDE, [0.25], 0, "ROIAlignV2"))
    assert not can_pool(ROIPooler((5, 4), [0.25, 0.125], 0, "ROIAlignV2"))


def test_what_does_not_fit_is_refused() -> None:
    pooler, features, boxes = make_pooler(), make_features(), make_boxes()
    with pytest.raises(ValueError, match="features: 3 tensors, but the pooler has 4 levels"):
        pool_rois(pooler, features[:3], boxes)
    for wrong in (boxes[:1], boxes[0], boxes[..., :3]):
        with pytest.raises(ValueError, match=r"boxes: shape .*, not \(2, K, 4\)"):
            pool_rois(pooler, features, wrong)

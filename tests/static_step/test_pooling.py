"""The pooler with fixed shapes against Detectron2's: the same bits, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from detectron2.modeling.poolers import ROIPooler, assign_boxes_to_levels
from detectron2.structures import Boxes
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from d2_static_sampler.engine.op_counter import count_data_dependent_ops
from d2_static_sampler.static_step import pooling
from d2_static_sampler.static_step.pooling import can_pool, levels_of_boxes, pool_rois

SIZE, CHANNELS, SIDE = 128, 3, 5
STRIDES = (4, 8, 16, 32)
TYPES = ("ROIAlign", "ROIAlignV2")
NAMES = ("spread", "zero area", "at the border", "outside", "on one level", "none")

of_4_and_1 = pytest.mark.parametrize("strides", [STRIDES, STRIDES[2:3]], ids=["4", "1 level"])
of_samples = pytest.mark.parametrize("samples", [0, 2])
of_types = pytest.mark.parametrize("kind", TYPES)


@pytest.fixture(params=["by rows", "in fixed shapes"])
def body(request: pytest.FixtureRequest) -> Iterator[str]:
    """Which body the operations have on this CPU: its own, or that of every other device."""
    with ExitStack() as stack:
        for op in (pooling.roi_align_levels, pooling.roi_align_level_backward):
            stack.enter_context(op.set_kernel_enabled("cpu", request.param == "by rows"))
        yield request.param


def make_pooler(
    strides: tuple[int, ...] = STRIDES, samples: int = 0, kind: str = "ROIAlignV2"
) -> ROIPooler:
    """Boxes of 16, 32 and 64 pixels a side are the smallest on the levels 1, 2 and 3."""
    return ROIPooler(SIDE, [1 / stride for stride in strides], samples, kind, canonical_box_size=32)


def make_features(
    strides: tuple[int, ...] = STRIDES, images: int = 2, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    shapes = [(images, CHANNELS, SIZE // stride, SIZE // stride) for stride in strides]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def make_boxes(name: str = "spread", images: int = 2, count: int = 40) -> Tensor:
    """(images, count, 4) boxes, of sides from 1 to 100 pixels where the name says no more."""
    extent = 100 ** torch.rand(images, count, 2)
    corner = torch.rand(images, count, 2) * (SIZE - extent)
    if name == "zero area":
        extent[:, ::2, 0] = 0
        extent[:, ::3] = 0
    elif name == "at the border":
        corner = torch.where(torch.rand(images, count, 2) < 0.5, 0.0, SIZE - extent)
    elif name == "outside":
        corner = corner + torch.tensor([SIZE, -SIZE]) * torch.rand(images, count, 1) * 2
    elif name == "on one level":
        extent = 35 + extent / 10
    boxes = torch.cat([corner, corner + extent], dim=2)
    return boxes[:, :0] if name == "none" else boxes


def boundary_boxes() -> Tensor:
    """(1, 315, 4) boxes as large as the smallest of a level, and a bit more and less."""
    side = torch.tensor([8.0, 16, 32, 64, 112, 224, 448]).repeat_interleave(15)
    side = torch.cat([side, side.nextafter(side * 2), side.nextafter(side * 0)])
    start = torch.arange(len(side)) % 15 * 1.1
    return torch.stack([start, start, start + side, start + side], dim=1)[None]


def stock_pool(pooler: ROIPooler, features: list[Tensor], boxes: Tensor) -> Tensor:
    return pooler(features, [Boxes(of_image) for of_image in boxes])


def with_gradients(
    pool: Any, pooler: ROIPooler, features: list[Tensor], boxes: Tensor, autocast: bool
) -> list[Tensor]:
    """The output, and the gradients that one random gradient of it gives the features."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = pool(pooler, features, boxes)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, features, grad)]


def assert_equals_stock(*case: Any, autocast: bool = False, pool: Any = pool_rois) -> Tensor:
    """The output, once it and the gradients of the features have the bits of stock's."""
    ours = with_gradients(pool, *case, autocast=autocast)
    stock = with_gradients(stock_pool, *case, autocast=autocast)
    for i, (a, b) in enumerate(zip(ours, stock, strict=True)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        as_integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
        assert torch.equal(a.view(as_integers), b.view(as_integers)), f"output or gradient {i}"
    return ours[0]


@of_4_and_1
@of_samples
@of_types
@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_equal_to_stock(
    body: str, kind: str, samples: int, strides: tuple[int, ...], name: str, images: int
) -> None:
    pooler = make_pooler(strides, samples, kind)
    assert_equals_stock(pooler, make_features(strides, images), make_boxes(name, images))


@of_4_and_1
@of_samples
@of_types
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_equal_to_stock_under_autocast(
    body: str, dtype: torch.dtype, kind: str, samples: int, strides: tuple[int, ...]
) -> None:
    case = make_pooler(strides, samples, kind), make_features(strides, dtype=dtype), make_boxes()
    assert assert_equals_stock(*case, autocast=True).dtype == dtype


@of_4_and_1
@of_samples
def test_equal_to_stock_in_float64(body: str, samples: int, strides: tuple[int, ...]) -> None:
    boxes = make_boxes().double() + 1e-9  # Boxes rounds them to float32
    assert_equals_stock(
        make_pooler(strides, samples), make_features(strides, 2, boxes.dtype), boxes
    )


@of_types
def test_boxes_on_no_level_give_zero_as_in_stock(body: str, kind: str) -> None:
    boxes = make_boxes()
    boxes[0, ::4, 3] = float("nan")
    boxes[1, ::4] = boxes[1, ::4][:, [2, 1, 0, 3]]  # a negative area
    output = assert_equals_stock(make_pooler(kind=kind), make_features(), boxes)
    assert not output.view(2, 40, -1)[:, ::4].any()


@pytest.mark.parametrize("canonical_size", [32, 224])
@pytest.mark.parametrize("strides", [STRIDES, STRIDES[1:3]], ids=["4 levels", "2 levels"])
def test_levels_at_their_borders(strides: tuple[int, ...], canonical_size: int) -> None:
    boxes = torch.cat([boundary_boxes(), make_boxes("spread", 1, 3000)], dim=1)
    pooler = make_pooler(strides)
    pooler.canonical_box_size = canonical_size
    bounds = pooler.min_level, pooler.max_level
    stock = assign_boxes_to_levels([Boxes(boxes[0])], *bounds, canonical_size, 4)
    assert torch.equal(levels_of_boxes(pooler, boxes), stock)
    assert stock.unique().tolist() == list(range(len(strides)))


@of_samples
@of_types
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_values_stay_on_their_level(
    body: str, kind: str, samples: int, value: float
) -> None:
    pooler, features, boxes = make_pooler(STRIDES, samples, kind), make_features(), make_boxes()
    with torch.no_grad():
        features[1].fill_(value)
    output, is_broken = pool_rois(pooler, features, boxes), levels_of_boxes(pooler, boxes) == 1
    assert output[~is_broken].isfinite().all()
    assert not output[is_broken].isfinite().any()
    grad = torch.where(is_broken.view(-1, 1, 1, 1), value, torch.ones_like(output))
    grads = torch.autograd.grad(output, features, grad)
    assert [bool(grad.isfinite().all()) for grad in grads] == [True, False, True, True]


def test_gradients_of_what_needs_them_alone(body: str) -> None:
    class Names(count_data_dependent_ops):
        def record(self, name: str, data_dependent: Any) -> None:
            names.append(name)

    names: list[str] = []
    features, boxes = make_features(), make_boxes().requires_grad_()
    for feature in features[1:3]:
        feature.requires_grad_(False)
    with Names():
        pool_rois(make_pooler(), features, boxes).sum().backward()
    assert names.count("d2_static_sampler::roi_align_level_backward") == 2
    assert [feature.grad is None for feature in features] == [False, True, True, False]
    assert boxes.grad is None


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

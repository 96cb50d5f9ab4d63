"""The counter of data-dependent operations: catches them, names their line, has blind spots."""

from __future__ import annotations

import inspect
from pathlib import Path

import detectron2
import pytest
import torch
from detectron2 import model_zoo
from detectron2.config import get_cfg
from detectron2.modeling import build_model
from detectron2.modeling.sampling import subsample_labels
from detectron2.utils.events import EventStorage
from torchvision.ops import nms

from d2_static_sampler import build_label_sampler
from d2_static_sampler.ops.sampling import sample_by_rank, sample_in_torch
from d2_static_sampler.profiling.op_counter import count_data_dependent_ops

from ..helpers import make_batch

VALUES = torch.tensor([3, 0, 5, 5])
MASK = VALUES > 1
BOXES = torch.tensor([[0.0, 0.0, 2.0, 2.0], [0.0, 0.0, 2.0, 2.1]])
DEPENDENT = {
    "item": lambda: VALUES[0].item(),
    "bool": lambda: bool(VALUES.any()),
    "float": lambda: float(VALUES.sum()),
    "nonzero": lambda: VALUES.nonzero(),
    "where": lambda: torch.where(MASK),
    "index": lambda: VALUES[MASK],
    "uint8 index": lambda: VALUES[MASK.to(torch.uint8)],
    "index put": lambda: VALUES.clone().__setitem__(MASK, VALUES[:3]),
    "masked_select": lambda: VALUES.masked_select(MASK),
    "unique": lambda: VALUES.unique(),
    "unique_consecutive": lambda: VALUES.unique_consecutive(),
    "unique dim": lambda: VALUES[None].unique(dim=0),
    "equal": lambda: torch.equal(VALUES, VALUES),
    "repeat_interleave": lambda: torch.arange(4).repeat_interleave(VALUES),
    "bincount": lambda: VALUES.bincount(),
    "sparse": lambda: VALUES.to_sparse(),
    "nms": lambda: nms(BOXES, torch.tensor([0.5, 0.6]), 0.5),
}
INDEPENDENT = {
    "index by number": lambda: VALUES[torch.tensor([0, 1])],
    "where of three": lambda: torch.where(MASK, VALUES, 0),
    "masked_fill": lambda: VALUES.masked_fill(MASK, 0),
    "topk": lambda: VALUES.topk(2),
    "repeat_interleave of known length": lambda: torch.arange(4).repeat_interleave(
        VALUES, output_size=13
    ),
    "repeat": lambda: VALUES.repeat_interleave(2),
    "slice": lambda: VALUES[1:3].sum(),
}


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("name", DEPENDENT)
def test_catches(name):
    with count_data_dependent_ops() as count:
        DEPENDENT[name]()
    assert count.data_dependent
    assert {op.file for op in count.data_dependent} == {__file__}


@pytest.mark.parametrize("name", INDEPENDENT)
def test_lets_pass(name):
    with count_data_dependent_ops() as count:
        INDEPENDENT[name]()
    assert count.data_dependent == []
    assert count.num_ops > 0


def test_names_the_line():
    with count_data_dependent_ops() as count:
        line = inspect.currentframe().f_lineno + 1
        VALUES.sum().item()
        VALUES.sum().item()
    assert [(op.name, op.line) for op in count.data_dependent] == [
        ("aten::_local_scalar_dense", line),
        ("aten::_local_scalar_dense", line + 1),
    ]
    assert count.by_line().most_common(1)[0][1] == 1


@pytest.mark.parametrize(("select", "limit"), [("rank", 90), ("topk", 35)])
@pytest.mark.parametrize("n", [300, 9000])
def test_a_sampler_has_none_and_as_many_operations_at_every_batch_size(select, limit, n):
    sampler = build_label_sampler("static", select=select)
    num_ops = set()
    for rows in (1, 2, 16):
        labels = torch.randint(-1, 2, (rows, n)).to(torch.int8)
        for _ in range(2):  # the first call may have to ask for memory
            with count_data_dependent_ops() as count:
                sampler(labels, num_samples=256, positive_fraction=0.5, bg_label=0)
            assert count.data_dependent == []
            assert count.num_ops <= limit
        num_ops.add(count.num_ops)
    assert len(num_ops) == 1


@pytest.mark.usefixtures("eager_graphs")
def test_counting_leaves_a_compiled_sampler_compiled():
    sampler = build_label_sampler("compiled", compiles_cpu=True)
    labels = torch.randint(-1, 2, (2, 300))
    asked = {"num_samples": 16, "positive_fraction": 0.5, "bg_label": 0}
    for _ in range(2):
        with count_data_dependent_ops() as count:
            sampler(labels, **asked)
        assert count.num_ops > 50
        assert not sampler.is_eager
        sampler(labels, **asked)
        assert sampler.num_graphs == 1


@pytest.mark.parametrize("rows", [1, 16])
def test_detectron2s_loop_has_two_a_row(rows):
    labels = torch.randint(-1, 2, (rows, 300)).to(torch.int8)
    with count_data_dependent_ops() as count:
        for row in labels:
            subsample_labels(row, 256, 0.5, 0)
    assert len(count.data_dependent) == 2 * rows


def test_a_planted_item_in_a_sampler_is_caught(monkeypatch):
    monkeypatch.setattr(
        "d2_static_sampler.ops.sampling.no_sample",
        lambda labels, _: (labels.sum().item(), (labels,) * 3)[1],
    )
    with count_data_dependent_ops() as count:
        build_label_sampler("static")(
            torch.zeros((2, 0), dtype=torch.int8),
            num_samples=4,
            positive_fraction=0.5,
            bg_label=0,
        )
    assert [op.name for op in count.data_dependent] == ["aten::item"]


def test_operators_of_ours_show_what_is_in_them():
    """The body's operations, whatever the kernel of this device does."""
    labels, words = torch.randint(-1, 2, (2, 300)), torch.randint(1 << 62, (2, 2, 16))
    with count_data_dependent_ops() as count:
        sample_by_rank(labels, words, 16, 8, 0, False)
    with count_data_dependent_ops() as of_body:
        sample_in_torch(labels, words, 16, 8, 0, False)
    assert count.num_ops == of_body.num_ops > 50


@torch.library.custom_op("d2_static_sampler_tests::count_positives", mutates_args=())
def count_positives(x: torch.Tensor) -> torch.Tensor:
    """Waits for the device, unseen."""
    return torch.tensor(int((x > 0).sum()))


def test_blind_spot_operators_of_others():
    """One operation to the counter; its body is run by itself."""
    with count_data_dependent_ops() as count:
        count_positives(VALUES)
    assert count.data_dependent == []
    with count_data_dependent_ops() as count:
        count_positives._init_fn(VALUES)
    assert [op.name for op in count.data_dependent] == ["aten::_local_scalar_dense"]


def test_blind_spot_compiled_functions():
    """A compiled function runs eagerly under the counter: its graph is not what is counted."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    function = torch.compile(lambda x: (x + 1) * 2, backend=backend)
    function(VALUES)
    assert len(graphs) == 1
    with count_data_dependent_ops() as count:
        function(VALUES)
    assert count.num_ops == 2


def zoo_config(name: str) -> str:
    """A file of the model zoo; a checkout that is not installed has it in its own folder."""
    try:
        return model_zoo.get_config_file(name)
    except RuntimeError:
        return str(Path(detectron2.__file__).parents[1] / "configs" / name)


@pytest.mark.parametrize(("images", "expected"), [(1, 52), (2, 83)])
def test_detectron2s_training_forward(images, expected):
    """21 + 31 an image, with release 0.6 and with the main branch."""
    cfg = get_cfg()
    cfg.merge_from_file(zoo_config("COCO-Detection/faster_rcnn_R_50_FPN_1x.yaml"))
    small = ["MODEL.RESNETS.DEPTH", 18, "MODEL.RESNETS.RES2_OUT_CHANNELS", 64]
    cfg.merge_from_list(["MODEL.DEVICE", "cpu", "MODEL.WEIGHTS", "", *small])
    torch.manual_seed(0)
    model = build_model(cfg).train()
    model.proposal_generator.rpn_head.anchor_deltas.weight.data.zero_()
    batch = make_batch((3,) * images, size=256)
    with EventStorage():
        model(batch)
        with count_data_dependent_ops() as count:
            model(batch)
    assert len(count.data_dependent) == expected

"""A model that has trained with a sampler is evaluated, scripted and traced as any other."""

from __future__ import annotations

import pytest
import torch
from detectron2.export import TracingAdapter, scripting_with_instances
from detectron2.structures import Boxes

from d2_static_sampler import install_sampler
from d2_static_sampler.modeling import installed_samplers
from tests.helpers import step
from tests.modeling.models import MODELS

pytestmark = pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")

FPN = ("faster_fpn", (), "")
# Without a mask head Detectron2's C4 heads cannot be scripted.
C4 = ("faster_c4", ("MODEL.MASK_ON", True), "polygon")
FIELDS = {
    "proposal_boxes": Boxes,
    "objectness_logits": torch.Tensor,
    "pred_boxes": Boxes,
    "scores": torch.Tensor,
    "pred_classes": torch.Tensor,
    "pred_masks": torch.Tensor,
}


def eager(model, image):
    return model.inference([{"image": image}], do_postprocess=False)


def script(model, image):
    scripted = scripting_with_instances(model, FIELDS)
    return scripted.inference([{"image": image}], do_postprocess=False)


def trace(model, image):
    adapter = TracingAdapter(model, [{"image": image}], lambda m, x: m.inference(x, None, False))
    # Another image than the one that is looked at: what is traced depends on neither.
    traced = torch.jit.trace(adapter, (torch.rand_like(image) * 255,), check_trace=False)
    return adapter.outputs_schema(traced(image))


@torch.no_grad()
def detections(export, model, image):
    """Boxes, scores and classes of the one image."""
    (found,) = export(model, image)
    return found.pred_boxes.tensor, found.scores, found.pred_classes


@pytest.mark.parametrize("impl", ["static", "compiled"])
@pytest.mark.parametrize(("name", "opts", "masks"), [FPN, C4], ids=["fpn", "c4"])
def test_detections_are_stocks(name, opts, masks, impl):
    tiny = MODELS[name]()._replace(masks=masks)
    model, stock = install_sampler(tiny.build(*opts), impl), tiny.build(*opts)
    step(model, tiny.batch((2, 1)))
    stock.load_state_dict(model.state_dict())
    image = tiny.batch((1,), seed=1)[0]["image"]
    expected = detections(eager, stock.eval(), image)
    assert len(expected[0]) > 0
    for export in (eager, script, trace):
        got = detections(export, model.eval(), image)
        for value, stocks in zip(got, expected, strict=True):
            torch.testing.assert_close(value, stocks)
    assert [head.calls for head in installed_samplers(model).values()] == [1, 1]

"""A model with a sampler is copied, saved, exported and evaluated as any other."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from detectron2.export import TracingAdapter, scripting_with_instances
from detectron2.structures import Boxes

from d2_static_sampler import install_sampler
from d2_static_sampler.modeling import installed_samplers
from tests.helpers import make_batch, small_model, step


@pytest.mark.parametrize("impl", ["naive", "static", "compiled"])
def test_copies_and_files_after_a_step(impl):
    model = install_sampler(small_model(), impl)
    keys = list(small_model().state_dict())
    batch = make_batch((2, 1))
    step(model, batch)
    assert list(model.state_dict()) == keys
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    ]
    for clone in copies:
        assert type(clone.proposal_generator) is type(model.proposal_generator)
        assert type(clone.roi_heads) is type(model.roi_heads)
        assert list(clone.state_dict()) == keys
        losses, _, _ = step(clone, batch)
        assert all(torch.isfinite(loss) for loss in losses.values())
    stock = small_model(seed=5)
    stock.load_state_dict(model.state_dict())


def test_a_copy_samples_on_its_own():
    model = install_sampler(small_model(), "static", seed=3)
    step(model, make_batch((2,)))
    clone = copy.deepcopy(model)
    step(clone, make_batch((2,)))
    assert [head.calls for head in installed_samplers(model).values()] == [1, 1]
    assert [head.calls for head in installed_samplers(clone).values()] == [2, 2]


@pytest.mark.parametrize("impl", ["static", "compiled"])
@pytest.mark.parametrize("export", ["eager", "script", "trace"])
def test_inference_is_stocks(impl, export):
    model = install_sampler(small_model(), impl).eval()
    image = make_batch((1,))[0]["image"]
    expected = boxes_and_scores(small_model().eval().inference([{"image": image}], None, False))
    with torch.no_grad():
        if export == "eager":
            got = boxes_and_scores(model.inference([{"image": image}], None, False))
        elif export == "script":
            fields = {
                "proposal_boxes": Boxes,
                "objectness_logits": torch.Tensor,
                "pred_boxes": Boxes,
                "scores": torch.Tensor,
                "pred_classes": torch.Tensor,
                "pred_masks": torch.Tensor,
            }
            scripted = scripting_with_instances(model, fields)
            got = boxes_and_scores(scripted.inference([{"image": image}], do_postprocess=False))
        else:
            inference = lambda m, inputs: m.inference(inputs, do_postprocess=False)  # noqa: E731
            adapter = TracingAdapter(model, [{"image": image}], inference)
            traced = torch.jit.trace(adapter, (image,), check_trace=False)
            got = boxes_and_scores(adapter.outputs_schema(traced(image)))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def boxes_and_scores(results):
    return results[0].pred_boxes.tensor.detach(), results[0].scores.detach()

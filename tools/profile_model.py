"""The model and the images that tools/profile_step.py looks at.

By default a small Faster R-CNN whose operations are known: in a training forward of 256 x 256
images, 21 + 31 an image of Detectron2's depend on data.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import detectron2
import torch
from config_files import merge_file
from detectron2 import model_zoo
from detectron2.config import CfgNode, get_cfg
from detectron2.modeling import build_model
from detectron2.structures import BitMasks, Boxes, Instances, Keypoints, PolygonMasks
from torch import nn

from d2_static_sampler import add_sampler_config

ZOO_MODEL = "COCO-Detection/faster_rcnn_R_50_FPN_1x.yaml"
SMALL = ["MODEL.RESNETS.DEPTH", 18, "MODEL.RESNETS.RES2_OUT_CHANNELS", 64]
NEED_MORE = ("PrecomputedProposals", "RRPN")
GT_PER_IMAGE = 3


def make_config(path: Path | None, device: str, overrides: Sequence[str]) -> CfgNode:
    """The config of a file, or of the default model.

    Raises:
        AssertionError, KeyError, ValueError: what is no Detectron2 config, or asks for images
            that :func:`make_batch` does not make.
        OSError: there is no such file.
    """
    cfg = get_cfg()
    add_sampler_config(cfg)
    merge_file(cfg, str(path or zoo_config()))
    cfg.merge_from_list(["MODEL.DEVICE", device, *([] if path else SMALL), *overrides])
    if (generator := cfg.MODEL.PROPOSAL_GENERATOR.NAME) in NEED_MORE:
        raise ValueError(
            f"MODEL.PROPOSAL_GENERATOR.NAME is {generator!r}; not {' or '.join(NEED_MORE)}: the "
            "images made here have upright boxes and no proposals"
        )
    return cfg


def zoo_config() -> str:
    """The default model's file; a checkout that is not installed has it in its own folder."""
    try:
        return model_zoo.get_config_file(ZOO_MODEL)
    except RuntimeError:
        return str(Path(detectron2.__file__).parents[1] / "configs" / ZOO_MODEL)


def make_model(cfg: CfgNode) -> nn.Module:
    """A model in training mode, equal for equal configs, whose boxes are its anchors."""
    torch.manual_seed(0)
    model = build_model(cfg).train()
    propose_anchors(model)
    return model


def propose_anchors(model: nn.Module) -> None:
    """Let every RPN of ``model`` propose its anchors as they are, in place.

    The deltas of random weights are infinite, say, or move most anchors out of the image: there
    would be less to do than in a training, and it would depend on the seed.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("rpn_head.anchor_deltas.weight"):
            parameter.data.zero_()


def make_batch(cfg: CfgNode, images: int, height: int, width: int) -> list[dict[str, Any]]:
    """Random images with three boxes each, equal for equal arguments."""
    random = torch.Generator().manual_seed(0)
    scale = torch.tensor([width, height])
    batch = []
    for _ in range(images):
        corner = torch.rand(GT_PER_IMAGE, 2, generator=random) * scale * 0.6
        extent = torch.rand(GT_PER_IMAGE, 2, generator=random) * scale * 0.3 + 8
        truth = Instances((height, width))
        truth.gt_boxes = Boxes(torch.cat([corner, corner + extent], dim=1))
        truth.gt_classes = torch.zeros(GT_PER_IMAGE, dtype=torch.int64)
        _add_details(cfg, truth, random)
        image = torch.rand(3, height, width, generator=random) * 255
        segments = torch.zeros(height, width, dtype=torch.int64)
        batch.append({"image": image, "instances": truth, "sem_seg": segments})
    return batch


def _add_details(cfg: CfgNode, truth: Instances, random: torch.Generator) -> None:
    """Masks and keypoints, for a model that learns them."""
    boxes = truth.gt_boxes.tensor
    if cfg.MODEL.MASK_ON and cfg.INPUT.MASK_FORMAT == "bitmask":
        shape = (GT_PER_IMAGE, *truth.image_size)
        truth.gt_masks = BitMasks(torch.rand(shape, generator=random) > 0.5)
    elif cfg.MODEL.MASK_ON:
        outlines = boxes[:, [0, 1, 2, 1, 2, 3, 0, 3]].double().numpy()
        truth.gt_masks = PolygonMasks([[outline] for outline in outlines])
    if cfg.MODEL.KEYPOINT_ON:
        shape = (GT_PER_IMAGE, cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS, 2)
        place = boxes[:, None, :2] + torch.rand(shape, generator=random) * 8
        is_visible = torch.full_like(place[..., :1], 2)
        truth.gt_keypoints = Keypoints(torch.cat([place, is_visible], dim=2))

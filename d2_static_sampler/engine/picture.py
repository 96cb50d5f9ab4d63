"""A picture of what a detector finds, beside the truth."""

from __future__ import annotations

import itertools
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog, build_detection_test_loader
from detectron2.data.detection_utils import read_image
from detectron2.utils.visualizer import Visualizer
from torch import nn

Image = npt.NDArray[np.uint8]


def draw_detections(
    cfg: CfgNode, model: nn.Module, path: str, *, num_images: int = 6, min_score: float = 0.5
) -> None:
    """Write a PNG: a row an image of ``DATASETS.TEST[0]``, ground truth left, detections right.

    Args:
        cfg: of the model.
        model: trained; its mode is restored.
        path: where the picture goes.
        num_images: the first so many images of the data set.
        min_score: detections below it are not drawn.
    """
    name = cfg.DATASETS.TEST[0]
    truth = {record["file_name"]: record for record in DatasetCatalog.get(name)}
    batches = itertools.islice(build_detection_test_loader(cfg, name), num_images)
    was_training = model.training
    model.eval()
    rows = []
    with torch.no_grad():
        for batch in batches:
            found = model(batch)[0]["instances"].to("cpu")
            confident = found[found.scores >= min_score]
            rows.append(_draw_row(truth[batch[0]["file_name"]], confident, name))
    model.train(was_training)
    width = max(row.shape[1] for row in rows)
    padded = [np.pad(row, ((0, 8), (0, width - row.shape[1]), (0, 0))) for row in rows]
    cv2.imwrite(path, np.concatenate(padded)[:, :, ::-1])


def _draw_row(record: dict[str, Any], found: Any, data_set: str) -> Image:
    image = read_image(record["file_name"], format="RGB")
    metadata = MetadataCatalog.get(data_set)
    scale = max(1.0, 320 / image.shape[1])
    truth = Visualizer(image, metadata, scale).draw_dataset_dict(_drawable(record))
    detections = Visualizer(image, metadata, scale).draw_instance_predictions(found)
    return np.concatenate([truth.get_image(), detections.get_image()], axis=1)


def _drawable(record: dict[str, Any]) -> dict[str, Any]:
    """The record without masks or keypoints where some annotations lack them.

    Detectron2's Visualizer takes it for granted that all have what the first has.
    """
    annotations = record["annotations"]
    lengths = {len(a.get("keypoints") or ()) for a in annotations}
    lacking = set() if all(a.get("segmentation") for a in annotations) else {"segmentation"}
    if len(lengths) > 1 or any(length == 0 or length % 3 for length in lengths):
        lacking.add("keypoints")
    kept = [{key: a[key] for key in a.keys() - lacking} for a in annotations]
    return {**record, "annotations": kept}

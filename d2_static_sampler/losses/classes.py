"""Classification losses of Detectron2 over the slots that are valid, and what it logs of them.

R slots, B images, K slots an image, C foreground classes; class C is the background.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_IGNORED = -100  # cross_entropy's own mark


class ClassStats(NamedTuple):
    """The counts behind ``_log_classification_stats``, each () int64.

    Attributes:
        num_valid: slots that are valid.
        num_fg: of these, slots of a foreground class.
        num_accurate: valid slots whose highest score is that of their class.
        num_fg_accurate: of these, slots of a foreground class.
        num_false_negative: foreground slots whose highest score is the background's.
    """

    num_valid: Tensor
    num_fg: Tensor
    num_accurate: Tensor
    num_fg_accurate: Tensor
    num_false_negative: Tensor


def class_loss_mean(scores: Tensor, classes: Tensor, is_valid: Tensor) -> Tensor:
    """The mean cross entropy of the valid slots, as ``FastRCNNOutputLayers.losses`` takes it.

    Args:
        scores: (R, C + 1) floating logits; NaN and inf are harmless where not valid.
        classes: (R,) int64 in 0 .. C; anything where not valid.
        is_valid: (R,) bool.

    Returns:
        () in the type of ``scores`` (float32 under autocast); 0, connected to the graph, where
        nothing is valid.
    """
    scores = torch.where(is_valid[:, None], scores, 0.0)
    classes = torch.where(is_valid, classes, _IGNORED)
    total = F.cross_entropy(scores, classes, ignore_index=_IGNORED, reduction="sum")
    return total / is_valid.sum().clamp(min=1)


def sigmoid_class_loss(scores: Tensor, classes: Tensor, is_valid: Tensor) -> Tensor:
    """Binary cross entropy of the foreground scores, over the number of valid slots.

    This is ``sigmoid_cross_entropy_loss`` of newer Detectron2, without federated loss.

    Args:
        scores: (R, C + 1) floating logits, of which the background's are unused; NaN and inf
            are harmless where not valid.
        classes: (R,) int64 in 0 .. C; anything where not valid.
        is_valid: (R,) bool.

    Returns:
        () in the type of ``scores`` (float32 under autocast); 0, connected to the graph, where
        nothing is valid.
    """
    logits = torch.where(is_valid[:, None], scores[:, :-1], 0.0)
    of_class = torch.arange(logits.shape[1], device=classes.device)
    target = (classes[:, None] == of_class).to(scores.dtype)
    weight = is_valid[:, None].to(scores.dtype)
    total = F.binary_cross_entropy_with_logits(logits, target, weight=weight, reduction="sum")
    return total / is_valid.sum().clamp(min=1)


@torch.no_grad()
def class_stats(scores: Tensor, classes: Tensor, is_valid: Tensor) -> ClassStats:
    """Count what Detectron2 logs of a classification, without copying it to the host.

    Args:
        scores: (R, C + 1) floating.
        classes: (R,) int64 in 0 .. C; anything where not valid.
        is_valid: (R,) bool.
    """
    background = scores.shape[1] - 1
    predicted = scores.argmax(dim=1)
    is_fg = (classes >= 0) & (classes < background) & is_valid
    is_accurate = (predicted == classes) & is_valid
    is_missed = (predicted == background) & is_fg
    counted = torch.stack((is_valid, is_fg, is_accurate, is_accurate & is_fg, is_missed))
    return ClassStats(*counted.sum(dim=1).unbind())


def objectness_loss_sum(logits: Tensor, is_pos: Tensor, is_valid: Tensor) -> Tensor:
    """Binary cross entropy summed over the valid slots, as ``RPN.losses`` takes it.

    Args:
        logits: (B, K) floating; NaN and inf are harmless where not valid.
        is_pos: (B, K) bool; anything where not valid.
        is_valid: (B, K) bool.

    Returns:
        () float32, from float64 logits too, as with Detectron2; 0, connected to the graph,
        where nothing is valid.
    """
    logits = torch.where(is_valid, logits, 0.0)
    return F.binary_cross_entropy_with_logits(
        logits, is_pos.to(torch.float32), weight=is_valid.to(torch.float32), reduction="sum"
    )

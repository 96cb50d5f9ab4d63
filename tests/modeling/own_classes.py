"""A user's own subclasses of heads, registered by name."""

from __future__ import annotations

from typing import Any

from detectron2.modeling import PROPOSAL_GENERATOR_REGISTRY, ROI_HEADS_REGISTRY
from detectron2.modeling.proposal_generator.rpn import RPN
from detectron2.modeling.roi_heads import StandardROIHeads
from detectron2.structures import Instances
from torch import Tensor


@PROPOSAL_GENERATOR_REGISTRY.register()
class OwnRPN(RPN):
    """A user's class: another weight for each loss."""

    def losses(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        return {name: loss * 0.5 for name, loss in super().losses(*args, **kwargs).items()}


@ROI_HEADS_REGISTRY.register()
class OwnROIHeads(StandardROIHeads):
    """A user's class: it looks at the sampled proposals."""

    def _forward_box(self, features: Any, proposals: list[Instances]) -> Any:
        self.sampled = [len(x) for x in proposals]
        return super()._forward_box(features, proposals)

"""What the static step keeps with a module that it may take the place of."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from detectron2.structures import Boxes, Instances
from torch import nn

from .coverage import first_fault
from .padded import PaddedProposals

logger = logging.getLogger(f"detectron2.{__name__}")

ATTRIBUTE = "_static_part"  # of the module


@dataclass
class StaticPart:
    """A module's part of the static step.

    Attributes:
        name: of the module in its model.
        kind: which of Detectron2's classes the static step equals.
        graphs: what is compiled of it, None for nothing.
        said: why it has been left out so far.
    """

    name: str
    kind: type
    graphs: Any = None
    said: set[str] = field(default_factory=set)

    def leave_out(self, fault: str) -> None:
        """Say why this step is Detectron2's, once for each reason."""
        if fault not in self.said:
            self.said.add(fault)
            logger.warning(f"STATIC_STEP leaves out {self.name or 'the model'}: {fault}")


def part_of(module: nn.Module) -> StaticPart:
    """The part that a module was given when the static step was installed."""
    part: StaticPart = vars(module)[ATTRIBUTE]
    return part


def takes_step(module: nn.Module, truth: Iterable[Instances] = (), proposals: Any = ()) -> bool:
    """Whether the static step takes the module's place now; what speaks against it is said once.

    Args:
        module: one with a part.
        truth: the ground truth of this step.
        proposals: those that were handed to the module.
    """
    part = part_of(module)
    fault = first_fault(module, part.kind) or _fault_of_boxes(truth, proposals)
    if fault is not None:
        part.leave_out(fault)
    return fault is None


def _fault_of_boxes(truth: Iterable[Instances], proposals: Sequence[Instances]) -> str | None:
    given = [image.gt_boxes for image in truth]
    if not isinstance(proposals, PaddedProposals):
        given += [image.proposal_boxes for image in proposals]
    kinds = {type(boxes).__name__ for boxes in given if type(boxes) is not Boxes}
    return f"boxes are given as {', '.join(sorted(kinds))}" if kinds else None

"""Counts the operations that make a GPU wait, or have a shape that depends on data, on a CPU.

The figure does not move with the machine. What it cannot see:

- what is inside a compiled function: it runs eagerly here. Look at its captured graphs instead.
- what is inside an operator of another package. Of this package's own the body is counted, which
  is what a device without a kernel for it runs.
- copies between the host and a device, which wait on CUDA: ``torch.tensor(values, device=...)``,
  ``t.cpu()``, ``t.numpy()``, ``t.tolist()``, ``tensor_split`` at places in a tensor. On a CPU
  they are no operation, or no copy.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Iterable
from types import FrameType
from typing import Any, NamedTuple

import torch
import torchvision
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..modeling.slots import every_slot
from ..ops import BODIES

_ALWAYS = {
    "aten::_local_scalar_dense",  # item(), bool(t), float(t)
    "aten::_to_sparse",
    "aten::_unique",
    "aten::_unique2",
    "aten::bincount",
    "aten::equal",
    "aten::is_nonzero",
    "aten::item",
    "aten::masked_select",
    "aten::nonzero",
    "aten::unique_consecutive",
    "aten::unique_dim",
    "aten::unique_dim_consecutive",
    "aten::repeat_interleave.Tensor",
    "detectron2::nms_rotated",
    "torchvision::nms",
}
_BY_MASK = {
    "aten::_index_put_impl_",
    "aten::_unsafe_index.Tensor",
    "aten::_unsafe_index_put",
    "aten::index.Tensor",
    "aten::index.Tensor_out",
    "aten::index_put",
    "aten::index_put_",
}
_LIBRARIES = tuple(module.__path__[0] + os.sep for module in (torch, torchvision))


class DataDependentOp(NamedTuple):
    """One operation, and the line of Python that issued it.

    Attributes:
        name: as ``aten::nonzero``.
        file: the innermost file outside of torch and torchvision.
        line: in that file.
    """

    name: str
    file: str
    line: int


class count_data_dependent_ops(TorchDispatchMode):
    """A context that counts what runs in it.

    ::

        with count_data_dependent_ops() as count:
            model(batch)
        print(len(count.data_dependent), "of", count.num_ops)
        print(count.by_line().most_common())

    Attributes:
        num_ops: how many operations ran, views among them.
        data_dependent: those that depend on data, in their order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_ops = 0
        self.data_dependent: list[DataDependentOp] = []
        self._every_slot: list[contextlib.AbstractContextManager[None]] = []

    def __enter__(self) -> Any:
        self._every_slot.append(every_slot())
        self._every_slot[-1].__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._every_slot.pop().__exit__(*error)

    def by_line(self) -> Counter[DataDependentOp]:
        """How often each line issued each operation."""
        return Counter(self.data_dependent)

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Count one operation and run it."""
        name = func._schema.name
        if body := BODIES.get(name):
            with self:
                return body(*args)
        depends = _depends_on_data(func, args, kwargs or {})
        self.record(name, DataDependentOp(name, *_issued_at()) if depends else None)
        return func(*args, **(kwargs or {}))

    def record(self, name: str, data_dependent: DataDependentOp | None) -> None:
        """Count one operation that is about to run; a subclass may keep more of it.

        Args:
            name: as ``aten::nonzero``.
            data_dependent: the operation and its line where it depends on data, else None.
        """
        self.num_ops += 1
        if data_dependent:
            self.data_dependent.append(data_dependent)


def _depends_on_data(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    packet, full = func._schema.name, func.name()
    if kwargs.get("output_size") is not None:  # repeat_interleave with a known length
        return False
    if packet in _ALWAYS or full in _ALWAYS:
        return True
    if packet in _BY_MASK or full in _BY_MASK:
        return any(isinstance(index, Tensor) and _is_mask(index) for index in args[1])
    return False


def _is_mask(index: Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def _issued_at() -> tuple[str, int]:
    frame: FrameType | None = sys._getframe(2)
    while frame and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame else ("", 0)

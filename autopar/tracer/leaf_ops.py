"""A repeated block as one op while the top level is traced: autopar::block and autopar::block_backward.

They exist for tracing only: they know shapes (set by `shapes_known`) and compute nothing. A `Graph` names them "autopar.block" and
"autopar.block_backward"; whoever runs a graph runs the block's own graph there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.ops.custom import LIBRARY


@dataclass(frozen=True, slots=True)
class Likeness:
    """Shape, strides and dtype of a tensor to come."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Likeness:
        """That of a tensor."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    def empty(self, *, requires_grad: bool = False) -> Tensor:
        """An empty tensor like it, on the CPU."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu", requires_grad=requires_grad)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafShapes:
    """Of one block.

    Attributes:
        outputs: of the forward call.
        differentiable: for each output whether it has a tangent.
        gradients: for each tensor argument its gradient's likeness, None if it has none.
    """

    outputs: tuple[Likeness, ...]
    differentiable: tuple[bool, ...]
    gradients: tuple[Likeness | None, ...]


_known: dict[str, LeafShapes] = {}


@contextmanager
def shapes_known(shapes: Mapping[str, LeafShapes]) -> Iterator[None]:
    """For the time of a trace the two ops know these blocks."""
    _known.update(shapes)
    try:
        yield
    finally:
        for key in shapes:
            _known.pop(key, None)


def _block(key: str, instance: int, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.empty() for x in _known[key].outputs]


def _block_backward(key: str, instance: int, tensors: Sequence[Tensor], tangents: Sequence[Tensor]) -> list[Tensor]:
    return [x.empty() for x in _known[key].gradients if x is not None]


LIBRARY.define("block(str key, int instance, Tensor[] tensors) -> Tensor[]")
LIBRARY.define("block_backward(str key, int instance, Tensor[] tensors, Tensor[] tangents) -> Tensor[]")
torch.library.register_fake("autopar::block", _block, lib=LIBRARY)
torch.library.register_fake("autopar::block_backward", _block_backward, lib=LIBRARY)


class BlockFunction(torch.autograd.Function):
    """The autograd of the two ops."""

    @staticmethod
    def forward(ctx: Any, key: str, instance: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Tensor arguments of a block -> its outputs."""
        ctx.key, ctx.instance = key, instance
        ctx.save_for_backward(*tensors)
        outputs = tuple(torch.ops.autopar.block(key, instance, list(tensors)))
        flags = _known[key].differentiable
        ctx.mark_non_differentiable(*[x for x, flag in zip(outputs, flags, strict=True) if not flag])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the outputs -> gradients of the tensor arguments."""
        shapes = _known[ctx.key]
        tangents = [g.contiguous() for g, flag in zip(grads, shapes.differentiable, strict=True) if flag]
        made = iter(torch.ops.autopar.block_backward(ctx.key, ctx.instance, list(ctx.saved_tensors), tangents))
        return (None, None, *(None if x is None else next(made) for x in shapes.gradients))

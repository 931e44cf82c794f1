"""A repeated block as one op while the top level is traced: autopar::block and autopar::block_backward.

They exist for tracing only: they know shapes (set by `shapes_known`) and compute nothing. A `Graph` names them
"autopar.block" and "autopar.block_backward"; whoever runs a graph runs the block's own graph there.
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
    def at_border(cls, tensor: Tensor) -> Likeness:
        """How a tensor crosses a block's border: contiguous, but for expanded ones (masks), which stay as they are."""
        plain = tensor.is_contiguous() or not is_expanded(tensor)
        stride = torch.empty(tensor.shape, device="meta").stride() if plain else tensor.stride()
        return cls(tuple(tensor.shape), tuple(stride), tensor.dtype)

    def empty(self, *, requires_grad: bool = False) -> Tensor:
        """An empty tensor like it, on the CPU."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu", requires_grad=requires_grad)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafShapes:
    """Of one block; its parameters and buffers are no arguments of the two ops (`convert` adds them).

    Attributes:
        inputs: of its tensor inputs.
        outputs: of the forward call.
        differentiable: for each output whether it has a tangent.
        gradients: for each tensor input its gradient's likeness, None if it has none.
    """

    inputs: tuple[Likeness, ...]
    outputs: tuple[Likeness, ...]
    differentiable: tuple[bool, ...]
    gradients: tuple[Likeness | None, ...]


_known: dict[str, LeafShapes] = {}


def is_expanded(tensor: Tensor) -> bool:
    """Whether several entries share one place in memory."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


@contextmanager
def shapes_known(shapes: Mapping[str, LeafShapes]) -> Iterator[None]:
    """For the time of a trace the two ops know these blocks."""
    _known.update(shapes)
    try:
        yield
    finally:
        for key in shapes:
            _known.pop(key, None)


def _block(key: str, instance: int, anchor: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.empty() for x in _known[key].outputs]


def _block_backward(key: str, instance: int, tensors: Sequence[Tensor], tangents: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty((), device="cpu"), *(x.empty() for x in _known[key].gradients if x is not None)]


LIBRARY.define("block(str key, int instance, Tensor anchor, Tensor[] tensors) -> Tensor[]")  # type: ignore[no-untyped-call]
LIBRARY.define("block_backward(str key, int instance, Tensor[] tensors, Tensor[] tangents) -> Tensor[]")  # type: ignore[no-untyped-call]
torch.library.register_fake("autopar::block", _block, lib=LIBRARY)
torch.library.register_fake("autopar::block_backward", _block_backward, lib=LIBRARY)


class BlockFunction(torch.autograd.Function):
    """The autograd of the two ops.

    `anchor` is a scalar that needs a gradient: with it a block has a backward even if only its parameters need one.
    """

    @staticmethod
    def forward(ctx: Any, key: str, instance: int, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Tensor inputs of a block -> its outputs."""
        ctx.key, ctx.instance = key, instance
        ctx.save_for_backward(*tensors)
        outputs = tuple(torch.ops.autopar.block(key, instance, anchor, list(tensors)))
        flags = _known[key].differentiable
        ctx.mark_non_differentiable(*[x for x, flag in zip(outputs, flags, strict=True) if not flag])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the outputs -> gradients of the tensor inputs."""
        shapes = _known[ctx.key]
        tangents = [g.contiguous() for g, flag in zip(grads, shapes.differentiable, strict=True) if flag]
        anchor, *rest = torch.ops.autopar.block_backward(ctx.key, ctx.instance, list(ctx.saved_tensors), tangents)
        made = iter(rest)
        return (None, None, anchor, *(None if x is None else next(made) for x in shapes.gradients))

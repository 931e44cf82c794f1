"""A region's call as one op while a graph is traced: autopar::region and autopar::region_backward.

As with blocks (`leaf_ops`), the ops know shapes (set by `regions_known`) and compute nothing. The forward's last output
is a token: it stands for what the run keeps between forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.ops.custom import LIBRARY
from autopar.tracer.leaf_ops import Likeness


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionShapes:
    """Of one call of a region.

    Attributes:
        outputs: its output tensors, then new values of the buffers that it updates.
        differentiable: for each of these whether it has a tangent.
        gradients: for each argument its gradient's likeness, None if it has none.
    """

    outputs: tuple[Likeness, ...]
    differentiable: tuple[bool, ...]
    gradients: tuple[Likeness | None, ...]


_known: dict[str, RegionShapes] = {}


@contextmanager
def regions_known(shapes: Mapping[str, RegionShapes]) -> Iterator[None]:
    """For the time of a trace the two ops know these regions."""
    _known.update(shapes)
    try:
        yield
    finally:
        for key in shapes:
            _known.pop(key, None)


def _region(key: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [*(x.empty() for x in _known[key].outputs), torch.empty((), dtype=torch.uint8, device="cpu")]


def _region_backward(key: str, token: Tensor, tangents: Sequence[Tensor]) -> list[Tensor]:
    return [x.empty() for x in _known[key].gradients if x is not None]


LIBRARY.define("region(str key, Tensor[] tensors) -> Tensor[]")  # type: ignore[no-untyped-call]
LIBRARY.define("region_backward(str key, Tensor token, Tensor[] tangents) -> Tensor[]")  # type: ignore[no-untyped-call]
torch.library.register_fake("autopar::region", _region, lib=LIBRARY)
torch.library.register_fake("autopar::region_backward", _region_backward, lib=LIBRARY)


class RegionFunction(torch.autograd.Function):
    """The autograd of the two ops. Gives the outputs, the updated buffers and the token."""

    @staticmethod
    def forward(ctx: Any, key: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Arguments of a region: its tensor inputs, then its parameters and buffers."""
        *outputs, token = torch.ops.autopar.region(key, list(tensors))
        ctx.key = key
        ctx.save_for_backward(token)
        flags = _known[key].differentiable
        ctx.mark_non_differentiable(token, *[x for x, flag in zip(outputs, flags, strict=True) if not flag])
        return (*outputs, token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the outputs -> gradients of the arguments."""
        shapes = _known[ctx.key]
        (token,) = ctx.saved_tensors
        tangents = [g.contiguous() for g, flag in zip(grads, shapes.differentiable, strict=False) if flag]
        made = iter(torch.ops.autopar.region_backward(ctx.key, token, tangents))
        return (None, *(None if x is None else next(made) for x in shapes.gradients))

"""Operators that torch lacks: the pick of one entry per row, and its adjoint, such that the picked dim can be cut.

    pick(x, dim, index)[...] = x[..., index[...], ...] along dim, 0 where index is outside 0 .. size-1
    place(values, dim, index, size) = the t of size `size` along dim with t[..., index[...], ...] = values[...], else 0

With `dim` cut in pieces at offsets o, pick(x) = sum over pieces of pick(piece, dim, index - o), and each piece of
place(...) is place(values, dim, index - o, piece size).
"""

from __future__ import annotations

import torch
from torch import Tensor


def _pick(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """x: any shape; index: x.shape without `dim`, integers -> x.shape without `dim`, of x's dtype."""
    inside = (index >= 0) & (index < x.shape[dim])
    safe = torch.where(inside, index, 0).unsqueeze(dim)
    return torch.where(inside, x.gather(dim, safe).squeeze(dim), torch.zeros((), dtype=x.dtype, device=x.device))


def _place(values: Tensor, dim: int, index: Tensor, size: int) -> Tensor:
    """values, index: equal shapes -> values.shape with `size` inserted at `dim`."""
    inside = (index >= 0) & (index < size)
    safe = torch.where(inside, index, 0).unsqueeze(dim)
    kept = torch.where(inside, values, torch.zeros((), dtype=values.dtype, device=values.device))
    out = values.new_zeros(_with_dim(values, dim, size))
    return out.scatter_(dim, safe, kept.unsqueeze(dim)) if size else out


def _pick_fake(x: Tensor, dim: int, index: Tensor) -> Tensor:
    shape = list(x.shape)
    del shape[dim]
    if list(index.shape) != shape:
        raise ValueError(f"pick: index has shape {list(index.shape)}, wanted {shape} (x without dim {dim})")
    return x.new_empty(shape)


def _place_fake(values: Tensor, dim: int, index: Tensor, size: int) -> Tensor:
    return values.new_empty(_with_dim(values, dim, size))


def _with_dim(values: Tensor, dim: int, size: int) -> list[int]:
    shape = list(values.shape)
    shape.insert(dim if dim >= 0 else len(shape) + 1 + dim, size)
    return shape


LIBRARY = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
"""Kept alive: its operators are `torch.ops.autopar.*`."""

LIBRARY.define("pick(Tensor x, int dim, Tensor index) -> Tensor")  # type: ignore[no-untyped-call]
LIBRARY.define("place(Tensor values, int dim, Tensor index, int size) -> Tensor")  # type: ignore[no-untyped-call]
LIBRARY.impl("pick", _pick, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
LIBRARY.impl("place", _place, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
LIBRARY.impl("pick", _pick_fake, "Meta")  # type: ignore[no-untyped-call]
LIBRARY.impl("place", _place_fake, "Meta")  # type: ignore[no-untyped-call]

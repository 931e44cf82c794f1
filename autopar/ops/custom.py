"""Operators that torch lacks: the pick of one entry per row, and its adjoint, such that the picked dim can be cut.

    pick(x, dim, index)[...] = x[..., index[...], ...] along dim, 0 where index is outside 0 .. size-1
    place(values, dim, index, size) = the t of size `size` along dim with t[..., index[...], ...] = values[...], else 0

With `dim` cut in pieces at offsets o, pick(x) = sum over pieces of pick(piece, dim, index - o), and each piece of
place(...) is place(values, dim, index - o, piece size).

And experts: tokens that go to k of E matrices each. A token's k places are its *slots* [..., k]; what is done to a slot
depends on its expert and on nothing else, so slots are brought into an order by expert (*rows*), multiplied group by
group, and brought back. Which order that is nobody sees: it is a rank's own.

    route(index, E) = (ends, order)        index: expert of each slot [..., k]; the rows of expert e are those from
                                           ends[e - 1] to ends[e]; order: slot of each row, by expert, then by slot,
                                           in the shape of index, so that it is cut as tokens are
    spread(slots, ends, order) = rows      slots [..., k, H] -> rows [M, H]
    collect(rows, ends, order, size)       its inverse: rows [M, H] -> slots [*size, H]
    grouped_mm(rows, weights, ends)        rows [M, K], weights [E, K, N] -> [M, N], each row times its expert's matrix
    grouped_outer(rows, grads, ends)       rows [M, K], grads [M, N] -> [E, K, N], sums over each expert's rows
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

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


# Experts --------------------------------------------------------------------------------------------------------------


def _route(index: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """index: [..., k] -> (ends [experts] int32, order [..., k] int64)."""
    flat = index.reshape(-1)
    ends = torch.bincount(flat, minlength=experts).cumsum(0).to(torch.int32)
    return ends, torch.argsort(flat, stable=True).view(index.shape)


def _spread(slots: Tensor, ends: Tensor, order: Tensor) -> Tensor:
    """slots: [..., k, H], in which a token may be there once for all k -> [slots, H]."""
    *_, k, width = slots.shape
    flat = order.reshape(-1)
    token, place = flat // k, flat % k
    return (
        slots.reshape(-1, k, width)[token, place] if slots.stride(-2) else slots.select(-2, 0).reshape(-1, width)[token]
    )


def _collect(rows: Tensor, ends: Tensor, order: Tensor, size: Sequence[int]) -> Tensor:
    """rows: [slots, H] -> [*size, H]."""
    return torch.empty_like(rows).index_copy_(0, order.reshape(-1), rows).view(*size, rows.shape[1])


def _grouped_mm(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """rows: [M, K], weights: [E, K, N], ends: [E] -> [M, N]."""
    if _has_kernel(rows, weights):
        found: Tensor = torch._grouped_mm(rows, weights, offs=ends)
        return found
    out = rows.new_empty(rows.shape[0], weights.shape[2])
    for e, (first, last) in enumerate(_groups(ends)):
        torch.mm(rows[first:last], weights[e], out=out[first:last])
    return out


def _grouped_outer(rows: Tensor, grads: Tensor, ends: Tensor) -> Tensor:
    """rows: [M, K], grads: [M, N], ends: [E] -> [E, K, N]; zeros of an expert without rows."""
    if _has_kernel(rows, grads):
        found: Tensor = torch._grouped_mm(rows.t(), grads, offs=ends)
        return found
    out = rows.new_empty(ends.shape[0], rows.shape[1], grads.shape[1])
    for e, (first, last) in enumerate(_groups(ends)):
        torch.mm(rows[first:last].t(), grads[first:last], out=out[e])
    return out


def _groups(ends: Tensor) -> list[tuple[int, int]]:
    """First row and last of each expert. One wait for the device."""
    last: list[int] = ends.tolist()
    return list(zip([0, *last[:-1]], last, strict=True))


KERNEL_BYTES = 16
"""What rows of torch's grouped kernel are aligned to."""


def _has_kernel(a: Tensor, b: Tensor) -> bool:
    """Whether torch multiplies such groups in one kernel: bfloat16 on GPUs of compute capability 8 or more."""
    if not a.is_cuda or a.dtype != torch.bfloat16 or b.dtype != torch.bfloat16 or not a.numel():
        return False
    if torch.cuda.get_device_capability(a.device)[0] < 8:
        return False
    widths = {a.shape[-1], b.shape[-1], b.shape[-2]}
    return all(n * a.element_size() % KERNEL_BYTES == 0 for n in widths if n != a.shape[0])


def _route_fake(index: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    return index.new_empty((experts,), dtype=torch.int32), index.new_empty(index.shape, dtype=torch.int64)


def _spread_fake(slots: Tensor, ends: Tensor, order: Tensor) -> Tensor:
    return slots.new_empty((math.prod(slots.shape[:-1]), slots.shape[-1]))


def _collect_fake(rows: Tensor, ends: Tensor, order: Tensor, size: Sequence[int]) -> Tensor:
    return rows.new_empty((*size, rows.shape[1]))


def _grouped_mm_fake(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty((rows.shape[0], weights.shape[2]))


def _grouped_outer_fake(rows: Tensor, grads: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty((ends.shape[0], rows.shape[1], grads.shape[1]))


def _keep_order(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1], inputs[2])
    ctx.size = list(inputs[0].shape[:-1])


def _spread_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.autopar.collect.default(grad, *ctx.saved_tensors, ctx.size), None, None


def _collect_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.autopar.spread.default(grad, *ctx.saved_tensors), None, None, None


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grouped_mm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, weights, ends = ctx.saved_tensors
    wants = ctx.needs_input_grad
    back = torch.ops.autopar.grouped_mm.default(grad, weights.transpose(1, 2), ends) if wants[0] else None
    outer = torch.ops.autopar.grouped_outer.default(rows, grad, ends) if wants[1] else None
    return back, outer, None


def _define(name: str, schema: str, run: Any, fake: Any) -> None:
    LIBRARY.define(name + schema)  # type: ignore[no-untyped-call]
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    LIBRARY.impl(name, fake, "Meta")  # type: ignore[no-untyped-call]


_define("route", "(Tensor index, int experts) -> (Tensor, Tensor)", _route, _route_fake)
_define("spread", "(Tensor slots, Tensor ends, Tensor order) -> Tensor", _spread, _spread_fake)
_define("collect", "(Tensor rows, Tensor ends, Tensor order, int[] size) -> Tensor", _collect, _collect_fake)
_define("grouped_mm", "(Tensor rows, Tensor weights, Tensor ends) -> Tensor", _grouped_mm, _grouped_mm_fake)
_define("grouped_outer", "(Tensor rows, Tensor grads, Tensor ends) -> Tensor", _grouped_outer, _grouped_outer_fake)
for _name, _back, _keep in (
    ("spread", _spread_backward, _keep_order),
    ("collect", _collect_backward, _keep_order),
    ("grouped_mm", _grouped_mm_backward, _keep_inputs),
):
    torch.library.register_autograd(f"autopar::{_name}", _back, setup_context=_keep, lib=LIBRARY)

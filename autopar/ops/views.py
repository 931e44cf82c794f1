"""Ops that only rearrange: views, reshapes, slices, concatenations.

A view groups dims into factors: [4, 6] -> [2, 12] is one group, [2, 6] -> [2, 2, 3] are two. Only the first dim of a
group can be cut (by an n that divides the first dim on both sides), since only then is a piece contiguous in row-major
order. Every one of these ops is linear, so sums stay sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from autopar.ir.graph import ITEM_BYTES, Node
from autopar.ir.layout import P, R, S
from autopar.ir.strategy import Rule
from autopar.ops.entry import (
    LocalCall,
    LocalContext,
    Metas,
    OpEntry,
    arg,
    dim_of,
    each_out,
    out_shape,
    rule,
)


def view_factors(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """(dim before, dim after) of the first dims, of size above 1, of each group."""
    found: list[tuple[int, int]] = []
    if 0 in before or 0 in after:
        return ()
    i = j = 0
    while i < len(before) and j < len(after):
        if before[i] == 1:
            i += 1
            continue
        if after[j] == 1:
            j += 1
            continue
        first = (i, j)
        left, right = before[i], after[j]
        while left != right:
            if left < right:
                i += 1
                left *= before[i]
            else:
                j += 1
                right *= after[j]
        found.append(first)
        i, j = i + 1, j + 1
    return tuple(found)


def _sum(node: Node, metas: Metas) -> Rule:
    return Rule(each_out(node, P), (P,) * len(metas))


def mapped(node: Node, metas: Metas, dims: Iterable[tuple[int, int]]) -> Iterator[Rule]:
    """Rules of an op with one argument whose dim `a` becomes dim `b` of every output, for (a, b) in `dims`."""
    for a, b in dims:
        yield Rule(each_out(node, S(b)), (S(a),) * len(metas))
    yield _sum(node, metas)


def _view(node: Node, metas: Metas) -> Iterable[Rule]:
    return mapped(node, metas, view_factors(metas[0].shape, out_shape(node)))


def _identity(node: Node, metas: Metas) -> Iterable[Rule]:
    return mapped(node, metas, ((d, d) for d in range(len(metas[0].shape))))


def _to_copy(node: Node, metas: Metas) -> Iterable[Rule]:
    yield from (rule((S(d),), S(d)) for d in range(len(metas[0].shape)))
    out = node.outputs[0]
    floats = out is not None and "float" in metas[0].dtype and "float" in out.meta.dtype
    if out is not None and floats and ITEM_BYTES[out.meta.dtype] >= ITEM_BYTES[metas[0].dtype]:
        yield rule((P,), P)  # a narrower type would round each summand


def _permute(node: Node, metas: Metas) -> Iterable[Rule]:
    order = [dim_of(d, len(metas[0].shape)) for d in arg(node, 1, "dims")]
    return mapped(node, metas, ((d, i) for i, d in enumerate(order)))


def _transpose(node: Node, metas: Metas) -> Iterable[Rule]:
    ndim = len(metas[0].shape)
    a, b = (
        (0, 1) if node.op == "aten.t.default" else (dim_of(arg(node, 1, "dim0"), ndim), dim_of(arg(node, 2, ""), ndim))
    )
    if ndim < 2:
        return _identity(node, metas)
    swap = {a: b, b: a}
    return mapped(node, metas, ((d, swap.get(d, d)) for d in range(ndim)))


def _expand(node: Node, metas: Metas) -> Iterable[Rule]:
    before, after = metas[0].shape, out_shape(node)
    new = len(after) - len(before)
    for d, size in enumerate(after):
        if d < new or (before[d - new] == 1 and size != 1):
            yield rule((R,), S(d))
        else:
            yield rule((S(d - new),), S(d))
    yield _sum(node, metas)


def _repeat(node: Node, metas: Metas) -> Iterable[Rule]:
    before, after = metas[0].shape, out_shape(node)
    new = len(after) - len(before)
    for d, size in enumerate(after):
        if d < new or before[d - new] == 1:
            yield rule((R,), S(d))
        elif before[d - new] == size:
            yield rule((S(d - new),), S(d))
    yield _sum(node, metas)


def _other_dims(dims: Iterable[int], ndim: int) -> list[int]:
    skip = set(dims)
    return [d for d in range(ndim) if d not in skip]


def _dim_argument(position: int, name: str = "dim", default: int = 0) -> Any:
    """Rules of an op that touches one dim only and keeps the others in place."""

    def rules(node: Node, metas: Metas) -> Iterable[Rule]:
        ndim = len(metas[0].shape)
        dim = dim_of(arg(node, position, name, default), ndim)
        return mapped(node, metas, ((d, d) for d in _other_dims((dim,), ndim)))

    return rules


def _removes_dim(node: Node, metas: Metas) -> Iterable[Rule]:
    """select, unbind: the dim disappears."""
    ndim = len(metas[0].shape)
    dim = dim_of(arg(node, 1, "dim", 0), ndim)
    return mapped(node, metas, ((d, d - (d > dim)) for d in _other_dims((dim,), ndim)))


def _slice(node: Node, metas: Metas) -> Iterable[Rule]:
    dim = dim_of(arg(node, 1, "dim", 0), len(metas[0].shape))
    kept = metas[0].shape[dim] == out_shape(node)[dim]
    touched = () if kept else (dim,)
    return mapped(node, metas, ((d, d) for d in _other_dims(touched, len(metas[0].shape))))


def _slice_backward(node: Node, metas: Metas) -> Iterable[Rule]:
    dim = dim_of(arg(node, 2, "dim"), len(metas[0].shape))
    return mapped(node, metas, ((d, d) for d in _other_dims((dim,), len(metas[0].shape))))


def _select_backward(node: Node, metas: Metas) -> Iterable[Rule]:
    ndim = len(out_shape(node))
    dim = dim_of(arg(node, 2, "dim"), ndim)
    return mapped(node, metas, ((d - (d > dim), d) for d in _other_dims((dim,), ndim)))


def _cat(node: Node, metas: Metas) -> Iterable[Rule]:
    ndim = len(metas[0].shape)
    if any(len(m.shape) != ndim for m in metas):
        return ()
    dim = dim_of(arg(node, 1, "dim", 0), ndim)
    return mapped(node, metas, ((d, d) for d in _other_dims((dim,), ndim)))


def _stack(node: Node, metas: Metas) -> Iterable[Rule]:
    ndim = len(metas[0].shape)
    dim = dim_of(arg(node, 1, "dim", 0), ndim + 1)
    return mapped(node, metas, ((d, d + (d >= dim)) for d in range(ndim)))


def _select_scatter(node: Node, metas: Metas) -> Iterable[Rule]:
    ndim = len(metas[0].shape)
    dim = dim_of(arg(node, 2, "dim"), ndim)
    yield from (rule((S(d), S(d - (d > dim))), S(d)) for d in _other_dims((dim,), ndim))
    yield _sum(node, metas)


def _slice_scatter(node: Node, metas: Metas) -> Iterable[Rule]:
    ndim = len(metas[0].shape)
    dim = dim_of(arg(node, 2, "dim", 0), ndim)
    return mapped(node, metas, ((d, d) for d in _other_dims((dim,), ndim)))


def _same_size_dims(node: Node, metas: Metas) -> Iterable[Rule]:
    """Pad: dims whose padding isn't zero are touched. Sums stay sums only if it pads with zeros."""
    pads = arg(node, 1, "pad")
    ndim = len(metas[0].shape)
    touched = {ndim - 1 - i // 2 for i, p in enumerate(pads) if p != 0}
    found = list(mapped(node, metas, ((d, d) for d in _other_dims(touched, ndim))))
    return found if arg(node, 2, "value", 0) == 0 else found[:-1]


def _roll(node: Node, metas: Metas) -> Iterable[Rule]:
    ndim = len(metas[0].shape)
    dims = arg(node, 2, "dims", ()) if "roll" in node.op else arg(node, 1, "dims")
    touched = range(ndim) if not dims else [dim_of(d, ndim) for d in dims]
    return mapped(node, metas, ((d, d) for d in _other_dims(touched, ndim)))


def _unfold(node: Node, metas: Metas) -> Iterable[Rule]:
    ndim = len(metas[0].shape)
    dim = dim_of(arg(node, 1, "dimension"), ndim)
    return mapped(node, metas, ((d, d) for d in _other_dims((dim,), ndim)))


def _triangle(node: Node, metas: Metas) -> Iterable[Rule]:
    ndim = len(metas[0].shape)
    return mapped(node, metas, ((d, d) for d in range(ndim - 2)))


def _repeat_interleave(node: Node, metas: Metas) -> Iterable[Rule]:
    dim = arg(node, 2, "dim")
    return () if dim is None else _identity(node, metas)


def _no_rules(node: Node, metas: Metas) -> Iterable[Rule]:
    return ()


# Local forms -----------------------------------------------------------------------------------------------------


def _as_reshape(here: LocalContext) -> LocalCall:
    return LocalCall("aten.reshape.default", (here.node.args[0], here.shape))


def _sized(position: int, name: str) -> Any:
    """The op with the size-like argument replaced by the local shape of its output."""

    def local(here: LocalContext) -> LocalCall:
        return here.with_args({_where(here.node, position, name): here.shape})

    return local


def _where(node: Node, position: int, name: str) -> int | str:
    return position if position < len(node.args) else name


def _local_repeat(here: LocalContext) -> LocalCall:
    """As often as the whole; along a dim that only the result has cut, once for each row of the piece."""
    times, new = arg(here.node, 1, "repeats"), len(here.shape) - len(here.inputs[0].shape)
    made = [bool(here.out_axes(d)) and (d < new or not here.in_axes(d - new)) for d in range(len(times))]
    return here.with_args({1: tuple(here.out_length(d) if made[d] else n for d, n in enumerate(times))})


def _local_slice(here: LocalContext) -> LocalCall:
    ndim = len(here.inputs[0].shape)
    dim = dim_of(arg(here.node, 1, "dim", 0), ndim)
    if here.in_axes(dim):  # a slice of everything
        return LocalCall("aten.alias.default", (here.node.args[0],))
    return here.same()


def _local_repeat_interleave(here: LocalContext) -> LocalCall:
    dim = arg(here.node, 2, "dim")
    if dim is None or "output_size" not in dict(here.node.kwargs):
        return here.same()
    return here.with_args({"output_size": here.shape[dim]})


_RESHAPE = OpEntry(rules=_view, local=_as_reshape, view=True)
_ALIAS = OpEntry(rules=_identity, view=True)
_COPY = OpEntry(rules=_identity)

VIEWS: Mapping[str, OpEntry] = {
    "aten.view.default": _RESHAPE,
    "aten._unsafe_view.default": _RESHAPE,
    "aten.reshape.default": _RESHAPE,
    "aten.unsqueeze.default": _RESHAPE,
    "aten.squeeze.default": _RESHAPE,
    "aten.squeeze.dim": _RESHAPE,
    "aten.squeeze.dims": _RESHAPE,
    "aten.alias.default": _ALIAS,
    "aten.detach.default": _ALIAS,
    "prims.view_of.default": _ALIAS,
    "aten.clone.default": _COPY,
    "aten.contiguous.default": _COPY,
    "aten.lift_fresh_copy.default": _COPY,
    "aten._to_copy.default": OpEntry(rules=_to_copy),
    "aten.permute.default": OpEntry(rules=_permute, view=True),
    "aten.transpose.int": OpEntry(rules=_transpose, view=True),
    "aten.t.default": OpEntry(rules=_transpose, view=True),
    "aten.expand.default": OpEntry(rules=_expand, local=_sized(1, "size"), view=True),
    "aten.repeat.default": OpEntry(rules=_repeat, local=_local_repeat),
    "aten.slice.Tensor": OpEntry(rules=_slice, local=_local_slice, view=True),
    "aten.slice_backward.default": OpEntry(rules=_slice_backward, local=_sized(1, "input_sizes")),
    "aten.select.int": OpEntry(rules=_removes_dim, view=True),
    "aten.select_backward.default": OpEntry(rules=_select_backward, local=_sized(1, "input_sizes")),
    "aten.unbind.int": OpEntry(rules=_removes_dim, view=True),
    "aten.split.Tensor": OpEntry(rules=_dim_argument(2), view=True),
    "aten.split_with_sizes.default": OpEntry(rules=_dim_argument(2), view=True),
    "aten.cat.default": OpEntry(rules=_cat),
    "aten.stack.default": OpEntry(rules=_stack),
    "aten.select_scatter.default": OpEntry(rules=_select_scatter),
    "aten.slice_scatter.default": OpEntry(rules=_slice_scatter),
    "aten.constant_pad_nd.default": OpEntry(rules=_same_size_dims),
    "aten.roll.default": OpEntry(rules=_roll),
    "aten.flip.default": OpEntry(rules=_roll),
    "aten.unfold.default": OpEntry(rules=_unfold, view=True),
    "aten.tril.default": OpEntry(rules=_triangle),
    "aten.triu.default": OpEntry(rules=_triangle),
    "aten.repeat_interleave.self_int": OpEntry(rules=_repeat_interleave, local=_local_repeat_interleave),
    "aten.as_strided.default": OpEntry(rules=_no_rules, view=True),
    "aten.as_strided_scatter.default": OpEntry(rules=_no_rules),
}

"""Look-ups by index: embeddings, gather, index, and the pair `autopar.pick` / `autopar.place`.

A table cut along the looked-up dim (tag "offset") answers only for its own rows and gives 0 for the others, so that the
pieces add up to the answer. What adds a cut source into rows (scatter_add, index_add, accumulating index_put) gives
sums too; what it is added to is counted on one rank (tag "once"). `pick(x, dim, index)` has x's shape without `dim` and
takes x at `index` along it, 0 where the index is outside; `place(values, dim, index, size)` is its adjoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopar.ir.graph import Node, Ref
from autopar.ir.layout import P, Placement, R, S
from autopar.ir.strategy import Rule
from autopar.ops.entry import (
    LocalCall,
    LocalContext,
    Metas,
    OpEntry,
    arg,
    dim_of,
    first_of,
    out_shape,
    rule,
)

OFFSET = "offset"
ONCE = "once"


def _embedding(node: Node, metas: Metas) -> Iterator[Rule]:
    """weight [rows, width], indices [...] -> [..., width]."""
    last = len(metas[1].shape)
    yield from (rule((R, S(d)), S(d)) for d in range(last))
    yield rule((S(1), R), S(last))
    yield rule((S(0), R), P, tag=OFFSET)
    yield rule((P, R), P)


def _local_embedding(here: LocalContext) -> LocalCall:
    axes = here.tagged(OFFSET)
    if not axes:
        return here.same()
    return LocalCall("local_ops.embedding", (*here.node.args[:2], axes, *first_of(here.in_cut(0))))


def _embedding_backward(node: Node, metas: Metas) -> Iterator[Rule]:
    """grad [..., width], indices [...] -> [rows, width]. Scaling by frequency needs all indices."""
    last = len(metas[1].shape)
    yield rule((S(last), R), S(1))
    if arg(node, 4, "scale_grad_by_freq", False):
        return
    yield from (rule((S(d), S(d)), P) for d in range(last))
    yield rule((R, R), S(0), tag=OFFSET)
    yield rule((P, R), P)


def _local_embedding_backward(here: LocalContext) -> LocalCall:
    axes = here.tagged(OFFSET)
    if not axes:
        return here.same()
    grad, indices, _, padding, _ = here.node.args
    first = first_of(here.out_cut(0))
    return LocalCall("local_ops.embedding_backward", (grad, indices, here.shape[0], padding, axes, *first))


def _pick(node: Node, metas: Metas) -> Iterator[Rule]:
    """Arguments x, dim, index."""
    ndim = len(metas[0].shape)
    dim = dim_of(arg(node, 1, "dim"), ndim)
    for d in range(ndim):
        if d == dim:
            yield rule((S(d), R), P, tag=OFFSET)
        else:
            yield rule((S(d), S(d - (d > dim))), S(d - (d > dim)))
    yield rule((P, R), P)


def _place(node: Node, metas: Metas) -> Iterator[Rule]:
    """Arguments values, dim, index, size."""
    ndim = len(out_shape(node))
    dim = dim_of(arg(node, 1, "dim"), ndim)
    for d in range(ndim):
        if d == dim:
            yield rule((R, R), S(d), tag=OFFSET)
        else:
            yield rule((S(d - (d > dim)),) * 2, S(d))
    yield rule((P, R), P)


def _local_pick(here: LocalContext) -> LocalCall:
    x, dim, index = here.node.args
    dim = dim_of(dim, len(here.inputs[0].shape))
    return LocalCall("local_ops.pick", (x, dim, index, here.tagged(OFFSET), *first_of(here.in_cut(dim))))


def _local_place(here: LocalContext) -> LocalCall:
    values, dim, index, _ = here.node.args
    dim = dim_of(dim, len(here.shape))
    first = first_of(here.out_cut(dim))
    return LocalCall("local_ops.place", (values, dim, index, here.shape[dim], here.tagged(OFFSET), *first))


def _gather(node: Node, metas: Metas) -> Iterator[Rule]:
    """x, dim, index. Dims other than `dim` are cut only where both have the same size (index may be shorter)."""
    x, index = metas[0].shape, metas[1].shape
    if not x or not index:
        return
    dim = dim_of(arg(node, 1, "dim"), len(x))
    for d in range(len(x)):
        if d == dim:
            yield rule((R, S(d)), S(d))
            yield rule((S(d), R), P, tag=OFFSET)
        elif x[d] == index[d]:
            yield rule((S(d), S(d)), S(d))
    yield rule((P, R), P)


def _local_gather(here: LocalContext) -> LocalCall:
    axes = here.tagged(OFFSET)
    if not axes:
        return here.same()
    x, dim, index = here.node.args[:3]
    first = first_of(here.in_cut(dim_of(dim, len(here.inputs[0].shape))))
    return LocalCall("local_ops.gather", (x, dim, index, axes, *first))


def _scatter(node: Node, metas: Metas) -> Iterator[Rule]:
    """x, dim, index, source (a tensor or a number)."""
    shapes = [m.shape for m in metas]
    if not shapes[0] or not shapes[1]:
        return
    dim = dim_of(arg(node, 1, "dim"), len(shapes[0]))
    for d in range(len(shapes[0])):
        if d != dim and len({s[d] for s in shapes}) == 1:
            yield rule((S(d),) * len(metas), S(d))
    if "add" in node.op:
        yield rule((P, R, P), P)
        if shapes[1][dim] == shapes[2][dim]:
            yield rule((R, S(dim), S(dim)), P, tag=ONCE)


def _local_sum_into(here: LocalContext) -> LocalCall:
    axes = here.tagged(ONCE)
    node = here.node
    return LocalCall("local_ops.sum_into_once", (node.op, axes, *node.args), node.kwargs) if axes else here.same()


def _index_select(node: Node, metas: Metas) -> Iterator[Rule]:
    ndim = len(metas[0].shape)
    if ndim == 0:
        return
    dim = dim_of(arg(node, 1, "dim"), ndim)
    yield from (rule((S(d), R), S(d)) for d in range(ndim) if d != dim)
    if metas[1].shape:
        yield rule((R, S(0)), S(dim))
    yield rule((P, R), P)


def _index_add(node: Node, metas: Metas) -> Iterator[Rule]:
    ndim = len(metas[0].shape)
    if ndim == 0:
        return
    dim = dim_of(arg(node, 1, "dim"), ndim)
    yield from (rule((S(d), R, S(d)), S(d)) for d in range(ndim) if d != dim)
    yield rule((P, R, P), P)
    if metas[1].shape:
        yield rule((R, S(0), S(dim)), P, tag=ONCE)


def _indexed(node: Node) -> tuple[list[int], bool]:
    """Dims of x that have an index, and whether they are next to each other (else the result puts them first)."""
    at = [d for d, i in enumerate(node.args[1]) if isinstance(i, Ref)]
    return at, at == list(range(at[0], at[-1] + 1)) if at else True


def _broadcast_ndim(metas: Metas) -> int:
    return max((len(m.shape) for m in metas), default=0)


def _result_dim(dim: int, at: list[int], adjacent: bool, index_ndim: int) -> int:
    """Where a dim of x without an index is in the result."""
    before = sum(a < dim for a in at)
    return dim - before + (index_ndim if not adjacent or dim > at[0] else 0)


def _index(node: Node, metas: Metas) -> Iterator[Rule]:
    x, indices = metas[0], metas[1:]
    if any(m.dtype in ("bool", "uint8") for m in indices) or not indices:
        return
    at, adjacent = _indexed(node)
    ndim = _broadcast_ndim(indices)
    whole = (R,) * len(indices)
    for d in range(len(x.shape)):
        if d not in at:
            yield rule((S(d), *whole), S(_result_dim(d, at, adjacent, ndim)))
    out = out_shape(node)
    first = at[0] if adjacent else 0
    for d in range(ndim):
        size = out[first + d]
        yield rule((R, *(_index_cut(m.shape, ndim, d, size) for m in indices)), S(first + d))
    yield rule((P, *whole), P)


def _index_cut(shape: tuple[int, ...], ndim: int, dim: int, size: int) -> Placement:
    own = dim - (ndim - len(shape))
    return S(own) if own >= 0 and shape[own] == size and size != 1 else R


def _index_put(node: Node, metas: Metas) -> Iterator[Rule]:
    """x, indices, values, accumulate: dims without an index may be cut; where values add up, those with one too."""
    x, indices, values = metas[0], metas[1:-1], metas[-1]
    if any(m.dtype in ("bool", "uint8") for m in indices) or not indices:
        return
    at, adjacent = _indexed(node)
    ndim = _broadcast_ndim(indices)
    result = ndim + len(x.shape) - len(at)
    for d in range(len(x.shape)):
        if d not in at:
            own = _result_dim(d, at, adjacent, ndim) - (result - len(values.shape))
            cut = S(own) if own >= 0 and values.shape[own] == x.shape[d] and x.shape[d] != 1 else R
            yield rule((S(d), *(R,) * len(indices), cut), S(d))
    if arg(node, 3, "accumulate", False):
        yield rule((P, *(R,) * len(indices), P), P)
        first = at[0] if adjacent else 0
        sizes = [max(m.shape[d - ndim] for m in indices if d - ndim >= -len(m.shape)) for d in range(ndim)]
        for d, size in enumerate(sizes):
            if size == 1:
                continue
            own = first + d - (result - len(values.shape))
            cut = S(own) if own >= 0 and values.shape[own] == size else R
            yield rule((R, *(_index_cut(m.shape, ndim, d, size) for m in indices), cut), P, tag=ONCE)


_SCATTER = OpEntry(rules=_scatter)
_SUM_INTO = OpEntry(rules=_scatter, local=_local_sum_into)
_PICK = OpEntry(rules=_pick, local=_local_pick)
_PLACE = OpEntry(rules=_place, local=_local_place)

INDEXING: Mapping[str, OpEntry] = {
    "aten.embedding.default": OpEntry(rules=_embedding, local=_local_embedding),
    "aten.embedding_dense_backward.default": OpEntry(rules=_embedding_backward, local=_local_embedding_backward),
    "autopar.pick": _PICK,
    "autopar.pick.default": _PICK,
    "autopar.place": _PLACE,
    "autopar.place.default": _PLACE,
    "aten.gather.default": OpEntry(rules=_gather, local=_local_gather),
    "aten.scatter.src": _SCATTER,
    "aten.scatter.value": _SCATTER,
    "aten.scatter_add.default": _SUM_INTO,
    "aten.index_select.default": OpEntry(rules=_index_select),
    "aten.index_add.default": OpEntry(rules=_index_add, local=_local_sum_into),
    "aten.index.Tensor": OpEntry(rules=_index),
    "aten.index_put.default": OpEntry(rules=_index_put, local=_local_sum_into),
}

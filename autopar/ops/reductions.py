"""Reductions. A reduced dim that is cut gives a sum, or needs talk inside the op (tag "inner"), or isn't offered."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from autopar.ir.graph import ITEM_BYTES, Node, TorchConst
from autopar.ir.layout import P, R, S
from autopar.ir.reshard import Collective
from autopar.ir.strategy import Rule
from autopar.ops.entry import (
    Inner,
    InnerCost,
    LocalCall,
    LocalContext,
    Lower,
    Metas,
    OpEntry,
    Rules,
    arg,
    dim_of,
    dims_of,
    each_out,
    rule,
)

INNER = "inner"
MEAN = "mean"


def kept_dims(ndim: int, reduced: Iterable[int], keepdim: bool) -> list[tuple[int, int]]:
    """(dim before, dim after) of the dims that a reduction keeps."""
    gone = sorted(set(reduced))
    return [(d, d if keepdim else d - sum(g < d for g in gone)) for d in range(ndim) if d not in gone]


def _reduced(node: Node, metas: Metas, default: Any = None) -> tuple[int, ...]:
    return dims_of(arg(node, 1, "dim", default), len(metas[0].shape))


def _sum(node: Node, metas: Metas) -> Iterator[Rule]:
    ndim = len(metas[0].shape)
    reduced = _reduced(node, metas)
    yield from (rule((S(a),), S(b)) for a, b in kept_dims(ndim, reduced, arg(node, 2, "keepdim", False)))
    yield from (rule((S(d),), P) for d in reduced)
    yield rule((P,), P)


def _mean(node: Node, metas: Metas) -> Iterator[Rule]:
    for found in _sum(node, metas):
        yield Rule(found.outputs, found.inputs, MEAN) if found.outputs == (P,) and found.inputs != (P,) else found


def _local_mean(here: LocalContext) -> LocalCall:
    """Of equal pieces the mean of means; else sums over the whole's count."""
    axes = here.tagged(MEAN)
    if not axes:
        return here.same()
    reduced = dims_of(arg(here.node, 1, "dim"), len(here.inputs[0].shape))
    if not any(here.in_cut(d) for d in reduced):
        return LocalCall("local_ops.mean", (here.node.op, axes, *here.node.args), here.node.kwargs)
    out = here.outputs[0]
    assert out is not None
    count = math.prod(here.wholes[0].shape[d] for d in reduced)
    keepdim = bool(arg(here.node, 2, "keepdim", False))
    x, dtype = here.node.args[0], TorchConst("dtype", out.dtype)
    return LocalCall("local_ops.sum_over", (count, x, reduced, keepdim, dtype))


def kept_only(dim_position: int = 1, keepdim_position: int = 2) -> Rules:
    """Only the dims that the op keeps may be cut, and all of its outputs are cut alike."""

    def rules(node: Node, metas: Metas) -> Iterator[Rule]:
        ndim = len(metas[0].shape)
        reduced = dims_of(arg(node, dim_position, "dim", None), ndim)
        keepdim = bool(arg(node, keepdim_position, "keepdim", False))
        yield from (Rule(each_out(node, S(b)), (S(a),)) for a, b in kept_dims(ndim, reduced, keepdim))

    return rules


def others_in_place(dim_position: int, default: int) -> Rules:
    """All dims but the named one may be cut; shapes don't lose a dim (cumsum, topk, sort)."""

    def rules(node: Node, metas: Metas) -> Iterator[Rule]:
        ndim = len(metas[0].shape)
        dim = dim_of(arg(node, dim_position, "dim", default), ndim) if ndim else 0
        yield from (Rule(each_out(node, S(d)), (S(d),)) for d in range(ndim) if d != dim)

    return rules


def _cumsum(node: Node, metas: Metas) -> Iterator[Rule]:
    yield from others_in_place(1, 0)(node, metas)
    yield rule((P,), P)


# Softmax and its kin: the maximum and the sum along a cut dim are two small all-reduces --------------------------


def _softmax(arguments: int) -> Rules:
    """Of 1 tensor (forward: x) or 2 (backward: gradient and output). The backward is linear in the gradient."""

    def rules(node: Node, metas: Metas) -> Iterator[Rule]:
        ndim = len(metas[0].shape)
        dim = dim_of(arg(node, arguments, "dim"), ndim) if ndim else 0
        for d in range(ndim):
            yield rule((S(d),) * arguments, S(d), tag=INNER if d == dim else "")
        if arguments == 2:
            yield rule((P, R), P)

    return rules


def _local_softmax(kind: str, arguments: int) -> Lower:
    def local(here: LocalContext) -> LocalCall:
        axes = here.tagged(INNER)
        if not axes:
            return here.same()
        dim = dim_of(arg(here.node, arguments, "dim"), len(here.inputs[0].shape))
        out = here.outputs[0]
        assert out is not None
        return LocalCall(f"local_ops.{kind}", (*here.node.args[:arguments], dim, axes, TorchConst("dtype", out.dtype)))

    return local


def _inner_softmax(arguments: int) -> InnerCost:
    """Forward: a maximum and a sum per row. Backward: a sum per row. At least fp32."""

    def inner(here: LocalContext) -> Iterator[Inner]:
        meta = here.inputs[0]
        dim = dim_of(arg(here.node, arguments, "dim"), len(meta.shape))
        row_bytes = meta.numel // max(meta.shape[dim], 1) * max(ITEM_BYTES[meta.dtype], 4)
        for axis in here.tagged(INNER):
            yield from [(Collective.ALL_REDUCE, axis, row_bytes)] * (3 - arguments)

    return inner


def _logsumexp(node: Node, metas: Metas) -> Iterator[Rule]:
    ndim = len(metas[0].shape)
    reduced = _reduced(node, metas)
    yield from (rule((S(a),), S(b)) for a, b in kept_dims(ndim, reduced, arg(node, 2, "keepdim", False)))
    yield from (rule((S(d),), R, tag=INNER) for d in reduced)


def _local_logsumexp(here: LocalContext) -> LocalCall:
    axes = here.tagged(INNER)
    return LocalCall("local_ops.logsumexp", (axes, *here.node.args), here.node.kwargs) if axes else here.same()


def _inner_logsumexp(here: LocalContext) -> Iterator[Inner]:
    out = here.outputs[0]
    assert out is not None
    for axis in here.tagged(INNER):
        yield from [(Collective.ALL_REDUCE, axis, out.numel * max(ITEM_BYTES[out.dtype], 4))] * 2


def _softmax_entry(kind: str, arguments: int) -> OpEntry:
    return OpEntry(rules=_softmax(arguments), local=_local_softmax(kind, arguments), inner=_inner_softmax(arguments))


def _histc(node: Node, metas: Metas) -> Iterator[Rule]:
    """Counts add up if the range is given (with min == max the data say it)."""
    if arg(node, 2, "min", 0) != arg(node, 3, "max", 0):
        yield from (rule((S(d),), P) for d in range(len(metas[0].shape)))


def _none(node: Node, metas: Metas) -> Iterator[Rule]:
    yield from ()


_WHOLE_ONLY = OpEntry(rules=_none)
_KEPT = OpEntry(rules=kept_only())

REDUCTIONS: Mapping[str, OpEntry] = {
    "aten.sum.default": OpEntry(rules=_sum),
    "aten.sum.dim_IntList": OpEntry(rules=_sum),
    "aten.mean.default": OpEntry(rules=_mean, local=_local_mean),
    "aten.mean.dim": OpEntry(rules=_mean, local=_local_mean),
    "aten.amax.default": _KEPT,
    "aten.amin.default": _KEPT,
    "aten.max.dim": _KEPT,
    "aten.min.dim": _KEPT,
    "aten.argmax.default": _KEPT,
    "aten.argmin.default": _KEPT,
    "aten.any.dim": _KEPT,
    "aten.all.dim": _KEPT,
    "aten.var.correction": OpEntry(rules=kept_only(1, 99)),
    "aten.std.correction": OpEntry(rules=kept_only(1, 99)),
    "aten.var_mean.correction": OpEntry(rules=kept_only(1, 99)),
    "aten.max.default": _WHOLE_ONLY,
    "aten.min.default": _WHOLE_ONLY,
    "aten.any.default": _WHOLE_ONLY,
    "aten.all.default": _WHOLE_ONLY,
    "aten.cumsum.default": OpEntry(rules=_cumsum),
    "aten.cumprod.default": OpEntry(rules=others_in_place(1, 0)),
    "aten.logcumsumexp.default": OpEntry(rules=others_in_place(1, 0)),
    "aten.topk.default": OpEntry(rules=others_in_place(2, -1)),
    "aten.sort.default": OpEntry(rules=others_in_place(1, -1)),
    "aten.sort.stable": OpEntry(rules=others_in_place(99, -1)),
    "aten.argsort.default": OpEntry(rules=others_in_place(1, -1)),
    "aten.argsort.stable": OpEntry(rules=others_in_place(99, -1)),
    "aten.histc.default": OpEntry(rules=_histc),
    "aten._softmax.default": _softmax_entry("softmax", 1),
    "aten._safe_softmax.default": _softmax_entry("safe_softmax", 1),
    "aten._log_softmax.default": _softmax_entry("log_softmax", 1),
    "aten._softmax_backward_data.default": _softmax_entry("softmax_backward", 2),
    "aten._log_softmax_backward_data.default": _softmax_entry("log_softmax_backward", 2),
    "aten.logsumexp.default": OpEntry(rules=_logsumexp, local=_local_logsumexp, inner=_inner_logsumexp),
}

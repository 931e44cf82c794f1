"""Tensors made from nothing. Any piece may be made where it is needed; only the sizes have to be local.

Of `new_*` and `*_like` the argument gives dtype and device only, so its layout is of no matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from autopar.ir.graph import Node, TorchConst
from autopar.ir.layout import P, R, S
from autopar.ir.strategy import Rule
from autopar.ops.entry import LocalCall, LocalContext, Lower, Metas, OpEntry, arg, first_of, out_shape, rule


def _free(node: Node, metas: Metas) -> Iterator[Rule]:
    """No tensor argument."""
    yield from (rule((), S(d)) for d in range(len(out_shape(node))))


def beside(node: Node, metas: Metas) -> Iterator[Rule]:
    """One argument that isn't read: like it where shapes agree, whole beside anything."""
    before, after = metas[0].shape, out_shape(node)
    for d in range(len(before)):
        if d < len(after) and after[d] == before[d]:
            yield rule((S(d),), S(d))
        else:
            yield rule((S(d),), R)
    yield from (rule((R,), S(d)) for d in range(len(after)))
    yield rule((P,), R)


def _sized(position: int) -> Lower:
    def local(here: LocalContext) -> LocalCall:
        return here.with_args({position: here.shape} if here.strategy.outputs[0] is not None else {})

    return local


def _arange_bounds(node: Node) -> tuple[Any, Any]:
    """start, step."""
    if node.op == "aten.arange.default":
        return 0, 1
    return arg(node, 0, "start"), arg(node, 2, "step", 1)


def _local_arange(here: LocalContext) -> LocalCall:
    axes = here.out_axes(0)
    if not axes:
        return here.same()
    start, step = _arange_bounds(here.node)
    out = here.outputs[0]
    assert out is not None
    kwargs = {**dict(here.node.kwargs), "dtype": TorchConst("dtype", out.dtype)}
    return LocalCall(
        "local_ops.arange", (start, step, here.shape[0], axes, *first_of(here.out_cut(0))), tuple(kwargs.items())
    )


def _none(node: Node, metas: Metas) -> Iterator[Rule]:
    yield from ()


_SIZED = OpEntry(rules=_free, local=_sized(0))
_NEW = OpEntry(rules=beside, local=_sized(1))
_ARANGE = OpEntry(rules=_free, local=_local_arange)


def _local_like(here: LocalContext) -> LocalCall:
    """The same op on the piece; `new_*` of the local shape where the piece has another shape."""
    if here.inputs[0].shape == here.shape or _cut_alike(here):
        return here.same()
    fill = {"zeros": 0, "ones": 1}.get(here.node.op.split(".")[1].split("_")[0])
    kwargs = tuple((k, v) for k, v in here.node.kwargs if k != "memory_format")
    if here.node.op.startswith("aten.empty"):
        return LocalCall("aten.new_empty.default", (here.node.args[0], here.shape), kwargs)
    value = arg(here.node, 1, "fill_value") if fill is None else fill
    kwargs = tuple((k, v) for k, v in kwargs if k != "fill_value")
    return LocalCall("aten.new_full.default", (here.node.args[0], here.shape, value), kwargs)


def _cut_alike(here: LocalContext) -> bool:
    whole = here.wholes[0] if here.wholes else None
    out = here.node.outputs[0]
    if whole is None or out is None or whole.shape != out.meta.shape:
        return False
    return all(
        here.in_axes(d) == here.out_axes(d) and here.in_cut(d) == here.out_cut(d) for d in range(len(whole.shape))
    )


def _new_empty_strided(here: LocalContext) -> LocalCall:
    return LocalCall("aten.new_empty.default", (here.node.args[0], here.shape), here.node.kwargs)


def _empty_strided(here: LocalContext) -> LocalCall:
    return LocalCall("aten.empty.memory_format", (here.shape,), here.node.kwargs)


_LIKE = OpEntry(rules=beside, local=_local_like)

FACTORIES: Mapping[str, OpEntry] = {
    "aten.zeros.default": _SIZED,
    "aten.ones.default": _SIZED,
    "aten.full.default": _SIZED,
    "aten.empty.memory_format": _SIZED,
    "aten.empty_strided.default": OpEntry(rules=_free, local=_empty_strided),
    "aten.scalar_tensor.default": OpEntry(rules=_none),
    "aten.eye.default": OpEntry(rules=_none),
    "aten.arange.default": _ARANGE,
    "aten.arange.start": _ARANGE,
    "aten.arange.start_step": _ARANGE,
    "aten.new_zeros.default": _NEW,
    "aten.new_ones.default": _NEW,
    "aten.new_full.default": _NEW,
    "aten.new_empty.default": _NEW,
    "aten.new_empty_strided.default": OpEntry(rules=beside, local=_new_empty_strided),
    "aten.zeros_like.default": _LIKE,
    "aten.ones_like.default": _LIKE,
    "aten.full_like.default": _LIKE,
    "aten.empty_like.default": _LIKE,
}

"""Convolutions, pooling and resizing: [batch, channels, ...]. Spatial dims aren't offered: they'd need a halo."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.ir.graph import Node
from autopar.ir.layout import P, R, S
from autopar.ir.strategy import Rule
from autopar.ops.entry import (
    LocalCall,
    LocalContext,
    Lower,
    Metas,
    OpEntry,
    OutMetas,
    Pieces,
    Rules,
    each_out,
    mask_outputs,
    out_shape,
    rule,
)

BIAS_ONCE = "bias_once"


@dataclass(frozen=True, slots=True)
class _Weight:
    """Which dims of a convolution's weight are output and input channels, and whether each channel is on its own."""

    out_dim: int
    in_dim: int
    depthwise: bool
    groups: int


def _weight(transposed: bool, groups: int, channels: int, out_channels: int) -> _Weight:
    depthwise = groups == channels and groups == out_channels and groups > 1
    return _Weight(1 if transposed else 0, 0 if transposed else 1, depthwise, groups)


def _convolution(node: Node, metas: Metas) -> Iterator[Rule]:
    """x, weight, bias, stride, padding, dilation, transposed, output padding, groups."""
    if len(metas[0].shape) != len(metas[1].shape):
        return
    bias = len(metas) - 2
    w = _weight(node.args[6], node.args[8], metas[0].shape[1], out_shape(node)[1])
    yield rule((S(0), R, *(R,) * bias), S(0))
    if w.groups == 1:
        yield rule((R, S(w.out_dim), *(S(0),) * bias), S(1))
        yield rule((S(1), S(w.in_dim), *(R,) * bias), P, tag=BIAS_ONCE if bias else "")
        if not bias:
            yield rule((P, R), P)
    elif w.depthwise:
        yield rule((S(1), S(0), *(S(0),) * bias), S(1))


def _local_convolution(here: LocalContext) -> LocalCall:
    node = here.node
    axes = here.tagged(BIAS_ONCE)
    if axes:
        return LocalCall("local_ops.convolution_bias_once", (axes, *node.args))
    groups = node.args[8]
    if groups > 1:
        return here.with_args({8: here.in_length(1) if here.in_axes(1) else groups})
    return here.same()


def _convolution_backward(node: Node, metas: Metas) -> Iterator[Rule]:
    """grad, x, weight, bias sizes, stride, padding, dilation, transposed, output padding, groups, mask -> x, w, b."""
    w = _weight(node.args[7], node.args[9], metas[1].shape[1], metas[0].shape[1])
    yield Rule(mask_outputs(node, (S(0), P, P)), (S(0), S(0), R))
    if w.groups == 1:
        yield Rule(mask_outputs(node, (P, S(w.out_dim), S(0))), (S(1), R, S(w.out_dim)))
        yield Rule(mask_outputs(node, (S(1), S(w.in_dim), R)), (R, S(1), S(w.in_dim)))
        yield Rule(mask_outputs(node, (P, P, P)), (P, R, R))
    elif w.depthwise:
        yield Rule(mask_outputs(node, (S(1), S(0), S(0))), (S(1), S(1), S(0)))


def _local_convolution_backward(here: LocalContext) -> LocalCall:
    changes: dict[int | str, object] = {}
    if here.node.args[3] is not None:
        changes[3] = (here.in_length(1),)
    groups = here.node.args[9]
    if groups > 1 and here.in_axes(1, 1):
        changes[9] = here.in_length(1, 1)
    return here.with_args(changes)


def _convolution_flops(node: Node, inputs: Metas, outputs: OutMetas) -> float:
    """2 · multiplications: weight entries · batch · positions (of the output; of the input where transposed)."""
    out = outputs[0]
    assert out is not None
    at = inputs[0] if node.args[6] else out
    return 2.0 * inputs[1].numel * at.shape[0] * math.prod(at.shape[2:])


def _convolution_backward_flops(node: Node, inputs: Metas, outputs: OutMetas) -> float:
    """As much as the forward for each gradient asked for (of x and of the weight)."""
    at = inputs[1] if node.args[7] else inputs[0]
    once = 2.0 * inputs[2].numel * at.shape[0] * math.prod(at.shape[2:])
    return once * sum(o is not None for o in outputs[:2])


def planes(spatial: int, linear: bool) -> Rules:
    """Ops that treat each [batch, channel] plane on its own. `spatial` trailing dims aren't offered."""

    def rules(node: Node, metas: Metas) -> Iterator[Rule]:
        for d in range(len(metas[0].shape) - spatial):
            yield Rule(each_out(node, S(d)), (S(d),) * len(metas))
        if linear and len(metas) == 1:
            yield rule((P,), P)

    return rules


def _input_sized(position: int) -> Lower:
    """`input_size` of a resize's backward is the shape of its output."""

    def local(here: LocalContext) -> LocalCall:
        return here.with_args({position: here.shape})

    return local


_RESIZES = {
    f"aten.upsample_{kind}.{overload}": spatial
    for kind, spatial in (
        ("nearest1d", 1), ("linear1d", 1), ("nearest2d", 2), ("bilinear2d", 2), ("bicubic2d", 2), ("nearest3d", 3),
        ("trilinear3d", 3),
    )
    for overload in ("default", "vec")
}  # fmt: skip

_ENTRIES: Mapping[str, OpEntry] = {
    "aten.convolution.default": OpEntry(rules=_convolution, local=_local_convolution, flops=_convolution_flops),
    "aten.convolution_backward.default": OpEntry(
        rules=_convolution_backward, local=_local_convolution_backward, flops=_convolution_backward_flops
    ),
    "aten.avg_pool2d.default": OpEntry(rules=planes(2, True)),
    "aten.avg_pool2d_backward.default": OpEntry(rules=planes(2, False)),
    "aten._adaptive_avg_pool2d.default": OpEntry(rules=planes(2, True)),
    "aten._adaptive_avg_pool2d_backward.default": OpEntry(rules=planes(2, False)),
    "aten.max_pool2d_with_indices.default": OpEntry(rules=planes(2, False)),
    "aten.max_pool2d_with_indices_backward.default": OpEntry(rules=planes(2, False)),
    **{name: OpEntry(rules=planes(spatial, True)) for name, spatial in _RESIZES.items()},
    **{
        "_backward.".join(name.rsplit(".", 1)): OpEntry(rules=planes(spatial, True), local=_input_sized(2))
        for name, spatial in _RESIZES.items()
        if name.endswith(".default")
    },
}

CONVOLUTIONS: Mapping[str, OpEntry] = {name: replace(entry, pieces=Pieces.FILLED) for name, entry in _ENTRIES.items()}
"""torch refuses empty channels, and several of these an empty batch."""

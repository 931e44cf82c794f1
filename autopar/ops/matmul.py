"""Products of matrices. Rows, columns and batches cut without communication; a cut contraction gives sums.

Where a bias is added under a cut contraction only one rank adds it (tag "bias_once").
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from autopar.ir.graph import Node
from autopar.ir.layout import P, Placement, R, S
from autopar.ir.strategy import Rule
from autopar.ops.entry import (
    Flops,
    LocalCall,
    LocalContext,
    Metas,
    OpEntry,
    OutMetas,
    arg,
    broadcast_cut,
    dim_of,
    out_shape,
    rule,
)

BIAS_ONCE = "bias_once"


def _mm(node: Node, metas: Metas) -> Iterator[Rule]:
    yield rule((S(0), R), S(0))
    yield rule((R, S(1)), S(1))
    yield rule((S(1), S(0)), P)
    yield rule((P, R), P)
    yield rule((R, P), P)


def _bmm(node: Node, metas: Metas) -> Iterator[Rule]:
    yield rule((S(0), S(0)), S(0))
    yield rule((S(1), R), S(1))
    yield rule((R, S(2)), S(2))
    yield rule((S(2), S(1)), P)
    yield rule((P, R), P)
    yield rule((R, P), P)


def _add_product(node: Node, metas: Metas) -> Iterator[Rule]:
    """addmm, baddbmm: bias + a @ b."""
    bias, out = metas[0].shape, out_shape(node)
    n = len(out)
    if n == 3:
        yield rule((broadcast_cut(bias, out, 0), S(0), S(0)), S(0))
    yield rule((broadcast_cut(bias, out, n - 2), S(n - 2), R), S(n - 2))
    yield rule((broadcast_cut(bias, out, n - 1), R, S(n - 1)), S(n - 1))
    yield rule((R, S(n - 1), S(n - 2)), P, tag=BIAS_ONCE)


def _local_add_product(here: LocalContext) -> LocalCall:
    axes = here.tagged(BIAS_ONCE)
    return (
        LocalCall("local_ops.bias_once", (here.node.op, axes, *here.node.args), here.node.kwargs)
        if axes
        else here.same()
    )


def _linear(node: Node, metas: Metas) -> Iterator[Rule]:
    last = len(metas[0].shape) - 1
    bias: tuple[Placement, ...] = (R,) * (len(metas) - 2)
    cut_bias: tuple[Placement, ...] = (S(0),) * (len(metas) - 2)
    yield from (rule((S(d), R, *bias), S(d)) for d in range(last))
    yield rule((R, S(0), *cut_bias), S(last))
    yield rule((S(last), S(1), *bias), P, tag=BIAS_ONCE if bias else "")
    if not bias:
        yield rule((P, R), P)


def _matmul(node: Node, metas: Metas) -> Iterator[Rule]:
    """N-d product with broadcast batch dims; both sides have 2 or more dims."""
    a, b = metas[0].shape, metas[1].shape
    if len(a) < 2 or len(b) < 2:
        return
    out = out_shape(node)
    n = len(out)
    for d in range(n - 2):
        yield rule((_batch(a, out, d), _batch(b, out, d)), S(d))
    yield rule((S(len(a) - 2), R), S(n - 2))
    yield rule((R, S(len(b) - 1)), S(n - 1))
    yield rule((S(len(a) - 1), S(len(b) - 2)), P)
    yield rule((P, R), P)
    yield rule((R, P), P)


def _batch(shape: tuple[int, ...], out: tuple[int, ...], dim: int) -> Placement:
    own = dim - (len(out) - len(shape))
    return S(own) if own >= 0 and shape[own] != 1 else R


def _tensordot(node: Node, metas: Metas) -> Iterator[Rule]:
    """tensordot(a, b, dims of a, dims of b) -> the other dims of a, then those of b."""
    pairs = list(zip(*_contracted(node, metas), strict=True))
    a, b = ([d for d in range(len(m.shape)) if d not in (p[k] for p in pairs)] for k, m in enumerate(metas))
    yield from (rule((S(d), S(e)), P) for d, e in pairs)
    yield from (rule((S(d), R), S(k)) for k, d in enumerate(a))
    yield from (rule((R, S(d)), S(len(a) + k)) for k, d in enumerate(b))
    yield rule((P, R), P)
    yield rule((R, P), P)


def _contracted(node: Node, metas: Metas) -> list[list[int]]:
    return [[dim_of(d, len(m.shape)) for d in arg(node, 2 + k, "dims")] for k, m in enumerate(metas)]


def _tensordot_flops(node: Node, inputs: Metas, outputs: OutMetas) -> float:
    """2 · output elements · contracted size."""
    out = outputs[0]
    assert out is not None
    return 2.0 * out.numel * math.prod(inputs[0].shape[d] for d in _contracted(node, inputs)[0])


def _dot(node: Node, metas: Metas) -> Iterator[Rule]:
    yield rule((S(0), S(0)), P)


def _mv(node: Node, metas: Metas) -> Iterator[Rule]:
    yield rule((S(0), R), S(0))
    yield rule((S(1), S(0)), P)


def _flops_of(first: int) -> Flops:
    """2 · output elements · contracted size, the last of argument `first` (as torch.utils.flop_counter has it)."""

    def flops(node: Node, inputs: Metas, outputs: OutMetas) -> float:
        out = outputs[0]
        assert out is not None
        return 2.0 * out.numel * inputs[first].shape[-1]

    return flops


def _grouped(node: Node, metas: Metas) -> Iterator[Rule]:
    """Rows sorted by expert times that expert's matrix: rows [T, K], weights [E, K, N], ends [E] -> [T, N]."""
    yield rule((R, S(2), R), S(1))
    yield rule((S(1), S(1), R), P)
    yield rule((P, R, R), P)


def _grouped_backward(node: Node, metas: Metas) -> Iterator[Rule]:
    """rows [T, K], weights [E, K, N], ends [E], grad [T, N] -> grad rows [T, K], grad weights [E, K, N]."""
    yield rule((R, S(2), R, S(1)), P, S(2))
    yield rule((S(1), S(1), R, R), S(1), S(1))
    yield rule((R, R, R, P), P, P)


def _grouped_backward_flops(node: Node, inputs: Metas, outputs: OutMetas) -> float:
    return 4.0 * inputs[0].numel * inputs[1].shape[-1]


def _torch_grouped_flops(node: Node, inputs: Metas, outputs: OutMetas) -> float:
    """2 · M · N · K, where groups are parts of one of them."""
    a, b = inputs[0], inputs[1]
    groups = a.shape[0] if len(a.shape) == 3 and len(b.shape) == 2 else 1
    return 2.0 * a.numel * b.shape[-1] / groups


def _local_linear(here: LocalContext) -> LocalCall:
    axes = here.tagged(BIAS_ONCE)
    return LocalCall("local_ops.linear_bias_once", (axes, *here.node.args)) if axes else here.same()


_ADD_PRODUCT = OpEntry(rules=_add_product, local=_local_add_product, flops=_flops_of(1))

MATMULS: Mapping[str, OpEntry] = {
    "aten.mm.default": OpEntry(rules=_mm, flops=_flops_of(0)),
    "aten.bmm.default": OpEntry(rules=_bmm, flops=_flops_of(0)),
    "aten.addmm.default": _ADD_PRODUCT,
    "aten.baddbmm.default": _ADD_PRODUCT,
    "aten.linear.default": OpEntry(rules=_linear, local=_local_linear, flops=_flops_of(0)),
    "aten.matmul.default": OpEntry(rules=_matmul, flops=_flops_of(0)),
    "aten.tensordot.default": OpEntry(rules=_tensordot, flops=_tensordot_flops),
    "aten.dot.default": OpEntry(rules=_dot, flops=_flops_of(0)),
    "aten.mv.default": OpEntry(rules=_mv, flops=_flops_of(0)),
    "aten._grouped_mm.default": OpEntry(flops=_torch_grouped_flops),
    "transformers.grouped_mm_fallback.default": OpEntry(rules=_grouped, flops=_flops_of(0)),
    "transformers.grouped_mm_fallback_backward.default": OpEntry(
        rules=_grouped_backward, flops=_grouped_backward_flops
    ),
}

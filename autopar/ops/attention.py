"""Fused attention. [batch, heads, sequence, head size]; fewer key-value heads than query heads are cut with them.

Cut along batch or heads without communication; along the query's sequence too where the mask isn't the causal one
(which counts from the piece's own first row). A mask is cut only where it isn't broadcast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopar.ir.graph import Node, TensorMeta
from autopar.ir.layout import P, Placement, R, S
from autopar.ir.strategy import Rule
from autopar.ops.entry import (
    LocalCall,
    LocalContext,
    Lower,
    Metas,
    OpEntry,
    OutMetas,
    arg,
    broadcast_cut,
    mask_outputs,
    ref_positions,
    rule,
)


def _mask(node: Node, metas: Metas, dim: int) -> tuple[Placement, ...]:
    at = ref_positions(node).get("attn_mask")
    if at is None:
        return ()
    query, key = metas[_QUERY[node.op]].shape, metas[_QUERY[node.op] + 1].shape
    return (broadcast_cut(metas[at].shape, (*query[:3], key[2]), dim),)


_QUERY = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": 0,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": 1,
}


def _forward(node: Node, metas: Metas) -> Iterator[Rule]:
    if arg(node, 3, "dropout_p", 0.0) != 0.0:
        return
    for d in (0, 1):
        yield rule((S(d),) * 3 + _mask(node, metas, d), S(d), S(d))
    if not arg(node, 4, "is_causal", False):
        yield rule((S(2), R, R, *_mask(node, metas, 2)), S(2), S(2))


def _backward(node: Node, metas: Metas) -> Iterator[Rule]:
    """Arguments: grad, query, key, value, out, logsumexp, dropout, causal; outputs: gradients of query, key, value."""
    if arg(node, 6, "dropout_p", 0.0) != 0.0:
        return
    for d in (0, 1):
        yield Rule(mask_outputs(node, (S(d),) * 3), (S(d),) * 6 + _mask(node, metas, d))
    if not arg(node, 7, "is_causal", False):
        ins = (S(2), S(2), R, R, S(2), S(2), *_mask(node, metas, 2))
        yield Rule(mask_outputs(node, (S(2), P, P)), ins)


def _local(name: str) -> Lower:
    """torch's kernel divides by zero on an empty piece, so a form that looks where pieces aren't equal."""

    def local(here: LocalContext) -> LocalCall:
        first = _QUERY[here.node.op]
        if any(here.in_cut(d, first) for d in range(3)):
            return LocalCall(f"local_ops.{name}", here.node.args, here.node.kwargs)
        return here.same()

    return local


def _product(query: TensorMeta, key: TensorMeta) -> float:
    """2 · batch · heads · queries · keys · head size: one of the products in attention."""
    batch, heads, queries, size = query.shape
    return 2.0 * batch * heads * queries * key.shape[2] * size


def _forward_flops(node: Node, inputs: Metas, outputs: OutMetas) -> float:
    return 2 * _product(inputs[0], inputs[1])


def _backward_flops(node: Node, inputs: Metas, outputs: OutMetas) -> float:
    """Five products: the scores again, and the gradients of value, weights, query and key."""
    return 5 * _product(inputs[1], inputs[2])


ATTENTION: Mapping[str, OpEntry] = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": OpEntry(
        rules=_forward, local=_local("attention"), flops=_forward_flops
    ),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": OpEntry(
        rules=_backward, local=_local("attention_backward"), flops=_backward_flops
    ),
}

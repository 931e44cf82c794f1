"""Fused attention. [batch, heads, sequence, head size]; fewer key-value heads than query heads are cut with them.

Cut along batch or heads without communication; along the query's sequence too where the mask isn't the causal one
(which counts from the piece's own first row). A mask is cut only where it isn't broadcast.

Cut along the sequence of queries and keys too, blocks of keys and values go round the ranks of the axis (tag "ring",
`autopar.runtime.ring`). Pieces are contiguous, so under a causal mask the last rank has a whole block in each round and
the first one none but its own: priced is the last rank. A mask that is given is cut along queries and has all keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from autopar.ir.graph import ITEM_BYTES, Node, TensorMeta
from autopar.ir.layout import P, Placement, R, S, unit_of
from autopar.ir.reshard import Collective
from autopar.ir.strategy import Rule
from autopar.ops.entry import (
    Inner,
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

RING = "ring"
"""Blocks of keys and values go round."""


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


_CAUSAL = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": 4,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": 7,
}
"""Position of the argument."""


def _is_causal(node: Node) -> bool:
    return bool(arg(node, _CAUSAL[node.op], "is_causal", False))


def _goes_round(node: Node, metas: Metas) -> bool:
    """True if blocks of keys may go round: under the causal mask, of as many queries as keys."""
    query, key, value = metas[_QUERY[node.op] :][:3]
    return key.shape == value.shape and (query.shape[2] == key.shape[2] or not _is_causal(node))


def _forward(node: Node, metas: Metas) -> Iterator[Rule]:
    if arg(node, 3, "dropout_p", 0.0) != 0.0:
        return
    for d in (0, 1):
        yield rule((S(d),) * 3 + _mask(node, metas, d), S(d), S(d))
    if not _is_causal(node):
        yield rule((S(2), R, R, *_mask(node, metas, 2)), S(2), S(2))
    if _goes_round(node, metas):
        yield rule((*(S(2),) * 3, *_mask(node, metas, 2)), S(2), S(2), tag=RING)


def _backward(node: Node, metas: Metas) -> Iterator[Rule]:
    """Arguments: grad, query, key, value, out, logsumexp, dropout, causal; outputs: gradients of query, key, value."""
    if arg(node, 6, "dropout_p", 0.0) != 0.0:
        return
    for d in (0, 1):
        yield Rule(mask_outputs(node, (S(d),) * 3), (S(d),) * 6 + _mask(node, metas, d))
    if not _is_causal(node):
        ins = (S(2), S(2), R, R, S(2), S(2), *_mask(node, metas, 2))
        yield Rule(mask_outputs(node, (S(2), P, P)), ins)
    if _goes_round(node, metas):
        yield Rule(mask_outputs(node, (S(2),) * 3), (*(S(2),) * 6, *_mask(node, metas, 2)), RING)


def _local(name: str) -> Lower:
    """torch's kernel divides by zero on an empty piece, so a form that looks where pieces aren't equal."""

    def local(here: LocalContext) -> LocalCall:
        first = _QUERY[here.node.op]
        for axis in here.tagged(RING):
            keys = here.wholes[first + 1]
            cut, form = (axis, keys.shape[2], unit_of(keys.units, 2)), "ring_" + name
            return LocalCall(f"local_ops.{form}", (*cut, *here.node.args), here.node.kwargs)
        if any(here.in_cut(d, first) for d in range(3)):
            return LocalCall(f"local_ops.{name}", here.node.args, here.node.kwargs)
        return here.same()

    return local


def _ranks(here: LocalContext) -> int:
    """Of the ring; 1 without."""
    return next((here.mesh.axis(axis).size for axis in here.tagged(RING)), 1)


def _rounds(here: LocalContext) -> tuple[int, ...]:
    """Blocks of the last rank. A causal op is priced as its half, which other blocks have twice."""
    return (1, *(2 if _is_causal(here.node) else 1,) * (_ranks(here) - 1))


def _blocks_bytes(inputs: Metas, first: int, item: int | None = None) -> int:
    """Keys and values of a block, of elements of their own size or of `item` bytes."""
    key = inputs[first + 1]
    return 2 * key.numel * (item or ITEM_BYTES[key.dtype])


def _sum_bytes(inputs: Metas) -> int:
    """An element of a sum: float32 at least."""
    return max(4, ITEM_BYTES[inputs[0].dtype])


def _passed_forward(here: LocalContext) -> Iterator[Inner]:
    for axis in here.tagged(RING):
        yield from [(Collective.SEND, axis, _blocks_bytes(here.inputs, 0))] * (_ranks(here) - 1)


def _passed_backward(here: LocalContext) -> Iterator[Inner]:
    """Beside each round what is sent then: a block, but in the last; sums of gradients, but in the first; and, after
    the last, these once more."""
    block, sums = _blocks_bytes(here.inputs, 1), _blocks_bytes(here.inputs, 1, _sum_bytes(here.inputs))
    for axis in here.tagged(RING):
        for turn in range(_ranks(here) + 1):
            sent = (block if turn < _ranks(here) - 1 else 0) + (sums if turn else 0)
            yield Collective.SEND, axis, sent


def _held_forward(inputs: Metas, ranks: int) -> int:
    """The block worked on and the next one; the round's result beside the sum, which is the output but for its width;
    of each query four numbers."""
    query, item, block = inputs[0], _sum_bytes(inputs), _blocks_bytes(inputs, 0)
    part = query.numel * item * (2 if item > ITEM_BYTES[query.dtype] else 1)
    rows = 4 * item * (query.numel // query.shape[-1])
    return rows + (2 * block + part if ranks > 2 else max(2 * block, block + part))


def _held_backward(inputs: Metas, ranks: int) -> int:
    """Blocks as above; the sums of gradients of the last one, on their way, and of this one; the round's own, in the
    place of the outputs that come after the last round."""
    query, item = inputs[1], _sum_bytes(inputs)
    blocks = min(ranks - 1, 2) * _blocks_bytes(inputs, 1)
    return blocks + 2 * _blocks_bytes(inputs, 1, item) + query.numel * item


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
        rules=_forward, local=_local("attention"), flops=_forward_flops, inner=_passed_forward, rounds=_rounds
    ),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": OpEntry(
        rules=_backward, local=_local("attention_backward"), flops=_backward_flops, inner=_passed_backward,
        rounds=_rounds,
    ),
}  # fmt: skip

HELD: Mapping[str, Callable[[Metas, int], int]] = {
    "local_ops.ring_attention": _held_forward,
    "local_ops.ring_attention_backward": _held_backward,
}
"""Local form -> bytes that it holds beside its inputs, of these local metas, and its outputs, on so many ranks."""

"""Mixtures of experts: tokens brought into an order by expert, products group by group, and back (`ops.custom`).

The order of rows is a rank's own: only `collect` undoes it. So where an axis cuts rows, `S(0)` says how many a rank
has, not which; the ways are told apart by what `ends` and `order` are, and no conversion changes either
(`TensorMeta.unordered`). With tokens cut along dim d:

    rows    ends    order   each rank of the axis has
    S(0)    P       S(d)    its own tokens' rows, for every expert: weights whole, their gradients summands
    S(0)    S(0)    S(d)    all rows of its own experts, from every rank's tokens: `spread` and `collect` exchange them
    S(0)    S(0)    R       the rows of its own experts, of tokens that it has whole: `collect` gives summands
    R       R       R       all rows

`order` is a list of slots, as long as a rank has rows, whatever its shape says.

Where experts are cut, how many rows a rank has is known in the step only; it is priced as if all had the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopar.ir.graph import ITEM_BYTES, Node
from autopar.ir.layout import P, R, S
from autopar.ir.reshard import Collective
from autopar.ir.strategy import Rule
from autopar.ops.entry import Inner, LocalCall, LocalContext, Metas, OpEntry, OutMetas, rule

EXCHANGE = "exchange"
"""Rows go to the ranks that have their experts."""
OWN = "own"
"""Each rank takes the rows of its own experts."""
EXPERTS = "experts"
"""Each rank multiplies with its own experts' matrices."""


def _route(node: Node, metas: Metas) -> Iterator[Rule]:
    """index [..., k] -> ends [E], order [..., k]."""
    for d in range(len(metas[0].shape) - 1):
        yield rule((S(d),), P, S(d))
        yield rule((S(d),), S(0), S(d), tag=EXCHANGE)
    yield rule((R,), S(0), R, tag=OWN)


def _local_route(here: LocalContext) -> LocalCall:
    index, experts = here.node.args
    return LocalCall("local_ops.route", (index, experts, here.out_axes(0), here.tagged(EXCHANGE)))


def _counts_sent(here: LocalContext) -> Iterator[Inner]:
    """How many rows for each expert each rank sends."""
    experts = here.node.args[1]
    for axis in here.tagged(EXCHANGE):
        yield Collective.ALL_TO_ALL, axis, experts * ITEM_BYTES["int64"]


def _spread(node: Node, metas: Metas) -> Iterator[Rule]:
    """slots [..., k, H], ends, order -> rows [slots, H]."""
    last = len(metas[0].shape) - 1
    for d in range(last - 1):
        yield rule((S(d), P, S(d)), S(0))
        yield rule((S(d), S(0), S(d)), S(0), tag=EXCHANGE)
    yield rule((R, S(0), R), S(0), tag=OWN)
    yield rule((S(last), R, R), S(1))
    yield rule((P, R, R), P)


def _local_spread(here: LocalContext) -> LocalCall:
    return LocalCall("local_ops.spread", (*here.node.args, here.tagged(EXCHANGE)))


def _rows_sent(here: LocalContext) -> Iterator[Inner]:
    rows = here.outputs[0] if here.node.op.startswith("autopar.spread") else here.inputs[0]
    assert rows is not None
    for axis in here.tagged(EXCHANGE):
        yield Collective.ALL_TO_ALL, axis, rows.nbytes


def _collect(node: Node, metas: Metas) -> Iterator[Rule]:
    """rows [slots, H], ends, order, size [..., k] -> slots [..., k, H]."""
    last = len(node.args[3])
    for d in range(last - 1):
        yield rule((S(0), P, S(d)), S(d))
        yield rule((S(0), S(0), S(d)), S(d), tag=EXCHANGE)
    yield rule((S(0), S(0), R), P, tag=OWN)
    yield rule((S(1), R, R), S(last))
    yield rule((P, R, R), P)


def _local_collect(here: LocalContext) -> LocalCall:
    rows, ends, order, _ = here.node.args
    return LocalCall("local_ops.collect", (rows, ends, order, here.shape[:-1], here.tagged(EXCHANGE)))


def _grouped_mm(node: Node, metas: Metas) -> Iterator[Rule]:
    """rows [M, K], weights [E, K, N], ends [E] -> [M, N]."""
    yield rule((S(0), R, P), S(0))
    yield rule((S(0), S(0), S(0)), S(0), tag=EXPERTS)
    yield rule((R, S(2), R), S(1))
    yield rule((S(1), S(1), R), P)
    yield rule((P, R, R), P)


def _grouped_outer(node: Node, metas: Metas) -> Iterator[Rule]:
    """rows [M, K], grads [M, N], ends [E] -> [E, K, N]."""
    yield rule((S(0), S(0), P), P)
    yield rule((S(0), S(0), S(0)), S(0), tag=EXPERTS)
    yield rule((S(1), R, R), S(1))
    yield rule((R, S(1), R), S(2))
    yield rule((P, R, R), P)
    yield rule((R, P, R), P)


def _mm_flops(node: Node, inputs: Metas, outputs: OutMetas) -> float:
    """2 · rows · K · N."""
    return 2.0 * inputs[0].numel * inputs[1].shape[-1]


GROUPED: Mapping[str, OpEntry] = {
    "autopar.grouped_mm.default": OpEntry(
        rules=_grouped_mm, local=lambda here: here.same("local_ops.grouped_mm"), flops=_mm_flops
    ),
    "autopar.grouped_outer.default": OpEntry(
        rules=_grouped_outer, local=lambda here: here.same("local_ops.grouped_outer"), flops=_mm_flops
    ),
}

EXPERT_OPS: Mapping[str, OpEntry] = {
    **GROUPED,
    "autopar.route.default": OpEntry(rules=_route, local=_local_route, inner=_counts_sent),
    "autopar.spread.default": OpEntry(rules=_spread, local=_local_spread, inner=_rows_sent),
    "autopar.collect.default": OpEntry(rules=_collect, local=_local_collect, inner=_rows_sent),
}

ROUTED: Mapping[str, tuple[bool, ...]] = {
    "autopar.route.default": (True, True),
    "autopar.spread.default": (True,),
    "autopar.collect.default": (False,),
    "autopar.grouped_mm.default": (True,),
    "autopar.grouped_outer.default": (False,),
}
"""Per output, whether it holds rows in an order that is a rank's own, in its first dim (`order`: in all of them)."""

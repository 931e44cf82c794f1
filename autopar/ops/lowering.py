"""From a node and its strategy to what a rank runs, and what that costs."""

from __future__ import annotations

from typing import Any

from autopar.ir.graph import Node, Ref
from autopar.ir.mesh import Mesh
from autopar.ir.strategy import Strategy
from autopar.ops.attention import HELD
from autopar.ops.entry import Inner, LocalCall, LocalContext, Metas, OutMetas
from autopar.ops.table import TABLE


def local_call(
    node: Node, strategy: Strategy, mesh: Mesh, local_inputs: Metas, local_outputs: OutMetas, wholes: Metas = ()
) -> LocalCall:
    """What a rank runs for `node` under `strategy`. Without the global metas of the inputs, `wholes`, pieces are equal.

    The `Ref`s of the result, in flattened order, are `node.refs`, all of them in the same order: with a value used
    twice in different layouts, the i-th `Ref` is the i-th argument in the layout `strategy.inputs[i]`.
    """
    entry = TABLE.get(node.op)
    here = LocalContext(node, strategy, mesh, local_inputs, local_outputs, wholes)
    call = here.same() if entry is None or entry.local is None else entry.local(here)
    assert _refs((call.args, tuple(v for _, v in call.kwargs))) == list(node.refs), f"{node.op} loses an argument"
    return call


def _refs(tree: Any) -> list[str]:
    if isinstance(tree, Ref):
        return [tree.name]
    return [name for item in tree for name in _refs(item)] if isinstance(tree, (tuple, list)) else []


def inner_collectives(
    node: Node, strategy: Strategy, mesh: Mesh, local_inputs: Metas, local_outputs: OutMetas
) -> tuple[Inner, ...]:
    """(collective, axis, bytes of its local input) for each inside the local form of the op."""
    entry = TABLE.get(node.op)
    if entry is None or entry.inner is None or not any(strategy.tags):
        return ()
    return tuple(entry.inner(LocalContext(node, strategy, mesh, local_inputs, local_outputs)))


def rounds(node: Node, strategy: Strategy, mesh: Mesh, local_inputs: Metas, local_outputs: OutMetas) -> tuple[int, ...]:
    """How often the op runs on its pieces, by rounds, beside which its inner collectives are on their way; () where it
    runs once and its collectives before or after it."""
    entry = TABLE.get(node.op)
    if entry is None or entry.rounds is None or not any(strategy.tags):
        return ()
    return entry.rounds(LocalContext(node, strategy, mesh, local_inputs, local_outputs))


def held_bytes(function: str, args: tuple[Any, ...], inputs: Metas, mesh: Mesh) -> int:
    """Bytes that a call holds beside its inputs, of these local metas, and its outputs: counted of local forms whose
    first argument is the axis that they talk along."""
    return HELD[function](inputs, mesh.axis(args[0]).size) if function in HELD else 0


def flops(node: Node, inputs: Metas, outputs: OutMetas) -> float:
    """Floating point operations on local metas. Ops without a formula: one per output element; views: 0.

    An opaque op has what was measured on a run with example inputs, an estimate for other inputs.
    """
    if node.measured is not None:
        return float(node.measured.flops)
    entry = TABLE.get(node.op)
    if entry is not None and entry.view:
        return 0.0
    if entry is not None and entry.flops is not None:
        return entry.flops(node, inputs, outputs)
    return float(sum(o.numel for o in outputs if o is not None))


def moved_bytes(node: Node, inputs: Metas, outputs: OutMetas) -> int:
    """Bytes read and written on local metas; 0 for views. A look-up reads only the rows that it gives."""
    if node.measured is not None:
        return node.measured.moved_bytes
    if is_view(node.op):
        return 0
    written = sum(o.nbytes for o in outputs if o is not None)
    if node.op in _LOOKUPS:
        return sum(m.nbytes for m in inputs[1:]) + 2 * written
    return sum(m.nbytes for m in inputs) + written


_LOOKUPS = frozenset(
    {"aten.embedding.default", "aten.gather.default", "aten.index.Tensor", "aten.index_select.default"}
)


def is_view(op: str) -> bool:
    """True if the op moves no bytes."""
    entry = TABLE.get(op)
    return entry is not None and entry.view


def is_random(op: str) -> bool:
    """True if the op draws random numbers."""
    entry = TABLE.get(op)
    return entry is not None and entry.random

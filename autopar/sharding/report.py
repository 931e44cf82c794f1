"""What a person should know about a table: ops without a rule, ops that lost the batch, cuts that don't divide."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopar.ir.cuts import is_even
from autopar.ir.graph import CapturedGraph, Node, TensorMeta
from autopar.ir.layout import unit_of
from autopar.ir.mesh import Mesh
from autopar.ir.strategy import Note, Rule
from autopar.sharding.traces import Trace


def _where(node: Node) -> str:
    return " ".join(part for part in (node.module_path, node.source) if part) or node.key


def note_replicated(
    captured: CapturedGraph, rules: Mapping[tuple[str, str], tuple[Rule, ...]], unknown: set[str]
) -> Iterator[Note]:
    """Ops of more than one element that every rank must run whole, once per op and source line."""
    seen: set[tuple[str, str]] = set()
    for graph in captured.graphs:
        for node in graph.nodes:
            if node.block is not None or len(rules[graph.name, node.name]) > 1 or (node.op, _where(node)) in seen:
                continue
            if node.measured is not None:  # a region: it has a note of its own
                continue
            if max((o.meta.numel for o in node.outputs if o is not None), default=0) <= 1:
                continue
            seen.add((node.op, _where(node)))
            why = "no rule says how to split it" if node.op in unknown else "it can't be split"
            yield Note("replicated", _where(node), f"{node.op} runs whole on every rank: {why}")


def note_lost(captured: CapturedGraph, mesh: Mesh, traces: Mapping[str, Mapping[str, Trace]]) -> Iterator[Note]:
    """Ops that can't keep the batch (dp) or the sequence (cp) cut, one note per axis and op name."""
    for axis in mesh.axes:
        if axis.name not in traces or axis.size == 1:
            continue
        by_op: dict[str, list[Node]] = {}
        for graph in captured.graphs:
            for node in graph.nodes:
                if node.name in traces[axis.name][graph.name].lost and node.measured is None:
                    by_op.setdefault(node.op, []).append(node)
        what = "sequence" if axis.name == "cp" else "batch"
        for op, nodes in by_op.items():
            more = f" ({len(nodes)} places)" if len(nodes) > 1 else ""
            yield Note("role", _where(nodes[0]), f"{op} has no rule that keeps the {what} cut on {axis.name}{more}")


class Dropped:
    """Collects, per axis, the cuts that were dropped because a dim isn't a multiple of the axis, and the op or the
    other dims that it cuts with it can't have unequal pieces."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.first: dict[tuple[int, int], tuple[Node, int]] = {}
        self.count: dict[tuple[int, int], int] = {}

    def add(
        self,
        axis: int,
        node: Node,
        chosen: tuple[Rule, ...],
        fit: tuple[Rule, ...],
        inputs: tuple[TensorMeta, ...],
        outputs: tuple[TensorMeta | None, ...],
    ) -> None:
        """Remember a node and the sizes that don't divide."""
        size = self.mesh.axes[axis].size
        bad: set[tuple[int, int]] = set()
        kept = set(fit)
        for rule in chosen:
            if rule in kept:
                continue
            both = zip((*rule.inputs, *rule.outputs), (*inputs, *outputs), strict=True)
            for placement, meta in both:
                if placement is None or meta is None or placement.dim < 0:
                    continue
                if not is_even(meta.shape[placement.dim], size, unit_of(meta.units, placement.dim)):
                    bad.add((placement.dim, meta.shape[placement.dim]))
        for dim, extent in bad:
            key = (axis, extent)
            self.first.setdefault(key, (node, dim))
            self.count[key] = self.count.get(key, 0) + 1

    def notes(self) -> Iterator[Note]:
        """One per axis and size."""
        for (i, extent), (node, dim) in self.first.items():
            axis = self.mesh.axes[i]
            yield Note(
                "indivisible",
                _where(node),
                f"a dim of size {extent} can't be cut {axis.size} ways on {axis.name}: "
                + (
                    f"ranks would be left with nothing in {self.count[i, extent]} ops"
                    if extent < axis.size
                    else f"{self.count[i, extent]} ops don't take unequal pieces, or an empty one"
                )
                + f", first {node.op} (dim {dim})",
            )

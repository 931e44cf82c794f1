"""Which of an op's one-axis rules are choices on an axis, by its role (docs/decisions/0001-axes-have-roles.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.graph import Graph, InputKind, Node
from autopar.ir.layout import Kind, P, Placement, R
from autopar.ir.strategy import Rule
from autopar.ops import TABLE, is_random
from autopar.ops.attention import RING
from autopar.sharding.storage import Storage
from autopar.sharding.traces import Trace
from autopar.sharding.weights import RulesOf, Weights, follow, is_follower

TRACED = {"dp": 0, "cp": 1, "ep": 0}
"""Axes that follow a dim of the inputs: 0 the batch, 1 the sequence."""
EXPERTS = "ep"
"""The one of them that cuts experts too."""


@dataclass(frozen=True, slots=True)
class Roles:
    """Of one graph: what the roles need to know about its values."""

    graph: Graph
    weights: Weights
    traces: Mapping[str, Trace]
    plain: frozenset[str]


def plain_values(graph: Graph) -> frozenset[str]:
    """Values made of integer inputs, buffers and constants only: positions, masks. On tp they stay whole: slicing
    is free."""
    found = {
        i.value.name
        for i in graph.inputs
        if i.kind in (InputKind.BUFFER, InputKind.CONSTANT)
        or (i.kind is InputKind.INPUT and "float" not in i.value.meta.dtype)
    }
    for node in graph.nodes:
        if node.block is None and not is_random(node.op) and all(name in found for name in node.refs):
            found.update(o.name for o in node.outputs if o is not None)
    return frozenset(found)


def tensor_parallel(roles: Roles, axis: str, storage: Storage, rules_of: RulesOf) -> dict[str, tuple[Rule, ...]]:
    """Node name -> rules on a tensor-parallel axis; an empty tuple where the role leaves none."""
    graph = roles.graph
    wanted: dict[str, frozenset[Placement]] = {}
    for (where, value), per_axis in storage.used.items():
        if where == graph.name:
            wanted[value] = per_axis[axis]
    batch = _batch(roles)
    found: dict[str, tuple[Rule, ...]] = {}
    for node in graph.nodes:
        if node.block is not None:
            continue
        rules = rules_of(node)
        out = node.first
        if is_follower(node) and node.refs[0] in wanted and out is not None:
            wanted[out.name] = follow(node, wanted[node.refs[0]], rules_of)
        found[node.name] = _on_tp(node, rules, wanted, batch, roles.plain)
    return found


def _batch(roles: Roles) -> dict[str, Placement]:
    """Where values have the batch. Rows in no order have it nowhere: what is cut of them is experts."""
    metas = roles.weights.metas
    return {name: p for name, p in roles.traces["dp"].placement.items() if not metas[name].unordered}


def _on_tp(
    node: Node,
    rules: tuple[Rule, ...],
    wanted: Mapping[str, frozenset[Placement]],
    batch: Mapping[str, Placement],
    plain: frozenset[str],
) -> tuple[Rule, ...]:
    outputs = [o.name for o in node.outputs if o is not None]
    if all(name in plain for name in outputs):
        return rules[:1]
    heavy = (entry := TABLE.get(node.op)) is not None and entry.flops is not None
    found = []
    for rule in rules:
        if rule.tag == RING or (heavy and P in rule.inputs):
            continue
        if all(_argument_suits(p, name, wanted, batch) for p, name in zip(rule.inputs, node.refs, strict=True)) and all(
            value is None or not _cuts_batch(p, batch.get(value.name, R))
            for p, value in zip(rule.outputs, node.outputs, strict=True)
        ):
            found.append(rule)
    return tuple(found)


def _argument_suits(
    placement: Placement, name: str, wanted: Mapping[str, frozenset[Placement]], batch: Mapping[str, Placement]
) -> bool:
    if name in wanted:
        return placement in wanted[name]
    return not _cuts_batch(placement, batch.get(name, R))


def _cuts_batch(placement: Placement | None, batch: Placement) -> bool:
    return placement is not None and placement.kind is Kind.SHARD and placement == batch

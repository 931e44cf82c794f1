"""What descends from parameters only, and which of its dims the ops that read it can take cut.

A *weight* is a parameter or a unary rearrangement or cast of one (t, transpose, view, _to_copy, ...). On a
tensor-parallel axis weights of two or more dims are used as stored; `accepted` says along which dims that can be.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from autopar.ir.graph import Graph, InputKind, Node, TensorMeta
from autopar.ir.layout import Kind, Placement, S
from autopar.ir.strategy import Rule

RulesOf = Callable[[Node], tuple[Rule, ...]]

FOLLOWERS = frozenset(
    f"aten.{name}"
    for name in (
        "t.default", "transpose.int", "permute.default", "view.default", "_unsafe_view.default", "reshape.default",
        "_to_copy.default", "clone.default", "detach.default", "alias.default", "unsqueeze.default", "squeeze.dim",
        "squeeze.dims", "squeeze.default",
    )
) | {"prims.convert_element_type.default", "prims.view_of.default"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Weights:
    """Of one graph. `parameter`: value name -> name of the parameter's value that it descends from.

    `consumers`: value name -> (node, argument position) of those that read it. `metas`: of every value.
    """

    parameter: Mapping[str, str]
    consumers: Mapping[str, tuple[tuple[Node, int], ...]]
    metas: Mapping[str, TensorMeta]


def find_weights(graph: Graph) -> Weights:
    """Parameters and their followers."""
    parameter = {i.value.name: i.value.name for i in graph.inputs if i.kind is InputKind.PARAMETER}
    consumers: dict[str, list[tuple[Node, int]]] = defaultdict(list)
    for node in graph.nodes:
        for position, ref in enumerate(node.refs):
            consumers[ref].append((node, position))
        if is_follower(node) and node.refs[0] in parameter and node.outputs[0] is not None:
            parameter[node.outputs[0].name] = parameter[node.refs[0]]
    metas = {name: value.meta for name, value in graph.values().items()}
    return Weights(parameter, {name: tuple(found) for name, found in consumers.items()}, metas)


def is_follower(node: Node) -> bool:
    """True if the node only rearranges or casts its one tensor argument."""
    return node.op in FOLLOWERS and len(node.refs) == 1 and len(node.outputs) == 1


def accepted_dims(
    name: str, weights: Weights, rules_of: RulesOf, fits: Callable[[TensorMeta, int], bool]
) -> frozenset[int] | None:
    """Dims along which the readers of a weight can take it cut: all of them if possible, else some. None: no reader.

    `fits(meta, dim)` says whether a dim can be cut at all on the axis in question.
    """
    answers: list[frozenset[int]] = []
    for node, position in weights.consumers.get(name, ()):
        if node.block is not None:
            continue
        out = node.first
        if is_follower(node) and out is not None:
            later = accepted_dims(out.name, weights, rules_of, fits)
            if later is None:
                continue
            found = {r.inputs[0].dim for r in rules_of(node) if _cut(r.outputs[0]) and _dim(r.outputs[0]) in later}
            answers.append(frozenset(d for d in found if d >= 0 and fits(weights.metas[name], d)))
        else:
            dims = {r.inputs[position].dim for r in rules_of(node) if _cut(r.inputs[position])}
            answers.append(frozenset(d for d in dims if fits(weights.metas[name], d)))
    return agree(answers)


def agree(answers: Iterable[frozenset[int]]) -> frozenset[int] | None:
    """Dims on which all that accept any agree; failing that, all dims that anyone accepts. None: nobody was asked."""
    listed = list(answers)
    if not listed:
        return None
    some = [a for a in listed if a]
    if not some:
        return frozenset()
    common = frozenset.intersection(*some)
    return common or frozenset.union(*some)


def follow(node: Node, placements: frozenset[Placement], rules_of: RulesOf) -> frozenset[Placement]:
    """Placements of a follower's output, given those of its argument."""
    return frozenset(o for r in rules_of(node) if r.inputs[0] in placements and (o := r.outputs[0]) is not None)


def _cut(placement: Placement | None) -> bool:
    return placement is not None and placement.kind is Kind.SHARD


def _dim(placement: Placement | None) -> int:
    return -1 if placement is None else placement.dim


def cuts(dims: Iterable[int]) -> frozenset[Placement]:
    """S(d) for each."""
    return frozenset(S(d) for d in dims)

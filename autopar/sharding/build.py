"""The strategy table of a model on a mesh: rules on each axis by its role, multiplied, without what doesn't fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from autopar.ir.graph import CapturedGraph, Graph, GraphInput, InputKind, Node, OutputKind, TensorMeta
from autopar.ir.layout import Kind, Layout, P, Placement, R, S
from autopar.ir.mesh import Mesh
from autopar.ir.options import Options
from autopar.ir.strategy import Rule, Strategy, StrategyTable
from autopar.ops.entry import Pieces
from autopar.sharding.dtensor_rules import RuleCache, one_axis_rules, pieces_of
from autopar.sharding.expand import Expander
from autopar.sharding.pins import INPUT, PinError, layout_pins
from autopar.sharding.report import Dropped, note_lost, note_replicated
from autopar.sharding.roles import EXPERTS, TRACED, Roles, plain_values, tensor_parallel
from autopar.sharding.storage import Storage, choose_storage, find_uses
from autopar.sharding.traces import Trace, followed_size, trace_graphs
from autopar.sharding.weights import RulesOf, Weights, find_weights


@dataclass(frozen=True, slots=True)
class Survey:
    """What doesn't depend on the mesh: rules, weights, and where batch and sequence are. Kept in the `RuleCache`.

    `followed` has the size of the batch (dp) and of the sequence (cp), 0 if there is none.
    `pieces`: per op, which pieces of a dim that doesn't divide it takes.
    """

    rules: Mapping[tuple[str, str], tuple[Rule, ...]]
    weights: Mapping[str, Weights]
    traces: Mapping[str, Mapping[str, Trace]]
    plain: Mapping[str, frozenset[str]]
    followed: Mapping[str, int]
    pieces: Mapping[str, Pieces]

    def rules_of(self, graph: Graph) -> RulesOf:
        """The rules of a graph's nodes."""
        return lambda node: self.rules[graph.name, node.name]


def build_table(
    captured: CapturedGraph, mesh: Mesh, options: Options, *, rules: RuleCache | None = None
) -> StrategyTable:
    """Every choice on `mesh`. `rules` is shared over meshes and models of one search.

    Raises UserError for pins that match nothing or contradict each other, PinError for what this mesh can't satisfy.
    """
    cache = rules or RuleCache()
    survey = survey_model(captured, cache)
    names = {(g.name, n.name): n for g in captured.graphs for n in g.nodes}
    by_name: dict[int, tuple[Rule, ...]] = {id(n): survey.rules[k] for k, n in names.items() if n.block is None}
    rules_of: RulesOf = lambda node: by_name[id(node)]  # noqa: E731
    pins = layout_pins(captured, mesh, options.pins)
    storage = choose_storage(
        captured, mesh, find_uses(captured), survey.weights, rules_of,
        {name: wanted for name, wanted in pins.items() if not name.startswith(INPUT)}, options.pins.get("zero"),
    )  # fmt: skip
    expander, dropped = Expander(mesh), Dropped(mesh)
    nodes = {g.name: _node_strategies(g, survey, storage, expander, dropped) for g in captured.graphs}
    tables = _Ends(mesh, expander, survey, nodes, pins)
    return StrategyTable(
        mesh=mesh,
        nodes=nodes,
        inputs={g.name: tables.inputs(g, g is captured.top) for g in captured.graphs},
        storage=storage.layouts,
        outputs={
            g.name: tables.outputs(g, g is captured.top, captured.signature.differentiable) for g in captured.graphs
        },
        notes=(
            *note_replicated(captured, survey.rules, cache.replicated),
            *storage.notes,
            *note_lost(captured, mesh, survey.traces),
            *dropped.notes(),
        ),
    )


def survey_model(captured: CapturedGraph, cache: RuleCache) -> Survey:
    """Ask for every node's rules and follow the batch and the sequence through the model, once per model."""
    key = (captured.model_name, captured.hash)
    known: Survey | None = cache.states.get(key)
    if known is not None:
        return known
    weights = {g.name: find_weights(g) for g in captured.graphs}
    rules = {
        (g.name, n.name): one_axis_rules(n, tuple(weights[g.name].metas[r] for r in n.refs), cache)
        for g in captured.graphs
        for n in g.nodes
        if n.block is None
    }
    by_node = {id(n): rules[g.name, n.name] for g in captured.graphs for n in g.nodes if n.block is None}
    traces = {
        axis: trace_graphs(captured, lambda node: by_node[id(node)], dim, weights)
        for axis, dim in TRACED.items()
        if axis != EXPERTS
    }
    traces[EXPERTS] = traces["dp"]
    if expert_count(captured) > 1:
        dim = TRACED[EXPERTS]
        traces[EXPERTS] = trace_graphs(captured, lambda node: by_node[id(node)], dim, weights, experts=True)
    followed = {axis: followed_size(captured.top, dim) or 0 for axis, dim in TRACED.items()}
    used = {n.op for g in captured.graphs for n in g.nodes if n.block is None}
    found = Survey(
        rules, weights, traces, {g.name: plain_values(g) for g in captured.graphs},
        followed, {op: pieces_of(op) for op in used},
    )  # fmt: skip
    cache.states[key] = found
    return found


def followed_sizes(captured: CapturedGraph) -> dict[str, int]:
    """How much there is for an axis to cut: rows of the batch (dp), the sequence (cp), experts (ep, at least 1)."""
    found = {axis: followed_size(captured.top, dim) for axis, dim in TRACED.items()}
    found[EXPERTS] = expert_count(captured)
    return {axis: size for axis, size in found.items() if size is not None}


def expert_count(captured: CapturedGraph) -> int:
    """What divides the numbers of experts of all layers; 1 without experts."""
    return math.gcd(*(p.meta.shape[p.meta.experts] for p in captured.parameters if p.meta.experts >= 0)) or 1


def _node_strategies(
    graph: Graph, survey: Survey, storage: Storage, expander: Expander, dropped: Dropped
) -> dict[str, tuple[Strategy, ...]]:
    rules_of = survey.rules_of(graph)
    metas = survey.weights[graph.name].metas
    roles = Roles(
        graph, survey.weights[graph.name], {a: t[graph.name] for a, t in survey.traces.items()},
        survey.plain[graph.name],
    )  # fmt: skip
    per_axis: list[Mapping[str, tuple[Rule, ...]] | None] = []
    for axis in expander.mesh.axes:
        if axis.name in TRACED:
            allowed = roles.traces[axis.name].allowed
            uncut = survey.followed[axis.name] < axis.size
            per_axis.append(_or_whole(allowed, graph, rules_of) if uncut else allowed)
        elif axis.name == "tp":
            per_axis.append(tensor_parallel(roles, axis.name, storage, rules_of))
        else:
            per_axis.append(None)
    found: dict[str, tuple[Strategy, ...]] = {}
    for node in graph.nodes:
        if node.block is None:
            inputs = tuple(metas[r] for r in node.refs)
            outputs = tuple(None if o is None else o.meta for o in node.outputs)
            rules = rules_of(node)
            chosen = tuple(rules if allowed is None else allowed[node.name] for allowed in per_axis)
            pieces = survey.pieces[node.op]
            found[node.name] = _strategies(node, rules, chosen, inputs, outputs, expander, dropped, pieces)
    return found


def _or_whole(allowed: Mapping[str, tuple[Rule, ...]], graph: Graph, rules_of: RulesOf) -> dict[str, tuple[Rule, ...]]:
    """With the whole op beside each choice: where the batch can't be cut, nothing is a sum over it either."""
    whole = {n.name: rules_of(n)[:1] for n in graph.nodes if n.block is None}
    return {name: tuple(dict.fromkeys((*allowed[name], *whole[name]))) for name in whole}


def _strategies(
    node: Node,
    rules: tuple[Rule, ...],
    chosen: tuple[tuple[Rule, ...], ...],
    inputs: tuple[TensorMeta, ...],
    outputs: tuple[TensorMeta | None, ...],
    expander: Expander,
    dropped: Dropped,
    pieces: Pieces,
) -> tuple[Strategy, ...]:
    """The product of the role's rules that fit; where an axis has none, all that fit; at the least, whole."""
    per_axis = []
    for i, axis in enumerate(expander.mesh.axes):
        if axis.size == 1:
            per_axis.append(rules[:1])
            continue
        fit = expander.fitting(i, chosen[i], inputs, outputs, pieces)
        if len(fit) < len(chosen[i]):
            dropped.add(i, node, chosen[i], fit, inputs, outputs)
        per_axis.append(fit or expander.fitting(i, rules, inputs, outputs, pieces))
    found = expander.expand(tuple(per_axis), inputs, outputs)
    if found:
        return found
    wider = tuple((*fit, *(r for r in rules[:1] if r not in fit)) for fit in per_axis)
    return expander.expand(wider, inputs, outputs)


class _Ends:
    """Layouts of graph inputs and outputs."""

    def __init__(
        self, mesh: Mesh, expander: Expander, survey: Survey, nodes: Mapping[str, Mapping[str, tuple[Strategy, ...]]],
        pins: Mapping[str, Mapping[str, Placement]],
    ) -> None:  # fmt: skip
        self.mesh = mesh
        self.expander = expander
        self.survey = survey
        self.nodes = nodes
        self.pins = pins

    def inputs(self, graph: Graph, top: bool) -> dict[str, tuple[Layout, ...]]:
        """Of everything but parameters. Inputs of the whole model, buffers and constants are on every rank already."""
        return {i.value.name: self._input(graph, i, top) for i in graph.inputs if i.kind is not InputKind.PARAMETER}

    def _input(self, graph: Graph, given: GraphInput, top: bool) -> tuple[Layout, ...]:
        meta, name = given.value.meta, given.value.name
        held_whole = given.kind in (InputKind.BUFFER, InputKind.CONSTANT) or (
            top and given.kind is InputKind.TANGENT and meta.shape == ()
        )
        if held_whole:
            return (self.expander.layout((R,) * len(self.mesh.axes)),)
        fed = top and given.kind is InputKind.INPUT
        plain = name in self.survey.plain[graph.name] or fed
        found = self.choices(graph, name, meta, whole_on_tp=plain, sums=False, edge=top)
        # Equals go to the first choice: an input that all readers take cut is fed cut, so that no rank loads all of it.
        return self._as_pinned(f"{INPUT}{given.target}", found[::-1]) if fed else found

    def _as_pinned(self, name: str, found: tuple[Layout, ...]) -> tuple[Layout, ...]:
        wanted = self.pins.get(name, {})
        kept = tuple(layout for layout in found if all(layout.on(a) == p for a, p in wanted.items()))
        if not kept:
            said = " ".join(f"{a}:{p}" for a, p in wanted.items())
            raise PinError(
                f"pin {name!r}: on mesh {self.mesh} it is not given as {said}; it can be "
                f"{' or '.join(map(str, found[:4]))}"
            )
        return kept

    def choices(
        self, graph: Graph, name: str, meta: TensorMeta, *, whole_on_tp: bool, sums: bool, edge: bool
    ) -> tuple[Layout, ...]:
        """Products over axes of what a value's role lets it be. `edge`: it enters or leaves the module, where cuts are
        torch's own."""
        per_axis: list[list[Placement]] = []
        for axis in self.mesh.axes:
            options = [R]
            if axis.size > 1 and axis.name in TRACED:
                found = self.survey.traces[axis.name][graph.name].placement.get(name, R)
                options += [found] if found.kind is Kind.SHARD else []
                options += [P] if found == P and sums else []
            elif axis.size > 1 and not (axis.name == "tp" and whole_on_tp):
                batch = self.survey.traces["dp"][graph.name].placement.get(name, R) if axis.name == "tp" else R
                options += [S(d) for d in range(len(meta.shape)) if S(d) != batch]
            per_axis.append(options)
        made = (self.expander.layout(c) for c in itertools.product(*per_axis))
        return tuple(layout for layout in made if self.expander.holds(layout, meta, edge))

    def outputs(self, graph: Graph, top: bool, differentiable: tuple[bool, ...]) -> dict[int, tuple[Layout, ...]]:
        """Of OUTPUTs and BUFFER_UPDATEs, and of gradients of what isn't a parameter.

        Whatever the caller computes a loss from leaves the model whole, and gradients of its inputs too.
        """
        whole = (self.expander.layout((R,) * len(self.mesh.axes)),)
        metas = self.survey.weights[graph.name].metas
        parameters = {i.value.name for i in graph.inputs if i.kind is InputKind.PARAMETER}
        makers = {o.name: (n.name, k) for n in graph.nodes for k, o in enumerate(n.outputs) if o is not None}
        found: dict[int, tuple[Layout, ...]] = {}
        for position, result in enumerate(graph.outputs):
            if result.value is None or (result.kind is OutputKind.GRADIENT and result.target in parameters):
                continue
            meta = metas[result.value]
            if top and (result.kind is not OutputKind.OUTPUT or meta.shape == () or differentiable[int(result.target)]):
                found[position] = whole
            elif not top and result.value in makers and makers[result.value][0] in self.nodes[graph.name]:
                name, output = makers[result.value]
                found[position] = _made(self.nodes[graph.name][name], output)
            else:
                found[position] = self.choices(graph, result.value, meta, whole_on_tp=False, sums=not top, edge=top)
        return found


def _made(strategies: Iterable[Strategy], output: int) -> tuple[Layout, ...]:
    layouts: Iterator[Layout | None] = (s.outputs[output] for s in strategies)
    return tuple(dict.fromkeys(layout for layout in layouts if layout is not None))

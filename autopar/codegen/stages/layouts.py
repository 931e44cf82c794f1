"""The layouts of a plan for what runs in micro-batches: on the mesh of a stage with one more axis, in time.

A plan's `dp` cuts activations over ranks and micro-batches alike (`pipelines.trials.Trial.pieces`). Here these are two
axes: what `dp` does to a tensor, the axis `MICRO` behind it does as well, so that pieces are the same. What parameters
alone decide is the same in every micro-batch: R there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autopar.codegen.layouts import PlanLayouts, own_inputs
from autopar.codegen.stages.hoist import MADE
from autopar.errors import CompilerError, PlanError
from autopar.ir.graph import CapturedGraph, Graph, GraphInput, InputKind, Node, OutputKind, Phase, tensor_keys
from autopar.ir.layout import Kind, Layout, Placement, R
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.plan import Plan, mesh_of
from autopar.ir.reshard import plan_reshard
from autopar.ir.staged import JOINED, MICRO, RECEIVED
from autopar.ir.strategy import Strategy
from autopar.ops.lowering import is_random

DATA = "dp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """By which of a plan's ways each graph is run: keys of `Plan.strategies`.

    Attributes:
        first, last: of the top graph's nodes before the blocks, named in `before`, and of its others.
        blocks: module path of an instance -> the key.
    """

    first: str
    last: str
    before: frozenset[str]
    blocks: Mapping[str, str]


def micro_mesh(plan: Plan) -> Mesh:
    """The mesh of a stage with the axis of micro-batches behind `dp`."""
    times = plan.schedule.micro_batches
    found: list[Axis] = []
    for axis in mesh_of(plan).axes:
        found.append(axis)
        if axis.name == DATA:
            found.append(Axis(name=MICRO, size=times, level=axis.level))
    if times > 1 and len(found) == len(plan.mesh.axes):
        raise PlanError(f"the plan for {plan.model.name} has {times} micro-batches and no axis {DATA} that they cut")
    return Mesh(axes=tuple(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """The model as captured, on its micro-batches: what every part's layouts are looked up in."""

    captured: CapturedGraph
    plan: Plan
    mesh: Mesh
    ways: Ways
    _lasting: dict[str, frozenset[str]] = field(default_factory=dict)
    _strategies: dict[tuple[str, str], Strategy] = field(default_factory=dict)
    _graphs: dict[str, dict[str, Node]] = field(default_factory=dict)
    _keys: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def device(self) -> PlanLayouts:
        """The plan's layouts as they are written."""
        return PlanLayouts(self.captured, self.plan, mesh_of(self.plan))

    def spread(self, layout: Layout, *, lasting: bool) -> Layout:
        """A layout on the mesh with micro-batches."""
        if MICRO not in self.mesh.names:
            return layout
        placements: list[Placement] = []
        for axis, placement in zip(layout.axes, layout.placements, strict=True):
            placements.append(placement)
            if axis == DATA:
                placements.append(R if lasting else placement)
        return Layout(self.mesh.names, tuple(placements))

    def parse(self, text: str | None, where: str, *, lasting: bool = False) -> Layout:
        """A layout from a plan's text; None: whole."""
        return self.spread(self.device.parse(text if text is not None else "whole", where), lasting=lasting)

    def lasting(self, graph: Graph) -> frozenset[str]:
        """Values of a graph that parameters alone decide."""
        key = graph.name
        if key not in self._lasting:
            found = {i.value.name for i in graph.inputs if i.kind is InputKind.PARAMETER}
            for node in graph.nodes:
                own = node.phase is Phase.FORWARD and node.block is None and not is_random(node.op)
                if own and node.refs and all(r in found for r in node.refs):
                    found |= {o.name for o in node.outputs if o is not None}
            self._lasting[key] = frozenset(found)
        return self._lasting[key]

    def way(self, graph: Graph, node: Node) -> str:
        """The key of `Plan.strategies` that says how a node runs."""
        if graph.name != self.captured.top.name:
            return graph.name
        return self.ways.first if node.name in self.ways.before else self.ways.last

    def strategy(self, graph: Graph, node: Node) -> Strategy:
        """What the plan chose for an op, in micro-batches."""
        way = self.way(graph, node)
        found = self._strategies.get((way, node.key))
        if found is None:
            found = self._strategies[way, node.key] = self._strategy(graph, node, way)
        return found

    def _strategy(self, graph: Graph, node: Node, way: str) -> Strategy:
        named = replace(graph, name=way)
        plain = self.device.strategy(named, node)
        names = self.lasting(graph)
        made = bool(node.outputs) and node.first is not None and node.first.name in names
        tags: list[str] = []
        for axis, tag in zip(mesh_of(self.plan).names, plain.tags or ("",) * len(self.plan.mesh.axes), strict=True):
            tags.append(tag)
            if axis == DATA and MICRO in self.mesh.names:
                tags.append("" if made else tag)
        return Strategy(
            outputs=tuple(None if o is None else self.spread(o, lasting=made) for o in plain.outputs),
            inputs=tuple(self.spread(i, lasting=made) for i in plain.inputs),
            tags=tuple(tags),
        )

    def held(self, graph: Graph, way: str, value: str) -> Layout | None:
        """How a value of a graph as captured stays for all micro-batches, on the devices' mesh; None: it doesn't."""
        if graph.name not in self._keys:
            self._keys[graph.name] = tensor_keys(graph)
        text = self.plan.held.get(way, {}).get(self._keys[graph.name].get(value, ""))
        return None if text is None else self.device.parse(text, f"{way} {value}")

    def original(self, graph: Graph) -> Graph:
        """The graph as captured that one of a part is made of."""
        if graph.name == self.captured.top.name:
            return self.captured.top
        return replace(self.captured.block(graph.name.partition("#")[0]).graph, name=graph.name)

    def arrival(self, graph: Graph, own: GraphInput) -> Layout:
        """How an input that is no parameter arrives."""
        where = f"{own.kind.value}:{own.target}"
        planned = self.plan.inputs.get(graph.name, {})
        return self.parse(planned.get(where), f"{graph.name} {where}")

    def made(self, graph: Graph, value: str) -> Layout:
        """The layout that a value of a graph is made in (a parameter: R over micro-batches, else of no meaning)."""
        for own in graph.inputs:
            if own.value.name == value:
                if own.kind is InputKind.PARAMETER:
                    return Layout(self.mesh.names, (R,) * len(self.mesh.axes))
                return self.arrival(graph, own)
        node = self._makers(graph)[value]
        position = next(p for p, o in enumerate(node.outputs) if o is not None and o.name == value)
        if node.block is None:
            layout = self.strategy(graph, node).outputs[position]
            if layout is None:
                raise CompilerError(f"{node.key}: the plan has no layout for its output {value}")
            return layout
        inner = self.block_graph(node)
        kind = OutputKind.OUTPUT if node.phase is Phase.FORWARD else OutputKind.GRADIENT
        made = [o.value for o in inner.outputs if o.kind is kind][position]
        if made is None:
            raise CompilerError(f"{node.key}: the block gives None for {value}")
        return self.made(inner, made)

    def block_graph(self, node: Node) -> Graph:
        """The graph of a block's call, named by its way."""
        assert node.block is not None
        return replace(self.captured.block(node.block.key).graph, name=self.ways.blocks[node.block.instance])

    def _makers(self, graph: Graph) -> dict[str, Node]:
        key = graph.name
        if key not in self._graphs:
            self._graphs[key] = {o.name: n for n in graph.nodes for o in n.outputs if o is not None}
        return self._graphs[key]

    def wanted(self, node: Node, position: int) -> Layout | None:
        """The layout that a node of the top graph reads a ref in; None of a block's parameter."""
        if node.block is None:
            return self.strategy(self.captured.top, node).inputs[position]
        inner = self.block_graph(node)
        own = own_inputs(inner)
        if position >= len(own):
            own = [i for i in inner.inputs if i.kind is InputKind.TANGENT]
            position -= len(own_inputs(inner))
        read = own[position]
        return None if read.kind is InputKind.PARAMETER else self.arrival(inner, read)

    def joins(self, node: Node, position: int) -> bool:
        """True if a node of the top graph reads what all micro-batches make."""
        if self.plan.schedule.micro_batches == 1:
            return False
        value = node.refs[position]
        wanted = self.wanted(node, position)
        if wanted is None or value in self.lasting(self.captured.top):
            return False
        at, to = self.made(self.captured.top, value).on(MICRO), wanted.on(MICRO)
        return at.kind is not Kind.REPLICATE and at != to

    def join_wanted(self, value: str) -> Layout:
        """The layout that the readers of a joined value ask for. PlanError where they don't agree."""
        found: dict[Layout, str] = {}
        for node in self.captured.top.nodes:
            for position, ref in enumerate(node.refs):
                if ref == value and self.joins(node, position):
                    wanted = self.wanted(node, position)
                    assert wanted is not None
                    found.setdefault(wanted, node.key)
        if len(found) > 1:
            raise PlanError(f"{value} is read joined in several layouts, by {', '.join(found.values())}")
        (wanted,) = found
        return wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLayouts(PlanLayouts):
    """`PlanLayouts` of one graph that `cut_graph` made, and of the blocks that it calls.

    Parameters arrive as they stay for all micro-batches (`Plan.held`), and gradients leave as their sums stay.
    """

    whole: Whole
    part: int

    def strategy(self, graph: Graph, node: Node) -> Strategy:
        """What the plan chose for an op, in micro-batches."""
        return self.whole.strategy(graph, node)

    def later(self, graph: Graph) -> dict[str, Layout | None] | None:
        """As of `PlanLayouts`: what this graph makes."""
        whole = self.whole
        way = graph.name if graph.name != whole.captured.top.name else None
        found: dict[str, Layout | None] = {}
        known = False
        for name in (way,) if way is not None else dict.fromkeys((whole.ways.first, whole.ways.last)):
            plain = whole.device.later(replace(graph, name=name))
            known |= plain is not None
            makers = {o.name: n for n in graph.nodes for o in n.outputs if o is not None}
            for value, layout in (plain or {}).items():
                if way is None and value in makers and whole.way(graph, makers[value]) != name:
                    continue
                kept = None if layout is None else whole.spread(layout, lasting=value in whole.lasting(graph))
                if kept is None or not self._is_join(graph, value, kept):
                    found[value] = kept
        return found if known else None

    def _is_join(self, graph: Graph, value: str, kept: Layout) -> bool:
        """True if micro-batches together make what is kept: the backward reads it joined, then."""
        if self.plan.schedule.micro_batches == 1:
            return False
        made = self._as_made(graph, value).on(MICRO)
        return made.kind is not Kind.REPLICATE and made != kept.on(MICRO)

    def arrivals(self, graph: Graph) -> dict[str, Layout]:
        """Of each input; of what another part sends, the layout in which it was made."""
        whole = self.whole
        top = whole.captured.top
        names = self._parameter_names(graph)
        found = {}
        for own in graph.inputs:
            name = own.value.name
            if own.kind is InputKind.PARAMETER:
                found[name] = whole.spread(self.weight(graph, name, names[name]), lasting=True)
            elif own.target.startswith(RECEIVED):
                found[name] = whole.made(top, name)
            elif own.target.startswith(JOINED):
                wanted = whole.join_wanted(own.target.removeprefix(JOINED))
                found[name] = wanted.replace(MICRO, R)
            else:
                found[name] = whole.arrival(graph, own)
        return found

    def output(self, position: int) -> Layout:
        """What leaves a part leaves as it was made."""
        value = self.captured.top.outputs[position].value
        assert value is not None
        return self._as_made(self.captured.top, value)

    def weight(self, graph: Graph, value: str, name: str) -> Layout:
        """How a parameter of a graph, `name` in the top graph, stays for all micro-batches, on the devices' mesh."""
        whole, made = self.whole, name.startswith(MADE)
        original = whole.original(graph)
        if graph.name == whole.captured.top.name:
            inside = self._in_block(value)
            if inside is not None:
                inner, own = inside
                return self.weight(inner, own.value.name, own.target if own.target.startswith(MADE) else name)
        held = whole.held(original, self._way(original, value), value)
        if held is not None:
            return held
        if made:
            raise PlanError(f"plan for {self.plan.model.name}: it doesn't say how {name} stays; search again")
        return whole.device.storage(name)

    def parameter_names(self, block: str) -> dict[str, str]:
        """Value of each parameter of a block -> its name, of the first instance."""
        return self._parameter_names(self.captured.block(block).graph)

    def _way(self, original: Graph, value: str) -> str:
        """By which way a value of a graph is made; a parameter of both ends, as this part's end reads it."""
        whole = self.whole
        if original.name != whole.captured.top.name:
            return original.name
        maker = next((n for n in original.nodes if any(o is not None and o.name == value for o in n.outputs)), None)
        if maker is not None:
            return whole.way(original, maker)
        return whole.ways.first if self.part == 0 and len(self.plan.stages) > 1 else whole.ways.last

    def _in_block(self, value: str) -> tuple[Graph, GraphInput] | None:
        """The block's parameter that a value of the top graph is; None: it is no block's."""
        for node in self.captured.top.nodes:
            if node.op == "autopar.block" and node.block is not None and value in node.refs:
                inner = self.captured.block(node.block.key).graph
                own = own_inputs(inner)[node.refs.index(value)]
                return (inner, own) if own.kind is InputKind.PARAMETER else None
        return None

    def gradient(self, graph: Graph, target: str, value: str) -> Layout:
        """As the sum over micro-batches stays; a summand of each, unless all make the same."""
        whole = self.whole
        inner = self._block_gradient(graph, value)
        if inner is not None:
            return inner
        made = self._as_made(graph, value)
        original = whole.original(graph)
        total = next(
            (o.value for o in original.outputs if o.kind is OutputKind.GRADIENT and o.target == target), None
        ) or value  # fmt: skip
        held = whole.held(original, self._way(original, total), total)
        found = whole.spread(held, lasting=True) if held is not None else None
        if MICRO in whole.mesh.names:
            at = made.on(MICRO)
            if at.kind is Kind.SHARD and whole.plan.schedule.micro_batches > 1:
                raise PlanError(f"the gradient {value} is made in pieces by micro-batches: search with 1 of them")
            kind = at if at.kind is not Kind.SHARD else R
            found = found.replace(MICRO, kind) if found is not None else None
            stored = whole.spread(whole.device.storage(self._parameter_names(graph)[target]), lasting=True)
            stored = stored.replace(MICRO, kind)
        else:
            stored = whole.device.storage(self._parameter_names(graph)[target])
        return found if found is not None and plan_reshard(made, found) is not None else stored

    def _block_gradient(self, graph: Graph, value: str) -> Layout | None:
        """Of a gradient that a block's call in the top graph gives: as the block makes it."""
        for node in graph.nodes:
            for position, out in enumerate(node.outputs) if node.block is not None else ():
                if out is not None and out.name == value:
                    assert node.block is not None
                    inner = self.captured.block(node.block.key).graph
                    ends = [o for o in inner.outputs if o.kind is OutputKind.GRADIENT]
                    end = ends[position]
                    assert end.value is not None
                    return self.gradient(inner, end.target, end.value)
        return None

    def _as_made(self, graph: Graph, value: str) -> Layout:
        whole = self.whole
        for own in graph.inputs:
            if own.value.name == value:
                return self.arrivals(graph)[value]
        for node in graph.nodes:
            if any(o is not None and o.name == value for o in node.outputs) and node.block is None:
                position = next(p for p, o in enumerate(node.outputs) if o is not None and o.name == value)
                layout = self.strategy(graph, node).outputs[position]
                assert layout is not None
                return layout
        return whole.made(whole.captured.top if graph.name == whole.captured.top.name else graph, value)


def without_micro(layout: Layout, mesh: Mesh) -> Layout:
    """The layout on the devices' own mesh."""
    return Layout(mesh.names, tuple(layout.on(name) for name in mesh.names))

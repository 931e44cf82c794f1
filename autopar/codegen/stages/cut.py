"""The top graph -> one joint graph for each part of a pipeline, and what runs before and after all micro-batches.

A part's graph has inputs for what other parts send it: values of the forward as INPUTs, gradients as TANGENTs. What it
sends leaves as OUTPUTs of its forward and GRADIENTs of its backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.codegen.stages.live import Joins, Live, find_live
from autopar.errors import PlanError
from autopar.ir.graph import (
    REGION,
    Graph,
    GraphInput,
    GraphOutput,
    InputKind,
    Node,
    OutputKind,
    Phase,
    Ref,
    Value,
)
from autopar.ir.places import Places, place_nodes
from autopar.ir.staged import JOINED, RECEIVED, SUMMED, Passed


@dataclass(frozen=True, slots=True, kw_only=True)
class CutGraph:
    """See the module.

    Attributes:
        parts: joint graphs, in forward order. `passed`: what goes between them.
        first: of each part, what runs for all micro-batches before it, None where nothing does; its outputs are joined.
        last: runs once at the end: what the last part collects -> the outputs of the model.
        collected: the values that `last` takes, in the order of the last part's further outputs.
        shared: parameter (its value) -> parts whose summands of its gradient are added at the end of a step.
        after: of each part, what runs at the end on sums over micro-batches, None where nothing does; its outputs are
            gradients, its targets the parameters' values.
    """

    parts: tuple[Graph, ...]
    passed: tuple[Passed, ...]
    first: tuple[Graph | None, ...]
    last: Graph
    collected: tuple[str, ...]
    shared: Mapping[str, tuple[int, ...]]
    after: tuple[Graph | None, ...]


def cut_graph(top: Graph, blocks: Sequence[int], joins: Joins) -> CutGraph:
    """The graphs of parts that hold so many block calls each.

    Raises PlanError where the model can't run so with the same numbers; says why.
    """
    if any(n.op == REGION for n in top.nodes):
        raise PlanError("a submodule that could not be captured runs whole, not in stages or micro-batches")
    wanted = {i.value.name for i in top.inputs if i.kind is InputKind.INPUT}
    if any(o.kind is OutputKind.GRADIENT and o.value is not None and o.target in wanted for o in top.outputs):
        raise PlanError("gradients of the model's inputs are not given by stages or micro-batches")
    places = place_nodes(top, blocks)
    leaves = [leaf for summands in places.summands.values() for _, leaf in summands]
    live = find_live(top, places, joins, leaves)
    return _Cutter(top, places, live, joins).cut()


@dataclass
class _Part:
    nodes: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)


@dataclass
class _Cutter:
    top: Graph
    places: Places
    live: Live
    joins: Joins
    crossing: dict[tuple[str, Phase], set[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.values = self.top.values()
        self.parts = [_Part() for _ in range(self.places.parts)]

    def cut(self) -> CutGraph:
        """All graphs."""
        last = self.places.parts - 1
        for node in self.top.nodes:
            part = self.places.part.get(node.name)
            if node.name in self.live.main and part is not None:
                self._place(node, part)
            elif node.name in self.live.main and not node.outputs:
                self._place(node, last)
        for summands in self.places.summands.values():
            for part, leaf in summands:
                if not self._waits(leaf):
                    self._read(leaf, part, Phase.BACKWARD)
        for value in self.live.summed:
            self.parts[self._part_of(value)].read.add(value)
        for value in self.live.collected:
            self._read(value, last, Phase.FORWARD)
        updates = [o.value for o in self.top.outputs if o.kind is OutputKind.BUFFER_UPDATE and o.value is not None]
        for value in updates:
            self._update(value)
        passed = [
            Passed(value=v, source=self._part_of(v), targets=tuple(sorted(to)), phase=phase)
            for (v, phase), to in self.crossing.items()
        ]
        return CutGraph(
            parts=tuple(self._graph(p, passed) for p in range(len(self.parts))),
            passed=tuple(passed),
            first=tuple(self._first(p) for p in range(len(self.parts))),
            last=self._last(),
            collected=self.live.collected,
            shared={
                parameter: tuple(sorted({part for part, _ in summands}))
                for parameter, summands in self.places.summands.items()
                if len({part for part, _ in summands}) > 1
            },
            after=tuple(self._after(p) for p in range(len(self.parts))),
        )  # fmt: skip

    def _waits(self, leaf: str) -> bool:
        """True of a gradient that is made at the end."""
        node = self.places.maker.get(leaf)
        return node is not None and node.name in self.live.tails

    def _part_of(self, value: str) -> int:
        return self.places.part[self.places.maker[value].name]

    def _update(self, value: str) -> None:
        node = self.places.maker.get(value)
        if node is not None and node.name not in self.places.floating:
            raise PlanError(f"{node.key}: a buffer is updated from activations, which micro-batches do one by one")
        for part in range(len(self.parts)):
            self._read(value, part, Phase.FORWARD)

    def _place(self, node: Node, part: int) -> None:
        """A node runs on a part, with all that it reads there."""
        mine = self.parts[part]
        if node.name in mine.nodes:
            return
        mine.nodes.add(node.name)
        for position, ref in enumerate(node.refs):
            if not self.joins(node, position):
                self._read(ref, part, node.phase)

    def _read(self, value: str, part: int, phase: Phase) -> None:
        """A value is read on a part."""
        node = self.places.maker.get(value)
        self.parts[part].read.add(value)
        if node is None:
            return
        if node.name in self.places.floating:
            self._place(node, part)
            return
        source = self.places.part[node.name]
        if source == part:
            self._place(node, part)
            return
        # What the forward made goes up in the forward, and down in the backward, as gradients do.
        way = Phase.FORWARD if node.phase is Phase.FORWARD and source < part else Phase.BACKWARD
        if way is Phase.BACKWARD and source < part:
            raise PlanError(f"{node.key}: a gradient would have to go up from part {source} to {part}")
        if way is Phase.BACKWARD and phase is Phase.FORWARD:
            raise PlanError(f"{node.key} is read before it is made")
        self.crossing.setdefault((value, way), set()).add(part)
        self.parts[source].read.add(value)

    # The graphs -------------------------------------------------------------------------------------------------------

    def _graph(self, part: int, passed: Sequence[Passed]) -> Graph:
        mine = self.parts[part]
        nodes = [n for n in self.top.nodes if n.name in mine.nodes and n.name not in self.places.sums]
        nodes, renamed = self._joined(nodes)
        gradients, sums = self._gradients(part)
        nodes += sums
        came = [p for p in passed if part in p.targets]
        sent = [p for p in passed if p.source == part]
        received = [
            GraphInput(value=self.values[p.value], kind=_ARRIVES[p.phase], target=RECEIVED + p.value) for p in came
        ]
        outputs = [p.value for p in sent if p.phase is Phase.FORWARD]
        if part == len(self.parts) - 1:
            outputs += [v for v in self.live.collected if v not in outputs]
        leaving = [GraphOutput(kind=OutputKind.OUTPUT, target=str(k), value=v) for k, v in enumerate(outputs)]
        leaving += [o for o in self.top.outputs if o.kind is OutputKind.BUFFER_UPDATE]
        leaving += gradients
        leaving += [
            GraphOutput(kind=OutputKind.GRADIENT, target=f"sent {p.value}", value=p.value)
            for p in sent if p.phase is Phase.BACKWARD
        ]  # fmt: skip
        leaving += [
            GraphOutput(kind=OutputKind.GRADIENT, target=SUMMED + v, value=v)
            for v in self.live.summed if self._part_of(v) == part
        ]  # fmt: skip
        return Graph(
            name=self.top.name,
            inputs=self._inputs(nodes, leaving, received + _joined_inputs(renamed, self.values)),
            nodes=tuple(nodes),
            outputs=tuple(leaving),
        )

    def _joined(self, nodes: Iterable[Node]) -> tuple[list[Node], dict[str, str]]:
        """Nodes that read joined values under names of their own."""
        renamed: dict[str, str] = {}
        found = []
        for node in nodes:
            late = {p for p in range(len(node.refs)) if self.joins(node, p)}
            if late:
                names = iter(
                    [renamed.setdefault(r, f"{r}_joined") if p in late else r for p, r in enumerate(node.refs)]
                )
                args, kwargs = _named((node.args, node.kwargs), names)
                node = replace(node, args=args, kwargs=kwargs)
            found.append(node)
        return found, renamed

    def _gradients(self, part: int) -> tuple[list[GraphOutput], list[Node]]:
        """This part's gradients of parameters; sums of several summands of one, made like those of the model."""
        found: list[GraphOutput] = []
        sums: list[Node] = []
        for parameter, summands in self.places.summands.items():
            mine = [leaf for at, leaf in summands if at == part and not self._waits(leaf)]
            if not mine:
                continue
            total, adders = mine[0], iter(self._adders(parameter))
            for leaf in mine[1:]:
                like = next(adders)
                assert like.first is not None
                name = f"{parameter}_sum_{len(sums)}"
                sums.append(
                    replace(like, args=(Ref(total), Ref(leaf)), outputs=(Value(name, like.first.meta),), name=name)
                )
                total = name
            found.append(GraphOutput(kind=OutputKind.GRADIENT, target=parameter, value=total))
        return found, sums

    def _adders(self, parameter: str) -> list[Node]:
        """The nodes of the model that add the summands of one parameter's gradient."""
        whole = next(o.value for o in self.top.outputs if o.kind is OutputKind.GRADIENT and o.target == parameter)
        found, todo = [], [whole]
        while todo:
            node = self.places.maker.get(todo.pop() or "")
            if node is not None and node.name in self.places.sums:
                found.append(node)
                todo += node.refs
        return found

    def _inputs(
        self, nodes: Sequence[Node], outputs: Sequence[GraphOutput], more: Sequence[GraphInput]
    ) -> tuple[GraphInput, ...]:
        """The graph's own inputs that are read, or have a gradient, and those from elsewhere; tangents last."""
        read = {r for n in nodes for r in n.refs} | {o.value for o in outputs}
        read |= {o.target for o in outputs if o.kind is OutputKind.GRADIENT}
        elsewhere = {i.value.name for i in more}
        mine = [i for i in self.top.inputs if i.value.name in read and i.value.name not in elsewhere]
        tangents = [i for i in (*mine, *more) if i.kind is InputKind.TANGENT]
        return (*(i for i in (*mine, *more) if i.kind is not InputKind.TANGENT), *tangents)

    def _first(self, part: int) -> Graph | None:
        """What the values that a part reads joined are made of."""
        nodes = [n for n in self.top.nodes if n.name in self.parts[part].nodes]
        wanted = list(dict.fromkeys(r for n in nodes for p, r in enumerate(n.refs) if self.joins(n, p)))
        if not wanted:
            return None
        inside = [replace(n, phase=Phase.FORWARD) for n in self._makers(wanted)]
        leaving = [GraphOutput(kind=OutputKind.OUTPUT, target=str(k), value=v) for k, v in enumerate(wanted)]
        return Graph(
            name=self.top.name, inputs=self._inputs(inside, leaving, ()), nodes=tuple(inside), outputs=tuple(leaving)
        )

    def _makers(self, values: Iterable[str], given: Sequence[str] = ()) -> list[Node]:
        """The nodes that values are made of, back to the graph's inputs and to what is `given`."""
        found: set[str] = set()
        todo = list(values)
        while todo:
            node = self.places.maker.get(todo.pop())
            if node is not None and node.name not in found:
                found.add(node.name)
                todo += [r for r in node.refs if r not in given]
        return [n for n in self.top.nodes if n.name in found]

    def _after(self, part: int) -> Graph | None:
        """From sums over micro-batches to the gradients that are made of them."""
        leaves = {
            parameter: leaf
            for parameter, summands in self.places.summands.items()
            for at, leaf in summands if at == part and self._waits(leaf)
        }  # fmt: skip
        if not leaves:
            return None
        nodes = [replace(n, phase=Phase.FORWARD) for n in self._makers(leaves.values(), self.live.summed)]
        outputs = [GraphOutput(kind=OutputKind.OUTPUT, target=p, value=leaf) for p, leaf in leaves.items()]
        given = [
            GraphInput(value=self.values[v], kind=InputKind.INPUT, target=RECEIVED + v)
            for v in self.live.summed if self._part_of(v) == part
        ]  # fmt: skip
        return Graph(
            name=self.top.name, inputs=self._inputs(nodes, outputs, given), nodes=tuple(nodes), outputs=tuple(outputs)
        )

    def _last(self) -> Graph:
        """From what is collected of all micro-batches to what the model gives."""
        nodes = [n for n in self.top.nodes if n.name in self.live.post]
        outputs = tuple(o for o in self.top.outputs if o.kind is OutputKind.OUTPUT)
        collected = [
            GraphInput(value=self.values[v], kind=InputKind.INPUT, target=RECEIVED + v) for v in self.live.collected
        ]
        return Graph(
            name=self.top.name, inputs=self._inputs(nodes, outputs, collected), nodes=tuple(nodes), outputs=outputs
        )


_ARRIVES = {Phase.FORWARD: InputKind.INPUT, Phase.BACKWARD: InputKind.TANGENT}


def _joined_inputs(renamed: Mapping[str, str], values: Mapping[str, Value]) -> list[GraphInput]:
    return [
        GraphInput(value=Value(name, values[of].meta), kind=InputKind.INPUT, target=JOINED + of)
        for of, name in renamed.items()
    ]


def _named(tree: Any, names: Any) -> Any:
    """The arguments with each Ref, in order, renamed."""
    if isinstance(tree, Ref):
        return Ref(next(names))
    if isinstance(tree, (tuple, list)):
        return type(tree)(_named(item, names) for item in tree)
    return tree

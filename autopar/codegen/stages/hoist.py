"""What parameters alone decide is made once a step: taken out of the graphs that micro-batches run.

A graph loses its ops on parameters only (casts, transpositions) and gets what they make as further parameters, behind
its own inputs. What makes them is a graph of its own for each way to run a block, and one for the top.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.ir.graph import (
    Block,
    CapturedGraph,
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

MADE = "made "
"""What the target of a parameter that isn't the model's begins with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What makes weights as ops read them: `graph`, whose parameters are those of a block (or of the top), and by
    instance the targets, in the graphs of micro-batches, of what it makes."""

    graph: Graph
    targets: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hoisted:
    """`main`: without the ops on parameters. `weights`: by name of graph."""

    main: CapturedGraph
    weights: Mapping[str, Weights]


def hoist(captured: CapturedGraph, lasting: Callable[[Graph], frozenset[str]]) -> Hoisted:
    """Take out what parameters alone decide; `lasting`: the values of a graph that are so."""
    found: dict[str, Weights] = {}
    made: dict[str, tuple[Value, ...]] = {}
    blocks = []
    for block in captured.blocks:
        graph, before = _without(block.graph, lasting(block.graph))
        made[block.key] = tuple(v for v in _leaving(before)) if before is not None else ()
        if before is not None:
            targets = {i: tuple(f"{MADE}{i} {v.name}" for v in made[block.key]) for i in block.instances}
            found[block.graph.name] = Weights(graph=before, targets=targets)
        blocks.append(Block(key=block.key, graph=graph, instances=block.instances))
    top, before = _without(captured.top, lasting(captured.top))
    if before is not None:
        found[top.name] = Weights(graph=before, targets={"": tuple(f"{MADE}{v.name}" for v in _leaving(before))})
    main = replace(captured, top=_calling(top, captured, made), blocks=tuple(blocks))
    return Hoisted(main=main, weights=found)


def _leaving(graph: Graph) -> list[Value]:
    values = graph.values()
    return [values[o.value] for o in graph.outputs if o.value is not None]


def _without(graph: Graph, lasting: frozenset[str]) -> tuple[Graph, Graph | None]:
    """(the graph without ops on parameters, those ops with what others read of them; None: there are none)."""
    inside = [n for n in graph.nodes if n.outputs and all(o is None or o.name in lasting for o in n.outputs)
              and n.phase is Phase.FORWARD and n.block is None]  # fmt: skip
    names = {n.name for n in inside}
    mine = {o.name: o for n in inside for o in n.outputs if o is not None}
    rest = [n for n in graph.nodes if n.name not in names]
    read = {r for n in rest for r in n.refs} | {o.value for o in graph.outputs}
    made = [v for name, v in mine.items() if name in read]
    if not made:
        return graph, None
    before = Graph(
        name=graph.name,
        inputs=tuple(i for i in graph.inputs if i.kind is InputKind.PARAMETER),
        nodes=tuple(inside),
        outputs=tuple(GraphOutput(kind=OutputKind.OUTPUT, target=str(k), value=v.name) for k, v in enumerate(made)),
    )
    more = tuple(GraphInput(value=v, kind=InputKind.PARAMETER, target=f"{MADE}{v.name}") for v in made)
    return _with_inputs(replace(graph, nodes=tuple(rest)), more), before


def _with_inputs(graph: Graph, more: Sequence[GraphInput]) -> Graph:
    """The graph with further inputs, before its tangents."""
    own = tuple(i for i in graph.inputs if i.kind is not InputKind.TANGENT)
    tangents = tuple(i for i in graph.inputs if i.kind is InputKind.TANGENT)
    return replace(graph, inputs=(*own, *more, *tangents))


def _calling(top: Graph, captured: CapturedGraph, made: Mapping[str, tuple[Value, ...]]) -> Graph:
    """The top graph, which hands each block's call what was made for it."""
    work = _Calls(captured, made)
    nodes = tuple(work.call(n) if n.block is not None else n for n in top.nodes)
    return _with_inputs(replace(top, nodes=nodes), tuple(work.inputs.values()))


@dataclass
class _Calls:
    captured: CapturedGraph
    made: Mapping[str, tuple[Value, ...]]
    inputs: dict[str, GraphInput] = field(default_factory=dict)

    def call(self, node: Node) -> Node:
        """The call with what was made behind the block's own inputs."""
        assert node.block is not None
        inner = self.captured.block(node.block.key).graph
        count = sum(i.kind is not InputKind.TANGENT for i in inner.inputs)
        instance = node.block.instance
        more = []
        for value in self.made[node.block.key]:
            target = f"{MADE}{instance} {value.name}"
            name = f"{''.join(c if c.isalnum() else '_' for c in instance)}_{value.name}"
            self.inputs[target] = GraphInput(
                value=Value(name, value.meta), kind=InputKind.PARAMETER, target=target
            )  # fmt: skip
            more.append(Ref(name))
        return replace(node, args=(*node.args[:count], *more, *node.args[count:]))

"""Which tensor a value of a graph is, for people: a parameter, an input, or the module and op that make it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from autopar.ir.graph import CapturedGraph, Graph, GraphInput, InputKind, Node, OutputKind, Phase

LOOK_BACK = 4
"""How many ops without a module (casts of parameters) are followed back to what has a name."""


@dataclass(frozen=True, slots=True)
class Places:
    """`prefix`: graph name -> what its module paths are relative to ("" for the top graph)."""

    prefix: dict[str, str]
    makers: dict[tuple[str, str], Node]
    given: dict[tuple[str, str], GraphInput]
    gradients: dict[tuple[str, str], str]

    @classmethod
    def of(cls, captured: CapturedGraph) -> Self:
        """The places of a model."""
        prefix = {captured.top.name: ""} | {b.key: instances_pattern(b.instances) for b in captured.blocks}
        makers: dict[tuple[str, str], Node] = {}
        given: dict[tuple[str, str], GraphInput] = {}
        gradients: dict[tuple[str, str], str] = {}
        for graph in captured.graphs:
            own = {i.value.name: i for i in graph.inputs}
            given |= {(graph.name, name): i for name, i in own.items()}
            made = {o.name: n for n in graph.nodes for o in n.outputs if o is not None}
            makers |= {(graph.name, name): n for name, n in made.items()}
            read = _times_read(graph)
            for out in graph.outputs:
                if out.kind is not OutputKind.GRADIENT or out.value is None:
                    continue
                if own[out.target].kind is InputKind.PARAMETER:
                    values = ((graph.name, v) for v in _made_into(out.value, made, read))
                    gradients |= dict.fromkeys(values, own[out.target].target)
        return cls(prefix, makers, given, gradients)

    def name(self, graph: str, value: str) -> str:
        """Of a value: "gradient of head.weight", "blocks.*.mlp.up (mm)", "input_ids"."""
        if (graph, value) in self.gradients:
            return f"gradient of {self._inside(graph, self.gradients[graph, value])}"
        return self._name(graph, value)

    def node(self, graph: str, node: Node) -> str:
        """Of an op: "blocks.*.mlp.up (mm, backward)"."""
        if node.block is not None:
            what = node.block.instance
        else:
            what = f"{self._inside(graph, node.module_path) or 'the model itself'} ({short(node.op)})"
        return _backward(what) if node.phase is Phase.BACKWARD else what

    def _name(self, graph: str, value: str) -> str:
        if (graph, value) in self.given:
            return self._given(graph, self.given[graph, value])
        node = self.makers[graph, value]
        behind = self._given_behind(graph, node)
        return f"{self._given(graph, behind)} ({short(node.op)})" if behind else self.node(graph, node)

    def _given_behind(self, graph: str, node: Node) -> GraphInput | None:
        """The parameter or input that an op outside all modules casts or views, if it does just that."""
        for _ in range(LOOK_BACK):
            if node.block is not None or node.module_path or len(node.refs) != 1:
                return None
            found = self.given.get((graph, node.refs[0]))
            if found is not None:
                return found
            node = self.makers[graph, node.refs[0]]
        return None

    def _given(self, graph: str, given: GraphInput) -> str:
        if given.kind is InputKind.TANGENT:
            return f"gradient of {self.prefix[graph]}'s output" if self.prefix[graph] else "gradient of the output"
        if self.prefix[graph] and given.kind is not InputKind.PARAMETER:
            return f"input of {self.prefix[graph]}"
        return self._inside(graph, given.target)

    def _inside(self, graph: str, path: str) -> str:
        return ".".join(part for part in (self.prefix[graph], path) if part)


def _times_read(graph: Graph) -> Counter[str]:
    """By value: by ops and as outputs."""
    return Counter([r for n in graph.nodes for r in n.refs] + [o.value for o in graph.outputs if o.value is not None])


def _made_into(value: str, makers: Mapping[str, Node], read: Mapping[str, int]) -> list[str]:
    """`value`, and what it is made of by ops that read that alone and alone read it: casts and views of one tensor."""
    found = [value]
    while (node := makers.get(found[-1])) and node.block is None and len(node.refs) == 1 and read[node.refs[0]] == 1:
        if node.refs[0] not in makers:
            break
        found.append(node.refs[0])
    return found


def instances_pattern(paths: tuple[str, ...]) -> str:
    """`model.layers.*` of the instances of a block; of one instance its own path."""
    parts = [p.split(".") for p in paths]
    if len({len(p) for p in parts}) > 1:
        return " | ".join(paths)
    return ".".join(names[0] if len(set(names)) == 1 else "*" for names in zip(*parts, strict=True))


def short(op: str) -> str:
    """`mm` of "aten.mm.default"."""
    parts = op.split(".")
    return parts[1] if len(parts) > 2 else parts[-1]


def _backward(what: str) -> str:
    return f"{what[:-1]}, backward)" if what.endswith(")") else f"{what} (backward)"

"""Reads a Plan's text layouts back: what each op wants and makes, and how each graph input arrives."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.errors import CompilerError, PlanError
from autopar.ir.graph import CapturedGraph, Graph, GraphInput, InputKind, Node, tensor_keys
from autopar.ir.layout import Layout, parse_layout
from autopar.ir.mesh import Mesh
from autopar.ir.plan import AGAIN, Plan
from autopar.ir.strategy import Strategy


def block_parameters(captured: CapturedGraph) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Block key -> per forward call, positions in the top graph's parameters of the block's parameters, in order.

    Raises CompilerError where a block's parameter is fed by something else.
    """
    position = {v: i for i, v in enumerate(i.value.name for i in captured.top.inputs if i.kind is InputKind.PARAMETER)}
    found: dict[str, list[tuple[int, ...]]] = {b.key: [] for b in captured.blocks}
    for node in captured.top.nodes:
        if node.op != "autopar.block" or node.block is None:
            continue
        own = own_inputs(captured.block(node.block.key).graph)
        if len(own) != len(node.refs):
            raise CompilerError(f"{node.name}: {len(node.refs)} arguments for {len(own)} inputs of {node.block.key}")
        pairs = [(i, r) for i, r in zip(own, node.refs, strict=True) if i.kind is InputKind.PARAMETER]
        wrong = [r for _, r in pairs if r not in position]
        if wrong:
            raise CompilerError(f"{node.name}: {wrong} feed parameters of {node.block.key} but are no parameters")
        found[node.block.key].append(tuple(position[r] for _, r in pairs))
    return {key: tuple(rows) for key, rows in found.items()}


def own_inputs(graph: Graph) -> list[GraphInput]:
    """Inputs but tangents: the arguments of a block's forward call."""
    return [i for i in graph.inputs if i.kind is not InputKind.TANGENT]


@dataclass(frozen=True, slots=True)
class PlanLayouts:
    """The layouts of one plan."""

    captured: CapturedGraph
    plan: Plan
    mesh: Mesh
    _parsed: dict[str, Layout] = field(default_factory=dict)

    def parse(self, text: str, where: str) -> Layout:
        """A layout from its text; PlanError naming `where` if it is malformed."""
        found = self._parsed.get(text)
        if found is None:
            try:
                found = self._parsed[text] = parse_layout(text, self.mesh)
            except ValueError as error:
                raise PlanError(f"plan for {self.plan.model.name}: {where}: {error}") from None
        return found

    def strategy(self, graph: Graph, node: Node) -> Strategy:
        """What the plan chose for an op."""
        text = self.plan.strategies.get(graph.name, {}).get(node.key)
        if text is None:
            raise PlanError(
                f"plan for {self.plan.model.name}: no strategy for {node.key} of graph {graph.name}; search again"
            )
        if len(text.inputs) != len(node.refs) or len(text.outputs) != len(node.outputs):
            raise PlanError(
                f"plan for {self.plan.model.name}: the strategy of {node.key} has {len(text.inputs)} inputs and "
                f"{len(text.outputs)} outputs, the op has {len(node.refs)} and {len(node.outputs)}; search again"
            )
        outputs = tuple(self.parse(t, node.key) if t else None for t in text.outputs)
        inputs = tuple(self.parse(t, node.key) for t in text.inputs)
        return Strategy(outputs=outputs, inputs=inputs, tags=tuple(text.tags))

    def later(self, graph: Graph) -> dict[str, Layout | None] | None:
        """Value name -> the layout that it waits for the backward in, None if it is made again; None: all is kept."""
        planned = self.plan.later.get(graph.name)
        if planned is None:
            return None
        return {
            value: None if planned[key] == AGAIN else self.parse(planned[key], key)
            for value, key in tensor_keys(graph).items()
            if key in planned
        }

    def storage(self, name: str) -> Layout:
        """How a parameter is stored, by its original name."""
        found = self.plan.parameters.get(name)
        if found is None:
            raise PlanError(f"plan for {self.plan.model.name}: no parameter {name}; it was made for another model")
        return self.parse(found.layout, name)

    def arrivals(self, graph: Graph) -> dict[str, Layout]:
        """Layout of each graph input by value name. Parameters arrive as stored; what the plan omits is whole."""
        planned = self.plan.inputs.get(graph.name, {})
        found = {}
        names = self._parameter_names(graph)
        for own in graph.inputs:
            if own.kind is InputKind.PARAMETER:
                found[own.value.name] = self.storage(names[own.value.name])
            else:
                where = f"{own.kind.value}:{own.target}"
                text = planned.get(where)
                found[own.value.name] = self.parse(text if text is not None else "whole", f"{graph.name} {where}")
        return found

    def _parameter_names(self, graph: Graph) -> dict[str, str]:
        """Value name of each PARAMETER input -> original name (of the first instance, of a block)."""
        own = [i for i in graph.inputs if i.kind is InputKind.PARAMETER]
        if graph is self.captured.top:
            return {i.value.name: i.target for i in own}
        top = [i.target for i in self.captured.top.inputs if i.kind is InputKind.PARAMETER]
        calls = block_parameters(self.captured)[graph.name]
        if not calls:
            raise CompilerError(f"block {graph.name} is never called")
        return {i.value.name: top[p] for i, p in zip(own, calls[0], strict=True)}

    def gradient(self, graph: Graph, target: str, value: str) -> Layout:
        """How the gradient `value` of the parameter `target` leaves: as the parameter is stored."""
        return self.arrivals(graph)[target]

    def output(self, position: int) -> Layout:
        """How the OUTPUT or BUFFER_UPDATE at this position of the top graph's outputs leaves; whole if not planned."""
        text = self.plan.outputs.get(self.captured.top.name, {}).get(str(position))
        return self.parse(text if text is not None else "whole", f"output {position}")

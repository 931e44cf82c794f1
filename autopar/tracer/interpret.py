"""Runs a `CapturedGraph` on one device with whole tensors, forward then backward: the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.ir.graph import (
    REGION,
    REGION_BACKWARD,
    CapturedGraph,
    Graph,
    InputKind,
    Node,
    OutputKind,
    Phase,
    Ref,
    TorchConst,
)

Watch = Callable[[Node | None, str, Node | None, Any], Any]
"""Told of every value: (the call of a block that it is in, None at the top; its name; the op that made it, None of an
input; the value). What it gives is used instead."""

Tangents = Sequence[Tensor] | Callable[[list[Tensor]], Sequence[Tensor]]


def _unwatched(call: Node | None, name: str, node: Node | None, value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Result:
    """outputs: OUTPUTs in order; buffer_updates by buffer name; gradients by the input's target (a parameter name)."""

    outputs: list[Tensor]
    buffer_updates: dict[str, Tensor]
    gradients: dict[str, Tensor | None]


def interpret(
    captured: CapturedGraph,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    inputs: Sequence[Any],
    tangents: Tangents | None = None,
    watch: Watch = _unwatched,
) -> Result:
    """Run the whole step.

    Args:
        parameters, buffers: by their names in `captured`.
        inputs: what `captured.signature.flatten` gives.
        tangents: one per differentiable output, in order, or what makes them of the outputs; ones by default.
    """
    tensors = {leaf.path: x for leaf, x in zip(captured.signature.inputs, inputs, strict=True)}
    where = {
        InputKind.PARAMETER: parameters,
        InputKind.BUFFER: buffers,
        InputKind.INPUT: tensors,
        InputKind.CONSTANT: captured.constants,
    }
    top = captured.top
    shared: dict[str, Any] = {}
    regions = {r.key: r.build(shared) for r in captured.regions}
    run = _Run(captured, regions, watch)
    with torch.no_grad():
        env = {
            i.value.name: watch(None, i.value.name, None, where[i.kind][i.target].detach())
            for i in top.inputs
            if i.kind is not InputKind.TANGENT
        }
        run.graph(top, Phase.FORWARD, env)
        outputs = {o.target: env[o.value] for o in top.outputs if o.kind is OutputKind.OUTPUT and o.value is not None}
        given = list(tangents(list(outputs.values())) if callable(tangents) else tangents or ())
        for k, i in enumerate(i for i in top.inputs if i.kind is InputKind.TANGENT):
            tangent = torch.ones_like(outputs[i.target]) if tangents is None else given[k]
            env[i.value.name] = watch(None, i.value.name, None, tangent)
        run.graph(top, Phase.BACKWARD, env)
    targets = {i.value.name: i.target for i in top.inputs}
    updates = {
        o.target: env[o.value] for o in top.outputs if o.kind is OutputKind.BUFFER_UPDATE and o.value is not None
    }
    gradients = {
        targets[o.target]: None if o.value is None else env[o.value]
        for o in top.outputs
        if o.kind is OutputKind.GRADIENT
    }
    return Result(list(outputs.values()), updates, gradients)


@dataclass(frozen=True, slots=True)
class _Run:
    """One run. `regions`: by key."""

    captured: CapturedGraph
    regions: Mapping[str, Any]
    watch: Watch

    def graph(self, graph: Graph, phase: Phase, env: dict[str, Any], call: Node | None = None) -> None:
        """One phase of a graph; `call` is the block's call that it is in."""
        for node in graph.nodes:
            if node.phase is phase:
                results = self.node(node, env)
                for value, x in zip(node.outputs, results if node.outputs else (), strict=True):
                    if value is not None:
                        env[value.name] = self.watch(call, value.name, node, x)

    def node(self, node: Node, env: Mapping[str, Any]) -> Sequence[Any]:
        """One node's results."""
        if node.block is not None:
            return self.block(node, env)
        if node.op in (REGION, REGION_BACKWARD):
            return self.region(node, env)
        return run_op(node, env)

    def region(self, node: Node, env: Mapping[str, Any]) -> Sequence[Any]:
        """A region's call."""
        key = node.args[0]
        if node.op == REGION:
            found: Sequence[Any] = self.regions[key].forward(literal(node.args[1], env), f"0|1|{key}")
            return found
        gradients: Sequence[Any]
        gradients, _ = self.regions[key].backward(env[node.args[1].name], literal(node.args[2], env), True)
        return gradients

    def block(self, node: Node, env: Mapping[str, Any]) -> list[Tensor | None]:
        """Forward call: the block's forward. Backward call: the block's forward again, then its backward."""
        assert node.block is not None
        graph = self.captured.block(node.block.key).graph
        forward = node.op == "autopar.block"
        plain = [i for i in graph.inputs if i.kind is not InputKind.TANGENT]
        tangents = [] if forward else [i for i in graph.inputs if i.kind is InputKind.TANGENT]
        inner = {
            i.value.name: self.watch(node, i.value.name, None, env[ref])
            for i, ref in zip([*plain, *tangents], node.refs, strict=True)
        }
        self.graph(graph, Phase.FORWARD, inner, node)
        if not forward:
            self.graph(graph, Phase.BACKWARD, inner, node)
        kind = OutputKind.OUTPUT if forward else OutputKind.GRADIENT
        return [None if o.value is None else inner[o.value] for o in graph.outputs if o.kind is kind]


def run_op(node: Node, env: Mapping[str, Tensor]) -> Sequence[Any]:
    """One op's results."""
    namespace, name, overload = node.op.split(".")
    op = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    result = op(*[literal(a, env) for a in node.args], **{k: literal(v, env) for k, v in node.kwargs})
    return result if isinstance(result, (tuple, list)) else (result,)


def literal(arg: Any, env: Mapping[str, Tensor]) -> Any:
    """A node's argument as torch wants it."""
    match arg:
        case Ref():
            return env[arg.name]
        case TorchConst(kind="device"):
            return torch.device(arg.name)
        case TorchConst():
            return getattr(torch, arg.name)
        case tuple() | list():
            return [literal(a, env) for a in arg]
        case _:
            return arg

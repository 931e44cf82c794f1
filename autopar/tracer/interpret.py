"""Runs a `CapturedGraph` on one device with whole tensors, forward then backward: the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.ir.graph import CapturedGraph, Graph, InputKind, Node, OutputKind, Phase, Ref, TorchConst


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
    tangents: Sequence[Tensor] | None = None,
) -> Result:
    """Run the whole step.

    Args:
        parameters, buffers: by their names in `captured`.
        inputs: what `captured.signature.flatten` gives.
        tangents: one per differentiable output, in order; ones by default.
    """
    tensors = {leaf.path: x for leaf, x in zip(captured.signature.inputs, inputs, strict=True)}
    where = {
        InputKind.PARAMETER: parameters,
        InputKind.BUFFER: buffers,
        InputKind.INPUT: tensors,
        InputKind.CONSTANT: captured.constants,
    }
    top, given = captured.top, None if tangents is None else list(tangents)
    with torch.no_grad():
        env = {i.value.name: where[i.kind][i.target].detach() for i in top.inputs if i.kind is not InputKind.TANGENT}
        _run(captured, top, Phase.FORWARD, env)
        outputs = {o.target: env[o.value] for o in top.outputs if o.kind is OutputKind.OUTPUT and o.value is not None}
        for k, i in enumerate(i for i in top.inputs if i.kind is InputKind.TANGENT):
            env[i.value.name] = torch.ones_like(outputs[i.target]) if given is None else given[k]
        _run(captured, top, Phase.BACKWARD, env)
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


def _run(captured: CapturedGraph, graph: Graph, phase: Phase | None, env: dict[str, Tensor]) -> None:
    for node in graph.nodes:
        if phase is None or node.phase is phase:
            results = _run_block(captured, node, env) if node.block else _run_op(node, env)
            for value, x in zip(node.outputs, results, strict=True):
                if value is not None:
                    env[value.name] = x


def _run_op(node: Node, env: Mapping[str, Tensor]) -> Sequence[Any]:
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


def _run_block(captured: CapturedGraph, node: Node, env: Mapping[str, Tensor]) -> list[Tensor | None]:
    """Forward call: the block's forward. Backward call: the block's forward again, then its backward."""
    assert node.block is not None
    graph = captured.block(node.block.key).graph
    forward = node.op == "autopar.block"
    plain = [i for i in graph.inputs if i.kind is not InputKind.TANGENT]
    tangents = [] if forward else [i for i in graph.inputs if i.kind is InputKind.TANGENT]
    inner = {i.value.name: env[ref] for i, ref in zip([*plain, *tangents], node.refs, strict=True)}
    _run(captured, graph, Phase.FORWARD, inner)
    if not forward:
        _run(captured, graph, Phase.BACKWARD, inner)
    kind = OutputKind.OUTPUT if forward else OutputKind.GRADIENT
    return [None if o.value is None else inner[o.value] for o in graph.outputs if o.kind is kind]

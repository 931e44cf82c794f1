"""The joint graph of each distinct block, captured by itself, and a call of it in the top level's trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.ir.graph import Block, InputKind, OutputKind, TensorMeta
from autopar.tracer.choose import Chosen, Footprint
from autopar.tracer.convert import Argument, BlockUse, Converter
from autopar.tracer.joint import Position, trace
from autopar.tracer.leaf_ops import BlockFunction, LeafShapes, Likeness
from autopar.tracer.record import Call, Record
from autopar.tracer.rig import Rig, routed
from autopar.tracer.signature import captured_dtype, meta_of
from autopar.tracer.torch_private import enable_python_dispatcher
from autopar.tracer.tree import flatten


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedBlock:
    """A distinct block and its instances.

    Attributes:
        calls: (module path, how many calls of it came before) -> instance number, unique over all blocks.
        instances: instance number -> its name.
        members: instance number -> (the recorded call, its footprint).
    """

    block: Block
    use: BlockUse
    shapes: LeafShapes
    constants: dict[str, Tensor]
    constant_metas: dict[str, TensorMeta]
    calls: dict[tuple[str, int], int]
    instances: dict[int, str]
    members: dict[int, tuple[Call, Footprint]]


def capture_blocks(chosen: Sequence[Chosen], record: Record, rig: Rig) -> list[CapturedBlock]:
    """One joint graph per group of equal calls."""
    found: list[CapturedBlock] = []
    number = 0
    for group in chosen:
        numbers = list(range(number, number + len(group.calls)))
        number += len(group.calls)
        found.append(_capture_block(group, numbers, record, rig))
    return found


def _capture_block(group: Chosen, numbers: list[int], record: Record, rig: Rig) -> CapturedBlock:
    call, footprint = group.calls[0]
    key = f"{type(call.module).__name__}_{footprint.digest[:6]}"
    position = Position()
    with rig.mode, enable_python_dispatcher():
        arguments = _arguments(rig, call, footprint)
        tensors = _fakes(rig, call, footprint, record)
        joint = trace(_block_function(rig, call, footprint, position), tensors, position)
    converter = Converter(key, joint, arguments, {}, {})
    graph = converter.graph()
    gradients = [o.value is not None for o in graph.outputs if o.kind is OutputKind.GRADIENT]
    names = {n: c.path + (f"#{c.count}" if c.count else "") for n, (c, _) in zip(numbers, group.calls, strict=True)}
    shapes = LeafShapes(
        outputs=tuple(Likeness.of(record.tensors[n]) for n, _ in footprint.outputs),
        differentiable=tuple(grad for _, grad in footprint.outputs),
        gradients=tuple(
            Likeness.of(joint.gradients[i].meta["val"]) if joint.gradients.get(i) is not None else None
            for i in range(len(tensors))
        ),
    )
    return CapturedBlock(
        block=Block(key=key, graph=graph, instances=tuple(names.values())),
        use=BlockUse(key=key, constants=tuple(converter.constants), gradients=tuple(gradients)),
        shapes=shapes,
        constants=converter.constants,
        constant_metas={name: meta_of(x) for name, x in converter.constants.items()},
        calls={(c.path, c.count): n for n, (c, _) in zip(numbers, group.calls, strict=True)},
        instances=names,
        members=dict(zip(numbers, group.calls, strict=True)),
    )


def _arguments(rig: Rig, call: Call, footprint: Footprint) -> list[Argument]:
    found = []
    for slot, name in zip(footprint.slots, footprint.slot_names, strict=True):
        kind = InputKind.PARAMETER if rig.slots[slot].is_parameter else InputKind.BUFFER
        grad = rig.slots[slot].is_parameter and rig.slots[slot].tensor.requires_grad
        found.append(Argument(kind=kind, target=name, requires_grad=grad, keep=True))
    for i, (_, number) in enumerate(footprint.inputs):
        found.append(Argument(kind=InputKind.INPUT, target=str(i), requires_grad=call.grads[number], keep=True))
    return found


def _fakes(rig: Rig, call: Call, footprint: Footprint, record: Record) -> list[Tensor]:
    made = []
    for slot in footprint.slots:
        own = rig.slots[slot]
        dtype = captured_dtype(own.tensor.dtype, rig.precision)
        grad = own.is_parameter and own.tensor.requires_grad
        made.append(torch.empty(own.tensor.shape, dtype=dtype, device="cpu", requires_grad=grad))
    for _, number in footprint.inputs:
        made.append(Likeness.of(record.tensors[number]).empty(requires_grad=call.grads[number]))
    return made


def _block_function(rig: Rig, call: Call, footprint: Footprint, position: Position) -> Any:
    """The function of flat tensors that is traced: slots, then inputs -> output tensors."""
    names = {id(m): name for name, m in call.module.named_modules()}
    count = len(footprint.slots)

    def hook(module: nn.Module, path: str, args: Any, kwargs: Any, proceed: Any) -> Any:
        position.paths.append(path)
        try:
            return proceed()
        finally:
            position.paths.pop()

    def run(*flat: Tensor) -> tuple[Tensor, ...]:
        installed: list[Tensor | None] = [None] * len(rig.slots)
        for slot, x in zip(footprint.slots, flat[:count], strict=True):
            installed[slot] = rig.used_form(slot, x)
        leaves = list(call.leaves)
        for i, leaf in enumerate(call.leaves):
            for (at, _), x in zip(footprint.inputs, flat[count:], strict=True):
                if leaf is call.leaves[at]:
                    leaves[i] = x
        args, kwargs = call.spec.build(leaves)
        autocast = torch.autocast("cpu", dtype=call.autocast, enabled=call.autocast is not None)
        with rig.installed(installed), routed(names, hook), autocast:
            result = [leaf for _, leaf in flatten(call.module(*args, **kwargs))[0]]
        outputs: dict[int, Tensor] = {}
        for (kind, k), leaf in zip(footprint.results, result, strict=True):
            if kind == "out":
                outputs.setdefault(k, leaf)
        return tuple(outputs[k] for k in range(len(outputs)))

    return run


def run_block(block: CapturedBlock, number: int, slots: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
    """In the trace of the top level: one op instead of the module's call, with the same result structure."""
    call, footprint = block.members[number]
    leaves = [leaf for _, leaf in flatten((args, kwargs))[0]]
    tensors = [slots[s] for s in footprint.slots] + [leaves[at] for at, _ in footprint.inputs]
    outputs = BlockFunction.apply(block.use.key, number, *tensors)  # type: ignore[no-untyped-call]
    result = []
    for (kind, k), leaf in zip(footprint.results, call.result, strict=True):
        result.append(outputs[k] if kind == "out" else leaves[k] if kind == "leaf" else leaf)
    return call.result_spec.build(result)

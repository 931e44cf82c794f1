"""The joint graph of each distinct block, captured by itself, and a call of it in the top level's trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from autopar.ir.graph import Block, Graph, InputKind, OutputKind, TensorMeta
from autopar.tracer.choose import Chosen, Footprint
from autopar.tracer.convert import Argument, BlockUse, Converter
from autopar.tracer.joint import Position, trace
from autopar.tracer.leaf_ops import BlockFunction, LeafShapes, Likeness
from autopar.tracer.record import Call, Record
from autopar.tracer.rig import Rig, attributes_kept, routed
from autopar.tracer.signature import meta_of
from autopar.tracer.torch_private import enable_python_dispatcher
from autopar.tracer.tree import flatten


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedBlock:
    """A distinct block and its instances.

    Attributes:
        calls: (module path, how many calls of it came before) -> instance number, unique over all blocks.
        instances: instance number -> its name.
        members: instance number -> (the recorded call, its footprint).
        following: instance number -> which of its tensor inputs the instance before it feeds, for those that the trace
            leaves out: a row of instances is traced as its first one.
    """

    block: Block
    use: BlockUse
    shapes: LeafShapes
    constants: dict[str, Tensor]
    constant_metas: dict[str, TensorMeta]
    calls: dict[tuple[str, int], int]
    instances: dict[int, str]
    members: dict[int, tuple[Call, Footprint]]
    following: dict[int, int]


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
    count = len(footprint.slots)
    converter = Converter(key, joint, arguments, (), {})
    graph = _updates_given_back(converter.convert())
    names = {n: c.path + (f"#{c.count}" if c.count else "") for n, (c, _) in zip(numbers, group.calls, strict=True)}
    shapes = LeafShapes(
        inputs=tuple(Likeness.at_border(record.tensors[n]) for _, n in footprint.inputs),
        outputs=tuple(Likeness.at_border(x.meta["val"]) for _, x in sorted(joint.outputs.items())),
        differentiable=tuple(grad for _, grad in footprint.outputs),
        gradients=tuple(
            Likeness.at_border(joint.gradients[i].meta["val"]) if i in joint.gradients else None
            for i in range(count, len(tensors))
        ),
    )
    slot_metas = [meta_of(joint.gradients[i].meta["val"]) if i in joint.gradients else None for i in range(count)]
    following = {
        n: p for n, p in zip(numbers, group.fed, strict=True) if p is not None and shapes.gradients[p] is not None
    }
    use = BlockUse(
        key=key,
        constants=tuple(converter.constants),
        slots={n: f.slots for n, (_, f) in zip(numbers, group.calls, strict=True)},
        rows=_rows(numbers, following),
        updates=tuple((k, meta_of(new.meta["val"])) for k, new in sorted(joint.mutations.items())),
        slot_gradients=tuple((a.requires_grad, m) for a, m in zip(arguments[:count], slot_metas, strict=True)),
        input_gradients=tuple(
            (a.requires_grad, x is not None) for a, x in zip(arguments[count:], shapes.gradients, strict=True)
        ),
    )
    return CapturedBlock(
        block=Block(key=key, graph=graph, instances=tuple(names.values())),
        use=use,
        shapes=shapes,
        constants=converter.constants,
        constant_metas={name: meta_of(x) for name, x in converter.constants.items()},
        calls={(c.path, c.count): n for n, (c, _) in zip(numbers, group.calls, strict=True)},
        instances=names,
        members=dict(zip(numbers, group.calls, strict=True)),
        following=following,
    )


def _updates_given_back(graph: Graph) -> Graph:
    """A block's new buffer values are its last outputs: whoever calls it writes them."""
    outputs = [o for o in graph.outputs if o.kind is OutputKind.OUTPUT]
    updates = [o for o in graph.outputs if o.kind is OutputKind.BUFFER_UPDATE]
    rest = [o for o in graph.outputs if o.kind is OutputKind.GRADIENT]
    given = [replace(o, kind=OutputKind.OUTPUT, target=str(len(outputs) + k)) for k, o in enumerate(updates)]
    return replace(graph, outputs=(*outputs, *given, *rest))


def _rows(numbers: list[int], following: dict[int, int]) -> dict[int, tuple[tuple[int, int], ...]]:
    """First instance of each row -> the (instance, fed input) that follow it. A row is fed at one input throughout."""
    rows: dict[int, tuple[tuple[int, int], ...]] = {}
    first = numbers[0]
    for n in numbers:
        if n not in following:
            first = n
        else:
            rows[first] = (*rows.get(first, ()), (n, following[n]))
    return rows


def _arguments(rig: Rig, call: Call, footprint: Footprint) -> list[Argument]:
    found: list[Argument] = []
    for slot, name in zip(footprint.slots, footprint.slot_names, strict=True):
        kind = InputKind.PARAMETER if rig.slots[slot].is_parameter else InputKind.BUFFER
        grad = rig.slots[slot].is_parameter and rig.slots[slot].tensor.requires_grad
        found.append(Argument(kind=kind, target=name, requires_grad=grad, keep=True, traced=len(found)))
    for i, (_, number) in enumerate(footprint.inputs):
        grad = call.grads[number]
        found.append(Argument(kind=InputKind.INPUT, target=str(i), requires_grad=grad, keep=True, traced=len(found)))
    return found


def _fakes(rig: Rig, call: Call, footprint: Footprint, record: Record) -> list[Tensor]:
    made = []
    for slot in footprint.slots:
        made.append(rig.stand_in(slot))
    for _, number in footprint.inputs:
        made.append(Likeness.at_border(record.tensors[number]).empty(requires_grad=call.grads[number]))
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
        kept = attributes_kept(call.module, [])
        with kept, rig.installed(installed), routed(names, hook, call.path), autocast:
            result = [leaf for _, leaf in flatten(call.module(*args, **kwargs))[0]]
        outputs: dict[int, Tensor] = {}
        for (kind, k), leaf in zip(footprint.results, result, strict=True):
            if kind == "out":
                outputs.setdefault(k, leaf)
        return tuple(outputs[k] for k in range(len(outputs)))

    return run


def run_block(block: CapturedBlock, number: int, anchor: Tensor, args: Any, kwargs: Any) -> Any:
    """In the trace of the top level: one op instead of the module's call, with the same result structure.

    The op of the first instance in a row stands for the whole row, so that a deep model traces as fast as a shallow
    one; those that follow just hand on what feeds them. `convert` puts the row back.
    """
    call, footprint = block.members[number]
    leaves = [leaf for _, leaf in flatten((args, kwargs))[0]]
    if number in block.following:
        return _rebuilt(call, footprint, [leaves[footprint.inputs[block.following[number]][0]]], leaves)
    tensors = [
        leaves[at] if leaves[at].stride() == like.stride else leaves[at].contiguous()
        for (at, _), like in zip(footprint.inputs, block.shapes.inputs, strict=True)
    ]
    outputs = BlockFunction.apply(block.use.key, number, anchor, *tensors)  # type: ignore[no-untyped-call]
    return _rebuilt(call, footprint, outputs, leaves)


def _rebuilt(call: Call, footprint: Footprint, outputs: Sequence[Tensor], leaves: list[Any]) -> Any:
    result = []
    for (kind, k), leaf in zip(footprint.results, call.result, strict=True):
        result.append(outputs[k] if kind == "out" else leaves[k] if kind == "leaf" else leaf)
    return call.result_spec.build(result)

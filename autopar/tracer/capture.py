"""model, example inputs -> `CapturedGraph`: the pipeline of this room, read top to bottom.

fake forward (records ops, finds what cannot be captured) -> choose repeated blocks -> graph of each distinct block
-> joint graph of the top level, in which each block is one op -> check
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import CaptureError
from autopar.ir.graph import BufferInfo, CapturedGraph, Graph, InputKind, ParameterInfo, TensorMeta
from autopar.ir.options import Options
from autopar.ops.expert_dims import with_expert_dims
from autopar.ops.units import with_units
from autopar.ops.unordered import with_unordered
from autopar.tracer.again import remake_parameter_views
from autopar.tracer.blocks import CapturedBlock, capture_blocks, run_block
from autopar.tracer.check import check_graph
from autopar.tracer.choose import choose_blocks, used_outside
from autopar.tracer.convert import Argument, Converter
from autopar.tracer.experts import experts_routed
from autopar.tracer.joint import Position, trace
from autopar.tracer.leaf_ops import shapes_known
from autopar.tracer.record import MadeGood, Record, record_forward, stand_ins
from autopar.tracer.refuse import UncapturableError, readable_errors
from autopar.tracer.regions import Regions, find_regions, measured
from autopar.tracer.rig import Rig, Slot, attributes_kept, cast, refuse_changes, routed
from autopar.tracer.signature import Inputs, call_signature, dtype_name, read_inputs, read_outputs
from autopar.tracer.simplify import cancel_transposes
from autopar.tracer.substitutes import Substitutes
from autopar.tracer.torch_private import capture_flags, enable_python_dispatcher
from autopar.tracer.unflatten import unflatten
from autopar.tracer.wide import Wide
from autopar.tracer.widen import widen_before_adding

Notes = tuple[tuple[str, str, str], ...]


def capture(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, options: Options, model_name: str | None = None
) -> CapturedGraph:
    """The joint forward-and-backward graph of `model(*args, **kwargs)`. No weight is allocated; the model is unchanged.

    Args:
        model: parameters may be on the meta device; its training flags decide what is captured.
        args, kwargs: example inputs; tensors may be on any device, meta too.
        options: `precision`, `differentiable`, `fold_blocks` and `strict` are used here.
        model_name: for people; the model's class name by default.

    Raises:
        CaptureError: the model does what cannot be captured, outside of a submodule that can run as it is instead
            (`regions`); the message has its file, line, and what to do.
    """
    inputs = read_inputs(model, args, kwargs, options.precision)
    rig = Rig(model, options.precision)
    regions = Regions()
    wide = Wide() if options.precision == "fp64" else nullcontext()
    with torch.enable_grad(), capture_flags(), wide, Substitutes(), experts_routed():
        captured = _captured(rig, inputs, options, model_name or type(model).__name__, regions)
        while isinstance(captured, UncapturableError):
            if options.strict:
                raise captured
            regions = find_regions(rig, inputs, captured, regions, _attempt(rig, inputs))
            captured = _captured(rig, inputs, options, model_name or type(model).__name__, regions)
    captured = with_expert_dims(with_units(with_unordered(_tidied(captured))))
    check_graph(captured)
    return captured


def _attempt(rig: Rig, inputs: Inputs) -> Callable[[Regions, MadeGood], None]:
    def attempt(regions: Regions, made_good: MadeGood) -> None:
        record_forward(rig, inputs, [], regions, made_good)

    return attempt


def _captured(
    rig: Rig, inputs: Inputs, options: Options, name: str, regions: Regions
) -> CapturedGraph | UncapturableError:
    """An UncapturableError is of something that might be captured with more regions."""
    try:
        return _with_regions(rig, inputs, options, name, regions)
    except UncapturableError as error:
        return error


def _with_regions(rig: Rig, inputs: Inputs, options: Options, name: str, regions: Regions) -> CapturedGraph:
    changes: list[str] = []
    with readable_errors():
        record = record_forward(rig, inputs, changes, regions)
    refuse_changes(changes)
    outputs = _choose_outputs(record, options)
    with attributes_kept(rig.module, []), regions.entered(), readable_errors():
        chosen = choose_blocks(record, rig) if options.fold_blocks else ()
        blocks = capture_blocks(chosen, record, rig)
        used = sorted(used_outside(record, chosen))
        top = _capture_top(rig, inputs, outputs, blocks, used, regions)
    records = regions.records(rig)
    notes = tuple(("region", f"{r.module_path} {r.source}".rstrip(), r.message) for r in records)
    return CapturedGraph(
        model_name=name,
        top=measured(top.converted, regions),
        blocks=tuple(b.block for b in blocks),
        parameters=_parameter_infos(rig),
        buffers=_buffer_infos(rig),
        signature=call_signature(
            inputs,
            [path for path, _ in record.outputs],
            record.rebuild,
            outputs.differentiable,
            outputs.detached,
            rig.precision,
        ),
        training=rig.module.training,
        constants={**top.constants, **{k: v for b in blocks for k, v in b.constants.items()}},
        regions=records,
        notes=(*notes, *outputs.notes),
    )


def _tidied(captured: CapturedGraph) -> CapturedGraph:
    """Transposes cancelled in pairs, ops moved before flattening views, gradients widened before they are added, views
    of parameters made again in backward."""
    blocks = tuple(replace(b, graph=_tidy(b.graph)) for b in captured.blocks)
    return replace(captured, top=_tidy(captured.top), blocks=blocks)


def _tidy(graph: Graph) -> Graph:
    return remake_parameter_views(widen_before_adding(unflatten(cancel_transposes(graph))))


@dataclass(frozen=True, slots=True)
class Outputs:
    """Which of the result's tensors are differentiated; which are not though they could be, and notes on these."""

    differentiable: tuple[bool, ...]
    detached: tuple[bool, ...]
    notes: Notes


def _choose_outputs(record: Record, options: Options) -> Outputs:
    """ "losses": scalar floating outputs that need a gradient if there are any, else all that need one; "all": all."""
    needing = [x.requires_grad for _, x in record.outputs]
    scalar = [need and x.dim() == 0 for need, (_, x) in zip(needing, record.outputs, strict=True)]
    if not any(needing):
        raise CaptureError(
            "no output of the model needs a gradient: pass labels so that it returns a loss, or check that its "
            "parameters have requires_grad and that the forward does not run under torch.no_grad()"
        )
    picked = scalar if options.differentiable == "losses" and any(scalar) else needing
    notes = tuple(
        ("detached", path, "not a scalar: given back without a gradient (differentiable='all' keeps it)")
        for (path, _), need, pick in zip(record.outputs, needing, picked, strict=True)
        if need and not pick
    )
    detached = tuple(need and not pick for need, pick in zip(needing, picked, strict=True))
    return Outputs(tuple(picked), detached, notes)


def _capture_top(
    rig: Rig, inputs: Inputs, outputs: Outputs, blocks: Sequence[CapturedBlock], used: list[int], regions: Regions
) -> Converter:
    """Trace the top level. `used`: slots that are read outside blocks; only these are arguments."""
    position = Position()
    shapes = {b.use.key: b.shapes for b in blocks}
    with rig.mode, enable_python_dispatcher(), shapes_known(shapes):
        anchor = torch.zeros((), device="cpu", requires_grad=True)
        tensors = [*map(rig.stand_in, used), *stand_ins(inputs, rig.precision, "cpu"), anchor]
        run = _top_function(rig, inputs, outputs, blocks, used, position, rig.placeholders(), regions)
        joint = trace(run, tensors if blocks else tensors[:-1], position)
    metas = {name: meta for b in blocks for name, meta in b.constant_metas.items()}
    converter = Converter("top", joint, _arguments(rig, inputs, used), [b.use for b in blocks], metas)
    for block in blocks:
        converter.instances.update(block.instances)
    converter.convert()
    return converter


def _top_function(
    rig: Rig,
    inputs: Inputs,
    outputs: Outputs,
    blocks: Sequence[CapturedBlock],
    used: list[int],
    position: Position,
    placeholders: list[Tensor],
    regions: Regions,
) -> Any:
    """The function of flat tensors that is traced: used slots, inputs, the anchor if any block -> output tensors."""
    calls = {call: (block, number) for block in blocks for call, number in block.calls.items()}
    count = len(inputs.tensors)

    def run(*flat: Tensor) -> tuple[Tensor, ...]:
        slots, given = flat[: len(used)], flat[len(used) : len(used) + count]
        installed: list[Tensor | None] = list(placeholders)
        for i, x in zip(used, slots, strict=True):
            installed[i] = rig.used_form(i, x)
        seen: dict[str, int] = {}

        def hook(module: nn.Module, path: str, args: Any, kwargs: Any, proceed: Any) -> Any:
            seen[path] = seen.get(path, -1) + 1
            if (path, seen[path]) in calls:
                block, number = calls[path, seen[path]]
                return run_block(block, number, flat[-1], args, kwargs)
            position.paths.append(path)
            try:
                return proceed()
            finally:
                position.paths.pop()

        # Autograd runs this more than once: what one run leaves in attributes (a table made at the first call) must not
        # be there in the next.
        kept = attributes_kept(rig.module, [])
        with kept, rig.installed(installed), routed(rig.names, regions.around(rig, hook)):
            result = inputs.call(rig.module, [cast(x, rig.precision) for x in given])
            for i, new in rig.replaced(installed):
                slots[used.index(i)].copy_(new)
        found, _ = read_outputs(result)
        return tuple(x if keep else x.detach() for (_, x), keep in zip(found, outputs.differentiable, strict=True))

    return run


def _arguments(rig: Rig, inputs: Inputs, used: list[int]) -> list[Argument]:
    traced = {slot: position for position, slot in enumerate(used)}
    found = []
    for i, slot in enumerate(rig.slots):
        kind = InputKind.PARAMETER if slot.is_parameter else InputKind.BUFFER
        grad = slot.is_parameter and slot.tensor.requires_grad
        meta = _meta(slot, rig)
        found.append(
            Argument(
                kind=kind, target=slot.name, requires_grad=grad, keep=slot.is_parameter, traced=traced.get(i), meta=meta
            )
        )
    for k, (path, x) in enumerate(zip(inputs.tensor_paths, inputs.tensors, strict=True)):
        grad = x.requires_grad
        found.append(Argument(kind=InputKind.INPUT, target=path, requires_grad=grad, keep=True, traced=len(used) + k))
    return found


def _parameter_infos(rig: Rig) -> tuple[ParameterInfo, ...]:
    return tuple(
        ParameterInfo(name=s.name, meta=_meta(s, rig), requires_grad=s.tensor.requires_grad, aliases=s.aliases)
        for s in rig.slots[: rig.count]
    )


def _buffer_infos(rig: Rig) -> tuple[BufferInfo, ...]:
    return tuple(
        BufferInfo(name=s.name, meta=_meta(s, rig), persistent=s.persistent, aliases=s.aliases)
        for s in rig.slots[rig.count :]
    )


def _meta(slot: Slot, rig: Rig) -> TensorMeta:
    return TensorMeta(tuple(slot.tensor.shape), dtype_name(rig.stored_dtype(slot)))

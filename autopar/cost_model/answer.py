"""A solver's choice -> the Plan: layouts by name, what each costs, and the prediction with its breakdown."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from autopar.cost_model.build import Priced, When
from autopar.cost_model.context import Prices
from autopar.cost_model.later import Mode
from autopar.cost_model.moments import fixed_bytes, saved_readers, state_bytes_per_parameter
from autopar.cost_model.places import Places
from autopar.cost_model.wiring import SlotKind, stays
from autopar.ir.cluster import ClusterSpec
from autopar.ir.graph import CapturedGraph, InputKind, TensorMeta, tensor_keys
from autopar.ir.layout import Kind, Layout, local_shape
from autopar.ir.options import COMPUTE_DTYPE, TOKEN_AXES, Options
from autopar.ir.plan import (
    AGAIN,
    Plan,
    PlanCluster,
    PlanInput,
    PlanMesh,
    PlanModel,
    PlanNote,
    PlanParameter,
    PlanPrediction,
    PlanRequest,
    PlanReshard,
    PlanSchedule,
    PlanSolver,
    PlanStage,
    PlanStrategy,
    asked_options,
    device_hours,
)
from autopar.ir.problem import conversions, evaluate
from autopar.ir.reshard import plan_reshard
from autopar.ir.solution import Solution
from autopar.ir.strategy import Note, Strategy
from autopar.ir.timeline import StageMemory
from autopar.ops.experts import EXCHANGE, OWN

LARGEST = 12
"""How many of what holds the most memory a plan names."""


def make_plan(
    captured: CapturedGraph,
    priced: Priced,
    solution: Solution,
    prices: Prices,
    cluster: ClusterSpec,
    options: Options,
    notes: tuple[Note, ...],
    model_flops: float,
) -> Plan:
    """The plan of one solved problem. `model_flops`: floating point operations of a step, nothing recomputed."""
    picks = _picks(priced, solution.choice)
    memory = _memory(captured, priced, solution, picks, prices, options)
    said = written(captured, priced, solution.choice, prices)
    later = said.later
    modes = Counter(c == AGAIN for kept in later.values() for c in kept.values())
    waiting = [w for w in priced.wiring.wires if saved_readers(w, priced.wiring, prices)]
    stage = PlanStage(
        index=0,
        devices=max(1, priced.mesh.size),
        blocks=[(common_path(b.instances), len(b.instances)) for b in captured.blocks],
        peak_memory_bytes=sum(memory.values()),
        saved_count=modes[False] if priced.later else len(waiting),
        recomputed_count=modes[True],
    )
    return whole_plan(
        captured, priced, cluster, options, notes, said,
        schedule=PlanSchedule(),
        stages=[stage],
        parameters=parameters_of(captured, priced, picks, options),
        predicted=_prediction(captured, priced, solution, said.conversions, memory, cluster, options, model_flops),
        solver=PlanSolver(
            status=solution.status.name.lower(),
            objective_us=solution.objective_us,
            bound_us=solution.bound_us,
            gap=solution.gap,
            time_s=round(solution.time_s, 3),
            memory_price=solution.memory_price_us_per_byte,
            memory_bytes=sum(memory.values()),
        ),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a choice says, by name, as a plan keeps it."""

    strategies: dict[str, dict[str, PlanStrategy]]
    inputs: dict[str, dict[str, str]]
    outputs: dict[str, dict[str, str]]
    conversions: list[PlanReshard]
    later: dict[str, dict[str, str]]
    held: dict[str, dict[str, str]]


def written(captured: CapturedGraph, priced: Priced, choice: tuple[int, ...], prices: Prices) -> Written:
    """Layouts, conversions and what is kept under a choice."""
    strategies, inputs, outputs = _layouts(captured, priced, choice, _picks(priced, choice))
    return Written(
        strategies=strategies, inputs=inputs, outputs=outputs,
        conversions=_conversions(captured, priced, choice, prices), later=_later(captured, priced, choice),
        held=_held(captured, priced, choice),
    )  # fmt: skip


def whole_plan(
    captured: CapturedGraph, priced: Priced, cluster: ClusterSpec, options: Options, notes: tuple[Note, ...],
    said: Written, *, schedule: PlanSchedule, stages: list[PlanStage], parameters: dict[str, PlanParameter],
    predicted: PlanPrediction, solver: PlanSolver,
) -> Plan:  # fmt: skip
    """The plan's record, of its parts and of what it was searched from."""
    return Plan(
        model=PlanModel(
            name=captured.model_name,
            parameters=sum(p.meta.numel for p in captured.parameters),
            graph_hash=captured.hash,
        ),
        cluster=PlanCluster(name=cluster.name, devices=cluster.devices, spec=_plain(cluster)),
        mesh=PlanMesh(
            pipeline=priced.load.stages,
            axes={a.name: a.size for a in priced.mesh.axes},
            levels={a.name: a.level for a in priced.mesh.axes},
        ),
        schedule=schedule,
        stages=stages,
        parameters=parameters,
        predicted=predicted,
        solver=solver,
        notes=[PlanNote(kind=n.kind, where=n.where, message=n.message) for n in (*notes, *_estimates(said))],
        strategies=said.strategies,
        inputs=said.inputs,
        outputs=said.outputs,
        conversions=said.conversions,
        later=said.later,
        held=said.held,
        pins={k: str(v) for k, v in options.pins.items()},
        precision=options.precision,
        request=PlanRequest(inputs=inputs_of(captured), options=asked_options(options)),
    )


def _estimates(said: Written) -> Iterator[Note]:
    """What a plan assumes of data."""
    for graph, nodes in said.strategies.items():
        routed = next((key for key, op in nodes.items() if {EXCHANGE, OWN} & set(op.tags)), None)
        if routed is not None:
            where = routed.rpartition("/autopar.")[0] or graph
            yield Note(
                "estimate", where, "time and memory are those of as many rows for each expert; batches may differ"
            )


def _picks(priced: Priced, choice: tuple[int, ...]) -> tuple[Strategy | Layout, ...]:
    return tuple(options[i] for options, i in zip(priced.options, choice, strict=False))


def with_memory(plan: Plan, memory: StageMemory, limit_bytes: int) -> Plan:
    """A plan with the memory of its program in the place of what the solver counted; a note where that is too much."""
    replace = msgspec.structs.replace
    notes = list(plan.notes)
    if 0 < limit_bytes < memory.peak_bytes:
        listed = ", ".join(f"{what} {size / 2**20:.0f} MiB" for what, size in memory.contributors[:3])
        notes.append(
            PlanNote(
                kind="memory", where=memory.at,
                message=f"the emitted program is predicted to hold {memory.peak_bytes / 2**20:.0f} MiB at its peak, "
                f"more than the {limit_bytes / 2**20:.0f} MiB allowed, where the search counted "
                f"{plan.solver.memory_bytes / 2**20:.0f} MiB (largest: {listed}): search with a lower --memory-limit",
            )
        )  # fmt: skip
    return replace(
        plan,
        stages=[replace(stage, peak_memory_bytes=memory.peak_bytes) for stage in plan.stages],
        predicted=replace(
            plan.predicted, peak_memory_bytes=memory.peak_bytes, breakdown_bytes=dict(memory.kinds),
            memory_at=memory.at, memory_largest=dict(memory.contributors[:LARGEST]),
        ),
        notes=notes,
    )  # fmt: skip


def with_idle(plan: Plan) -> Plan:
    """A note for each axis along which no op is cut: devices that the plan has no use for, and why."""
    idle = {axis: size for axis, size in plan.mesh.axes.items() if size > 1 and not _cuts_ops(plan, axis)}
    if not idle:
        return plan
    used = plan.cluster.devices // math.prod(idle.values())
    notes = []
    for axis, size in idle.items():
        because = next((n.message for n in plan.notes if f" on {axis}" in n.message), "")
        notes.append(
            PlanNote(
                kind="idle", where=f"{axis}={size}",
                message=f"all {size} ranks along {axis} compute the same, so {used} of {plan.cluster.devices} devices "
                f"would do: {because or 'to send pieces costs more than to compute the whole on each'}; of what was "
                f"asked for, the search found nothing faster",
            )
        )  # fmt: skip
    return msgspec.structs.replace(plan, notes=[*notes, *plan.notes])


def _cuts_ops(plan: Plan, axis: str) -> bool:
    """True if some op of the plan works on pieces or sums along the axis."""
    return any(
        f"{axis}:S(" in layout or f"{axis}:P" in layout
        for nodes in plan.strategies.values()
        for strategy in nodes.values()
        for layout in (*strategy.inputs, *strategy.outputs)
    )


def _plain(cluster: ClusterSpec) -> ClusterSpec:
    """The record alone, as it is read back from a plan's file."""
    return ClusterSpec(**{name: getattr(cluster, name) for name in ClusterSpec.__struct_fields__})


def inputs_of(captured: CapturedGraph) -> dict[str, PlanInput]:
    """Path of each tensor that a call passes -> the tensor in the global batch."""
    leaves = captured.signature.inputs
    return {i.path: PlanInput(shape=i.meta.shape, dtype=i.meta.dtype) for i in leaves if i.meta is not None}


def common_path(paths: tuple[str, ...]) -> str:
    """The module path that the instances share: "model.layers" of "model.layers.0", "model.layers.1"."""
    parts = [p.split(".") for p in paths]
    shared = []
    for names in zip(*parts, strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return ".".join(shared) or paths[0]


def _layouts(
    captured: CapturedGraph, priced: Priced, chosen: tuple[int, ...], picks: tuple[Strategy | Layout, ...]
) -> tuple[dict[str, dict[str, PlanStrategy]], dict[str, dict[str, str]], dict[str, dict[str, str]]]:
    strategies: dict[str, dict[str, PlanStrategy]] = {g.name: {} for g in captured.graphs}
    inputs: dict[str, dict[str, str]] = {g.name: {} for g in captured.graphs}
    outputs: dict[str, dict[str, str]] = {g.name: {} for g in captured.graphs}
    targets = {(g.name, i.value.name): f"{i.kind.value}:{i.target}" for g in captured.graphs for i in g.inputs}
    nodes = priced.problem.nodes[: len(picks)]
    for slot, pick, node, choice in zip(priced.wiring.slots, picks, nodes, chosen, strict=False):
        if isinstance(pick, Strategy):
            assert slot.node is not None
            strategies[slot.graph][slot.node.key] = PlanStrategy(
                inputs=[str(x) for x in pick.inputs],
                outputs=["" if x is None else str(x) for x in pick.outputs],
                tags=list(pick.tags),
                us=node.cost_us[choice] / slot.count,
            )
        elif slot.kind is SlotKind.INPUT:
            inputs[slot.graph][targets[(slot.graph, slot.name)]] = str(pick)
        elif slot.kind is SlotKind.OUTPUT:
            outputs[slot.graph][slot.name] = str(pick)
    return strategies, inputs, outputs


def _conversions(captured: CapturedGraph, priced: Priced, choice: tuple[int, ...], prices: Prices) -> list[PlanReshard]:
    """Every conversion that the objective pays for, one entry per (graph, value)."""
    places = Places.of(captured)
    counts = {s.graph: s.count for s in priced.wiring.slots if s.kind is SlotKind.OP}
    found = []
    for index, value, layouts, when in zip(
        priced.wires, priced.problem.values, priced.layouts, priced.when, strict=True
    ):
        if index is None:
            continue
        wire = priced.wiring.wires[index]
        for p, q in conversions(value, choice):
            before, after = layouts[p], layouts[q]
            if before is None or after is None or before == after:
                continue
            steps = plan_reshard(before, after)
            assert steps is not None
            runs = 1 if when is When.ONCE else priced.load.micro_batches
            each = value.reshard_us[p][q] / wire.count
            parts = prices.steps_us(wire.meta, before, after, stays(priced.wiring, wire))
            for graph, name in wire.names:
                found.append(
                    PlanReshard(
                        graph=graph, value=name, before=str(before), after=str(after),
                        steps=[str(s) for s in steps],
                        count=(1 if graph == "top" else counts.get(graph, 1)) * runs, us=each,
                        where=places.name(graph, name), steps_us=parts, dtype=wire.meta.dtype,
                    )
                )  # fmt: skip
    return found


def _later(captured: CapturedGraph, priced: Priced, choice: tuple[int, ...]) -> dict[str, dict[str, str]]:
    """`Plan.later` of what the backward asks for."""
    found: dict[str, dict[str, str]] = {}
    keys = {g.name: tensor_keys(g) for g in captured.graphs}
    for chosen in priced.later:
        pick = chosen.choices[choice[chosen.node]]
        if chosen.wire is None or pick.layout is None:
            continue
        for graph, name in priced.wiring.wires[chosen.wire].names:
            found.setdefault(graph, {})[keys[graph][name]] = AGAIN if pick.mode is Mode.AGAIN else str(pick.layout)
    return found


def _held(captured: CapturedGraph, priced: Priced, choice: tuple[int, ...]) -> dict[str, dict[str, str]]:
    """`Plan.held`: the layouts of what stays for all micro-batches."""
    found: dict[str, dict[str, str]] = {}
    keys = {g.name: tensor_keys(g) for g in captured.graphs}
    for held in priced.held:
        for graph, name in priced.wiring.wires[held.wire].names:
            found.setdefault(graph, {})[keys[graph][name]] = str(held.choices[choice[held.node]].layout)
    return found


def parameters_of(
    captured: CapturedGraph, priced: Priced, picks: tuple[Strategy | Layout, ...], options: Options
) -> dict[str, PlanParameter]:
    """Of each parameter its stored layout, and what that takes."""
    found = {}
    for info in captured.parameters:
        slot = priced.wiring.storage_of.get(info.name)
        layout = picks[slot] if slot is not None else None
        assert layout is None or isinstance(layout, Layout)
        item = info.meta.nbytes // info.meta.numel if info.meta.numel else 0
        numel = info.meta.numel
        if layout is not None:
            numel = TensorMeta(local_shape(info.meta.shape, layout, priced.mesh), info.meta.dtype).numel
        found[info.name] = PlanParameter(
            stage=0,
            layout=str(layout) if layout is not None else " ".join(f"{a}:R" for a in priced.mesh.names) or "whole",
            bytes_per_device=numel * item,
            optimizer_bytes_per_device=numel * options.optimizer_bytes_per_parameter if info.requires_grad else 0,
            role=_role(layout, slot, priced, picks),
            dtype=info.meta.dtype,
        )
    return found


def _role(layout: Layout | None, slot: int | None, priced: Priced, picks: tuple[Strategy | Layout, ...]) -> str:
    """The layout in words: what a specialist would call it."""
    if layout is None or slot is None:
        return "unused"
    words, meta = [], priced.wiring.slots[slot].meta
    for axis, placement in zip(layout.axes, layout.placements, strict=True):
        cut = placement.kind is Kind.SHARD
        if cut and meta is not None and placement.dim == meta.experts and axis in ("ep", "tp"):
            words.append("experts")
        elif axis in TOKEN_AXES:
            words.append("ZeRO-3" if cut else "data parallel")
        elif cut:
            words.append(_cut_word(slot, axis, priced, picks))
    return " + ".join(dict.fromkeys(words)) or "whole"


def _cut_word(slot: int, axis: str, priced: Priced, picks: tuple[Strategy | Layout, ...]) -> str:
    """column: outputs come out cut; row: outputs come out as sums; else cut. Looks through one-input ops."""
    at = slot
    for _ in range(6):
        wire = next((w for w in priced.wiring.wires if w.producer == at and w.phase.value == "forward"), None)
        if wire is None:
            break
        at = wire.readers[0].slot
        pick = picks[at]
        if not isinstance(pick, Strategy):
            break
        if len(pick.inputs) > 1 and pick.outputs and pick.outputs[0] is not None:
            kind = pick.outputs[0].on(axis).kind
            return {Kind.SHARD: "column", Kind.PARTIAL: "row", Kind.REPLICATE: "cut"}[kind]
    return "cut"


def _memory(
    captured: CapturedGraph,
    priced: Priced,
    solution: Solution,
    picks: tuple[Strategy | Layout, ...],
    prices: Prices,
    options: Options,
) -> dict[str, int]:
    """Bytes per device by kind, at the moment that the problem limits."""
    total: Counter[str] = Counter(buffers=fixed_bytes(captured, priced.wiring))
    for slot, pick in zip(priced.wiring.slots, picks, strict=True):
        if slot.kind is SlotKind.STORAGE and isinstance(pick, Layout) and slot.meta is not None:
            numel = slot.count * TensorMeta(local_shape(slot.meta.shape, pick, priced.mesh), slot.meta.dtype).numel
            weight, gradient, state = state_bytes_per_parameter(slot, captured, options)
            total["parameters"] += numel * weight
            total["gradients"] += numel * gradient
            total["optimizer"] += numel * state
    for chosen in priced.later:
        at = solution.choice[chosen.node]
        if chosen.wire is not None and chosen.choices[at].mode is Mode.KEEP:
            total["activations"] += chosen.kept_bytes[at]
    kept = {c.wire for c in priced.later}
    for index, wire in enumerate(priced.wiring.wires):
        value, layouts = priced.problem.values[index], priced.layouts[index]
        late = saved_readers(wire, priced.wiring, prices) if index not in kept else ()
        wanted = {value.consumers[i].wants[solution.choice[value.consumers[i].node]] for i in late}
        for layout in (layouts[q] for q in wanted):
            assert layout is not None
            piece = TensorMeta(local_shape(wire.meta.shape, layout, priced.mesh, wire.meta.units), wire.meta.dtype)
            total["activations"] += piece.nbytes * wire.saved_count
    used = evaluate(priced.problem, solution.choice).used_bytes
    total["working set"] = max(0, max(used, default=0) - sum(total.values()))
    return dict(total)


def _prediction(
    captured: CapturedGraph,
    priced: Priced,
    solution: Solution,
    resharded: list[PlanReshard],
    memory: dict[str, int],
    cluster: ClusterSpec,
    options: Options,
    model_flops: float,
) -> PlanPrediction:
    spent: dict[str, float] = defaultdict(float)
    for slot, node, compute, choice in zip(
        priced.wiring.slots, priced.problem.nodes, priced.compute_us, solution.choice, strict=False
    ):
        if slot.kind is SlotKind.STORAGE:
            spent["optimizer"] += node.cost_us[choice]
        else:
            spent["compute"] += compute[choice]
            spent["communication"] += node.cost_us[choice] - compute[choice]
    spent["communication"] += sum(r.us * r.count for r in resharded)
    for chosen in priced.later:
        again = priced.problem.nodes[chosen.node].cost_us[solution.choice[chosen.node]]
        if again:
            spent["recompute"] += again
    step = solution.objective_us
    peak = min(g.device.peak_flops.get(COMPUTE_DTYPE[options.precision], 0.0) for g in cluster.groups)
    available = peak * cluster.devices * step / 1e6
    return PlanPrediction(
        step_time_us=step,
        tokens_per_s=tokens(captured) / step * 1e6 if step else 0.0,
        mfu=model_flops / available if available else 0.0,
        peak_memory_bytes=sum(memory.values()),
        breakdown_us=dict(spent),
        breakdown_bytes=memory,
        cost_source="; ".join(dict.fromkeys(g.device.source for g in cluster.groups)),
        device_hours_per_million_tokens=device_hours(cluster.devices, tokens(captured) / step * 1e6 if step else 0.0),
    )


def tokens(captured: CapturedGraph) -> int:
    """Tokens of one step: elements of the largest integer input of two dims, else rows of the first input."""
    metas = [i.value.meta for i in captured.top.inputs if i.kind is InputKind.INPUT]
    ids = [m.numel for m in metas if m.dtype in ("int64", "int32") and len(m.shape) == 2]
    if ids:
        return max(ids)
    return next((m.shape[0] for m in metas if m.shape), 1)

"""An assignment to pipeline stages -> the Plan: which block runs where and how, and the step with its bubble."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import msgspec

from autopar.cost_model.answer import FLOPS_DTYPE, Written, parameters_of, tokens, whole_plan, written
from autopar.cost_model.build import Priced, Prices, When, state_bytes_per_parameter
from autopar.cost_model.ends import FIRST, LAST
from autopar.cost_model.later import Mode
from autopar.cost_model.pipeline import Choice, Parts
from autopar.cost_model.wiring import SlotKind
from autopar.ir.cluster import ClusterSpec
from autopar.ir.graph import CapturedGraph
from autopar.ir.layout import Kind
from autopar.ir.options import Options
from autopar.ir.plan import (
    Plan,
    PlanParameter,
    PlanPrediction,
    PlanSchedule,
    PlanSolver,
    PlanStage,
)
from autopar.ir.problem import conversions
from autopar.ir.stages import Assignment, StageEvaluation, StageProblem, even_split
from autopar.ir.strategy import Note

NOT_RUN = "this version finds and prices plans with stages or micro-batches, and does not run them"
ONCE = ("optimizer", "gradients and weights")
"""Kinds of time that a step spends once, not by micro-batch."""


@dataclass(frozen=True)
class Cut:
    """A model on its stages. `choices[k]` is what columns named k mean."""

    parts: Parts
    choices: tuple[Choice, ...]
    problem: StageProblem
    assignment: Assignment
    evaluation: StageEvaluation

    def held(self, stage: int) -> Iterator[tuple[str, int, int]]:
        """(part, choice, instances) of a stage."""
        for run, counts in zip(self.problem.runs, self.assignment.counts[stage], strict=True):
            for column, n in zip(run.columns, counts, strict=True):
                if n:
                    yield run.name, int(column.name), n

    @cached_property
    def uses(self) -> dict[tuple[str, int], int]:
        """(part, choice) -> instances on all stages."""
        found: Counter[tuple[str, int]] = Counter()
        for stage in range(len(self.problem.stages)):
            for part, k, n in self.held(stage):
                found[part, k] += n
        return dict(found)

    @cached_property
    def names(self) -> dict[tuple[str, int], str]:
        """(part, choice) -> how the plan calls that way to run the part's graph: the most used has the graph's name."""
        ways: dict[str, dict[int, int]] = {}
        for (part, k), n in self.uses.items():
            ways.setdefault(self.graph(part), {}).setdefault(k, 0)
            ways[self.graph(part)][k] += n
        order = {graph: [k for k, _ in sorted(found.items(), key=_most_used)] for graph, found in ways.items()}
        return {
            (part, k): graph + (f"#{at}" if (at := order[graph].index(k)) else "")
            for part, k in self.uses
            for graph in (self.graph(part),)
        }

    def graph(self, part: str) -> str:
        """The graph that a part is of."""
        return self.parts.captured.top.name if part in (FIRST, LAST) else part


def _most_used(way: tuple[int, int]) -> tuple[int, int]:
    return -way[1], way[0]


def staged_plan(
    cut: Cut, prices: Prices, cluster: ClusterSpec, options: Options, notes: tuple[Note, ...], model_flops: float,
    solver: PlanSolver,
) -> Plan:  # fmt: skip
    """The plan of a solved trial. `model_flops`: of a step, nothing recomputed."""
    captured, priced, problem = cut.parts.captured, cut.parts.priced, cut.problem
    main = cut.choices[max(cut.uses, key=lambda use: (cut.uses[use], -use[1]))[1]]
    stage_of = _stage_of_blocks(cut)
    picks = tuple(options_[i] for options_, i in zip(priced.options, main, strict=False))
    parameters = {
        name: _on_stage(found, name, stage_of, cut, main)
        for name, found in parameters_of(captured, priced, picks, options).items()
    }
    return whole_plan(
        captured, priced, cluster, options, (*notes, Note("run", "", NOT_RUN)), _said(cut, prices),
        schedule=PlanSchedule(name=_schedule(problem), micro_batches=problem.micro_batches, chunks=problem.chunks),
        stages=[_stage(cut, s) for s in range(len(problem.stages))], parameters=parameters,
        predicted=_predicted(cut, cluster, options, model_flops), solver=solver,
    )  # fmt: skip


def _schedule(problem: StageProblem) -> str:
    if len(problem.stages) == 1:
        return "accumulate" if problem.micro_batches > 1 else "none"
    return "interleaved" if problem.chunks > 1 else "1f1b"


def _said(cut: Cut, prices: Prices) -> Written:
    """Layouts of every way to run each graph. Conversions are those of the instances that run so."""
    captured = cut.parts.captured
    whole = {k: written(captured, cut.parts.priced, cut.choices[k], prices) for k in {k for _, k in cut.uses}}
    instances = {b.key: len(b.instances) for b in captured.blocks}
    said = Written(strategies={}, inputs={}, outputs={}, conversions=[], later={})
    for (part, k), name in cut.names.items():
        graph = cut.graph(part)
        if name in said.strategies:
            continue
        for table, own in (
            (said.strategies, whole[k].strategies), (said.inputs, whole[k].inputs), (said.outputs, whole[k].outputs),
            (said.later, whole[k].later),
        ):  # fmt: skip
            if graph in own:
                table[name] = own[graph]  # type: ignore[index, assignment]
        said.conversions.extend(
            msgspec.structs.replace(c, graph=name, count=c.count // instances.get(graph, 1) * cut.uses[part, k])
            for c in whole[k].conversions
            if c.graph == graph
        )
    return said


def _stage(cut: Cut, stage: int) -> PlanStage:
    captured = cut.parts.captured
    devices = max(1, cut.parts.priced.mesh.size)
    paths = {b.key: _shared(b.instances) for b in captured.blocks}
    blocks: Counter[str] = Counter()
    columns: Counter[str] = Counter()
    kept = again = 0
    for part, k, n in cut.held(stage):
        if part in paths:
            blocks[paths[part]] += n
        columns[cut.names[part, k]] += n
        more = _modes(cut, part, cut.choices[k])
        kept, again = kept + n * more[Mode.KEEP], again + n * more[Mode.AGAIN]
    return PlanStage(
        index=stage, devices=devices, blocks=list(blocks.items()),
        peak_memory_bytes=cut.evaluation.used_bytes[stage], saved_count=kept, recomputed_count=again,
        columns=dict(columns), busy_us=cut.evaluation.busy_us[stage],
    )  # fmt: skip


def _shared(paths: tuple[str, ...]) -> str:
    """ "model.layers" of "model.layers.0", "model.layers.1"."""
    shared = []
    for names in zip(*(p.split(".") for p in paths), strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return ".".join(shared) or paths[0]


def _modes(cut: Cut, part: str, choice: Choice) -> Counter[Mode]:
    """Of one instance: tensors kept for the backward, and made again."""
    found: Counter[Mode] = Counter()
    for chosen in cut.parts.priced.later:
        if chosen.wire is not None and part in cut.parts.homes[chosen.slot][:1]:
            found[chosen.choices[choice[chosen.node]].mode] += 1
    return found


def _stage_of_blocks(cut: Cut) -> dict[str, int]:
    """Module path of an instance -> its stage."""
    problem, stages = cut.problem, len(cut.problem.stages)
    cuts = cut.assignment.cuts if problem.chunks == 1 else even_split(problem)
    assert cuts is not None
    calls = [n.block for n in cut.parts.captured.top.nodes if n.op == "autopar.block" and n.block is not None]
    at = {b.key: iter(b.instances) for b in cut.parts.captured.blocks}
    ordered = [next(at[c.key]) for c in calls]
    found, place = {}, 0
    for part, held in enumerate(cuts):
        blocks = sum(n for run, n in zip(problem.runs, held, strict=True) if run.name not in (FIRST, LAST))
        for path in ordered[place : place + blocks]:
            found[path] = part % stages
        place += blocks
    return found


def _on_stage(found: PlanParameter, name: str, stage_of: dict[str, int], cut: Cut, choice: Choice) -> PlanParameter:
    """Its stage, and its layout in words: what stays whole between micro-batches is ZeRO-1 or 2."""
    priced = cut.parts.priced
    slot = priced.wiring.storage_of.get(name)
    stage = next((s for path, s in stage_of.items() if name.startswith(f"{path}.")), None)
    if stage is None:
        homes = cut.parts.homes[slot] if slot is not None else (LAST,)
        stage = 0 if FIRST in homes else len(cut.problem.stages) - 1
    role = found.role
    if slot is not None and "ZeRO-3" in role:
        whole = {
            h.gradient: _whole_on_data(priced, h.node, choice) for h in priced.held if slot in _origins(priced, h.slot)
        }
        if whole.get(False):
            role = role.replace("ZeRO-3", "ZeRO-1" if whole.get(True) else "ZeRO-2")
    return msgspec.structs.replace(found, stage=stage, role=role)


def _origins(priced: Priced, slot: int) -> set[int]:
    """Storage slots that a lasting slot is made of."""
    if priced.wiring.slots[slot].kind is SlotKind.STORAGE:
        return {slot}
    makers = {w.producer for w in priced.wiring.wires for r in w.readers if r.slot == slot}
    return {s for maker in makers if maker in priced.lasting for s in _origins(priced, maker)}


def _whole_on_data(priced: Priced, node: int, choice: Choice) -> bool:
    layout = next(h.choices[choice[node]].layout for h in priced.held if h.node == node)
    return all(
        p.kind is not Kind.SHARD for a, p in zip(layout.axes, layout.placements, strict=True) if a in ("dp", "cp")
    )


def _predicted(cut: Cut, cluster: ClusterSpec, options: Options, model_flops: float) -> PlanPrediction:
    """The step as the slowest stage sees it, and memory as the fullest does."""
    evaluation, problem = cut.evaluation, cut.problem
    step = evaluation.step_us
    slowest = max(range(len(problem.stages)), key=lambda s: evaluation.busy_us[s])
    fullest = max(range(len(problem.stages)), key=lambda s: evaluation.used_bytes[s])
    spent: defaultdict[str, float] = defaultdict(float)
    for part, k, n in cut.held(slowest):
        for kind, us in _times(cut, part, cut.choices[k]).items():
            times = 1 if kind in ONCE else problem.micro_batches
            spent[kind] += us * n * times * problem.stages[slowest].speed
    spent["between stages"] = problem.micro_batches * problem.exposed_us(slowest)
    spent["bubble"] = max(0.0, step - sum(spent.values()))
    memory = _memory(cut, fullest, options)
    peak = sum(g.count * g.device.peak_flops.get(FLOPS_DTYPE[options.precision], 0.0) for g in cluster.groups)
    available = peak * step / 1e6
    return PlanPrediction(
        step_time_us=step,
        tokens_per_s=tokens(cut.parts.captured) / step * 1e6 if step else 0.0,
        mfu=model_flops / available if available else 0.0,
        peak_memory_bytes=evaluation.peak_bytes,
        breakdown_us={kind: us for kind, us in spent.items() if us},
        breakdown_bytes=memory,
        cost_source="; ".join(dict.fromkeys(g.device.source for g in cluster.groups)),
        memory_at=f"stage {fullest}, with the micro-batches that it has in flight",
    )


def _times(cut: Cut, part: str, choice: Choice) -> dict[str, float]:
    """µs of one instance: by micro-batch, and `ONCE` a step."""
    priced, homes, load = cut.parts.priced, cut.parts.homes, cut.parts.priced.load
    found: defaultdict[str, float] = defaultdict(float)
    count = _instances(cut.parts.captured, part)
    for i, slot in enumerate(priced.wiring.slots):
        here = part in homes[i] if slot.kind is SlotKind.STORAGE else part == homes[i][0]
        cost = priced.problem.nodes[i].cost_us[choice[i]] if here else 0.0
        if slot.kind is SlotKind.STORAGE:
            found["optimizer"] += cost / load.once
        elif i in priced.lasting:
            found["gradients and weights"] += cost / load.once
        elif cost:
            compute = priced.compute_us[i][choice[i]]
            found["compute"] += compute / load.runs
            found["communication"] += (cost - compute) / load.runs
    for chosen in priced.later:
        if part == homes[chosen.slot][0]:
            found["recompute"] += priced.problem.nodes[chosen.node].cost_us[choice[chosen.node]] / load.runs
    for number, index in enumerate(priced.wires):
        if index is None or cut.parts.home_of_wire(priced.wiring.wires[index]) != part:
            continue
        value = priced.problem.values[number]
        cost = sum(value.reshard_us[p][q] for p, q in conversions(value, choice))
        if priced.when[number] is When.ONCE:
            found["gradients and weights"] += cost / load.once
        else:
            found["communication"] += cost / load.runs
    return {kind: us / count for kind, us in found.items()}


def _instances(captured: CapturedGraph, part: str) -> int:
    return next((len(b.instances) for b in captured.blocks if b.key == part), 1)


def _memory(cut: Cut, stage: int, options: Options) -> dict[str, int]:
    """Bytes of one stage by kind."""
    found: Counter[str] = Counter(buffers=cut.problem.stages[stage].fixed_bytes)
    for part, k, n in cut.held(stage):
        resident = _resident(cut, part, cut.choices[k], options)
        for kind, size in resident.items():
            found[kind] += size * n // _instances(cut.parts.captured, part)
    held = {(run.name, int(c.name)): c for run in cut.problem.runs for c in run.columns}
    flying = cut.problem.stages[stage].in_flight
    found["activations"] = int(flying * sum(n * held[part, k].saved_bytes for part, k, n in cut.held(stage)))
    found["working set"] = max(0, cut.evaluation.used_bytes[stage] - sum(found.values()))
    return dict(found)


def _resident(cut: Cut, part: str, choice: Choice, options: Options) -> Counter[str]:
    """Bytes of all instances of a part that are there all through the step."""
    priced = cut.parts.priced
    held = {h.node: h for h in priced.held}
    found: Counter[str] = Counter()
    for node, slot, sizes in priced.whole_bytes.resident:
        if part not in cut.parts.homes[slot]:
            continue
        size = sizes[choice[node]]
        if node in held:
            found["gradients" if held[node].gradient else "weights as read"] += size
            continue
        weight, gradient, state = state_bytes_per_parameter(priced.wiring.slots[slot], cut.parts.captured, options)
        gradient = 0 if priced.held else gradient
        for kind, each in (("parameters", weight), ("gradients", gradient), ("optimizer", state)):
            found[kind] += size * each // max(1, weight + gradient + state)
    return found

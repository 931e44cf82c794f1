"""An assignment to pipeline stages -> the Plan: which block runs where and how, and the step with its bubble."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import msgspec

from autopar.cost_model.answer import Written, common_path, parameters_of, tokens, whole_plan, written
from autopar.cost_model.build import Priced
from autopar.cost_model.context import Prices
from autopar.cost_model.ends import FIRST, LAST
from autopar.cost_model.later import Mode
from autopar.cost_model.wiring import SlotKind
from autopar.ir.cluster import ClusterSpec
from autopar.ir.graph import CapturedGraph, InputKind
from autopar.ir.layout import Kind, Layout
from autopar.ir.options import COMPUTE_DTYPE, TOKEN_AXES, Options
from autopar.ir.parts import Amount, Choice, PartedProblem, Sums, WholeSolution
from autopar.ir.places import place_nodes
from autopar.ir.plan import (
    ACCUMULATE,
    Plan,
    PlanParameter,
    PlanPrediction,
    PlanSchedule,
    PlanSolver,
    PlanStage,
    device_hours,
)
from autopar.ir.stages import Assignment, StageEvaluation, StageProblem, even_split
from autopar.ir.strategy import Note, Strategy
from autopar.ir.ways import block_ways

TIMES = (Amount.FORWARD, Amount.BACKWARD, Amount.ONCE)


@dataclass(frozen=True)
class Cut:
    """A model on its stages."""

    captured: CapturedGraph
    priced: Priced
    parted: PartedProblem
    solution: WholeSolution

    @property
    def choices(self) -> tuple[Choice, ...]:
        """`choices[k]` is what columns named k mean."""
        return self.solution.choices

    @property
    def problem(self) -> StageProblem:
        """What was left to decide about stages."""
        return self.solution.problem

    @property
    def assignment(self) -> Assignment:
        """Who runs what."""
        assert self.solution.assignment.assignment is not None
        return self.solution.assignment.assignment

    @property
    def evaluation(self) -> StageEvaluation:
        """What that costs."""
        assert self.solution.assignment.evaluation is not None
        return self.solution.assignment.evaluation

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
    def sums(self) -> dict[int, dict[str, Sums]]:
        """Of each choice that is used, what every part takes under it, all instances together."""
        return {
            k: dict(zip(self.parted.parts, self.parted.sums(self.choices[k]), strict=True))
            for k in sorted({k for _, k in self.uses})
        }

    def instances(self, part: str) -> int:
        """How many of a part the model has."""
        return self.parted.counts[self.parted.parts.index(part)]

    @cached_property
    def homes(self) -> tuple[tuple[str, ...], ...]:
        """Of each node the parts that it is in."""
        return tuple(tuple(self.parted.parts[p] for p in here) for here in self.parted.homes)

    @cached_property
    def names(self) -> dict[tuple[str, int], str]:
        """(part, choice) -> how the plan calls that way to run the part's graph: the most used has the graph's name."""
        ways: defaultdict[str, Counter[int]] = defaultdict(Counter)
        for (part, k), n in self.uses.items():
            ways[self.graph(part)][k] += n
        order = {g: sorted(sorted(ks), key=ks.__getitem__, reverse=True) for g, ks in ways.items()}
        found = {}
        for part, k in self.uses:
            graph = self.graph(part)
            at = order[graph].index(k)
            found[part, k] = f"{graph}#{at}" if at else graph
        return found

    def graph(self, part: str) -> str:
        """The graph that a part is of."""
        return self.captured.top.name if part in (FIRST, LAST) else part


def staged_plan(
    cut: Cut, prices: Prices, cluster: ClusterSpec, options: Options, notes: tuple[Note, ...], model_flops: float,
    solver: PlanSolver,
) -> Plan:  # fmt: skip
    """The plan of a solved trial. `model_flops`: of a step, nothing recomputed."""
    captured, priced, problem = cut.captured, cut.priced, cut.problem
    stage_of = _stage_of_parameters(cut)
    by_choice = {k: parameters_of(captured, priced, _picks(cut, k), options) for k in cut.sums}
    most = max(cut.uses, key=lambda use: (cut.uses[use], -use[1]))[1]
    parameters = {name: _on_stage(p, name, stage_of, cut, most) for name, p in by_choice[most].items()}
    found = whole_plan(
        captured, priced, cluster, options, notes, _said(cut, prices),
        schedule=PlanSchedule(name=_schedule(problem), micro_batches=problem.micro_batches, chunks=problem.chunks),
        stages=[_stage(cut, s) for s in range(len(problem.stages))], parameters=parameters,
        predicted=_predicted(cut, cluster, options, model_flops), solver=solver,
    )  # fmt: skip
    ends = {end: name for (part, _), name in cut.names.items() for end in (FIRST, LAST) if part == end}
    found = msgspec.structs.replace(found, ends=ends)
    return msgspec.structs.replace(found, parameters={**parameters, **_in_their_ways(cut, found, by_choice, stage_of)})


def _picks(cut: Cut, choice: int) -> tuple[Strategy | Layout, ...]:
    return tuple(options[i] for options, i in zip(cut.priced.options, cut.choices[choice], strict=False))


def _in_their_ways(
    cut: Cut, plan: Plan, by_choice: Mapping[int, Mapping[str, PlanParameter]], stage_of: Mapping[str, int]
) -> dict[str, PlanParameter]:
    """Parameters of block instances, each stored as the way in which its block runs has it."""
    choice_of = {name: k for (_, k), name in cut.names.items()}
    found = {}
    for instance, way in block_ways(cut.captured.top, plan).items():
        k = choice_of[way]
        for name, parameter in by_choice[k].items():
            if name.startswith(f"{instance}."):
                found[name] = _on_stage(parameter, name, stage_of, cut, k)
    return found


def _schedule(problem: StageProblem) -> str:
    if problem.schedule:
        return problem.schedule
    if len(problem.stages) == 1:
        return ACCUMULATE if problem.micro_batches > 1 else "none"
    return "interleaved" if problem.chunks > 1 else "1f1b"


def _said(cut: Cut, prices: Prices) -> Written:
    """Layouts of every way to run each graph. Conversions are those of the instances that run so."""
    whole = {k: written(cut.captured, cut.priced, cut.choices[k], prices) for k in cut.sums}
    said = Written(strategies={}, inputs={}, outputs={}, conversions=[], later={}, held={})
    for (part, k), name in cut.names.items():
        graph, own = cut.graph(part), whole[k]
        if name in said.strategies:
            continue
        said.strategies[name] = own.strategies[graph]
        said.inputs[name] = own.inputs[graph]
        said.outputs[name] = own.outputs[graph]
        if graph in own.later:
            said.later[name] = own.later[graph]
        if graph in own.held:
            said.held[name] = own.held[graph]
        said.conversions.extend(
            msgspec.structs.replace(c, graph=name, count=c.count // cut.instances(part) * cut.uses[part, k])
            for c in own.conversions
            if c.graph == graph
        )
    return said


def _stage(cut: Cut, stage: int) -> PlanStage:
    captured = cut.captured
    devices = max(1, cut.priced.mesh.size)
    paths = {b.key: common_path(b.instances) for b in captured.blocks}
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


def _modes(cut: Cut, part: str, choice: Choice) -> Counter[Mode]:
    """Of one instance: tensors kept for the backward, and made again."""
    found: Counter[Mode] = Counter()
    for chosen in cut.priced.later:
        if chosen.wire is not None and part in cut.homes[chosen.slot][:1]:
            found[chosen.choices[choice[chosen.node]].mode] += 1
    return found


def _stage_of_parameters(cut: Cut) -> dict[str, int]:
    """Name of a parameter -> the first stage that reads it."""
    problem, stages, top = cut.problem, len(cut.problem.stages), cut.captured.top
    cuts = cut.assignment.cuts if problem.chunks == 1 else even_split(problem)
    assert cuts is not None
    ends = (FIRST, LAST)
    counts = [sum(n for run, n in zip(problem.runs, held, strict=True) if run.name not in ends) for held in cuts]
    names = {i.value.name: i.target for i in top.inputs if i.kind is InputKind.PARAMETER}
    return {names[value]: min(parts) % stages for value, parts in place_nodes(top, counts).readers.items()}


def _on_stage(found: PlanParameter, name: str, stage_of: Mapping[str, int], cut: Cut, way: int) -> PlanParameter:
    """Its stage, and its layout in words: what stays whole between micro-batches is ZeRO-1 or 2."""
    priced, choice = cut.priced, cut.choices[way]
    slot = priced.wiring.storage_of.get(name)
    stage = stage_of.get(name, len(cut.problem.stages) - 1)
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
    return all(p.kind is not Kind.SHARD for a, p in zip(layout.axes, layout.placements, strict=True) if a in TOKEN_AXES)


def _predicted(cut: Cut, cluster: ClusterSpec, options: Options, model_flops: float) -> PlanPrediction:
    """The step as the slowest stage sees it, and memory as the fullest does."""
    evaluation, problem = cut.evaluation, cut.problem
    step = evaluation.step_us
    slowest = max(range(len(problem.stages)), key=lambda s: evaluation.busy_us[s])
    fullest = max(range(len(problem.stages)), key=lambda s: evaluation.used_bytes[s])
    spent: defaultdict[str, float] = defaultdict(float)
    for part, k, n in cut.held(slowest):
        for (amount, kind), us in cut.sums[k][part].items():
            if amount in TIMES:
                times = 1 if amount is Amount.ONCE else problem.micro_batches
                spent[kind] += us * n / cut.instances(part) * times * problem.stages[slowest].speed
    spent["between stages"] = problem.micro_batches * problem.exposed_us(slowest)
    spent["bubble"] = max(0.0, step - sum(spent.values()))
    memory = _memory(cut, fullest)
    peak = sum(g.count * g.device.peak_flops.get(COMPUTE_DTYPE[options.precision], 0.0) for g in cluster.groups)
    available = peak * step / 1e6
    return PlanPrediction(
        step_time_us=step,
        tokens_per_s=tokens(cut.captured) / step * 1e6 if step else 0.0,
        mfu=model_flops / available if available else 0.0,
        peak_memory_bytes=evaluation.peak_bytes,
        breakdown_us={kind: us for kind, us in spent.items() if us},
        breakdown_bytes=memory,
        cost_source="; ".join(dict.fromkeys(g.device.source for g in cluster.groups)),
        memory_at=f"stage {fullest}, with the micro-batches that it has in flight",
        device_hours_per_million_tokens=device_hours(
            cluster.devices, tokens(cut.captured) / step * 1e6 if step else 0.0
        ),
    )


def _memory(cut: Cut, stage: int) -> dict[str, int]:
    """Bytes of one stage by kind."""
    found: Counter[str] = Counter(buffers=cut.problem.stages[stage].fixed_bytes)
    saved = 0
    for part, k, n in cut.held(stage):
        of = cut.instances(part)
        for (amount, kind), size in cut.sums[k][part].items():
            if amount is Amount.RESIDENT:
                found[kind] += int(size) * n // of
            elif amount is Amount.SAVED:
                saved += n * -(-int(size) // of)
    found["activations"] = int(cut.problem.stages[stage].in_flight * saved)
    found["working set"] = max(0, cut.evaluation.used_bytes[stage] - sum(found.values()))
    return dict(found)

"""Graph and plan -> the programs of a plan's stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from autopar.codegen.check import check_names
from autopar.codegen.emit import emit
from autopar.codegen.layouts import PlanLayouts, own_inputs
from autopar.codegen.lower import lower_by
from autopar.codegen.stages.cut import CutGraph, cut_graph
from autopar.codegen.stages.hoist import MADE, Weights, hoist
from autopar.codegen.stages.layouts import PartLayouts, Ways, Whole, micro_mesh, without_micro
from autopar.codegen.tables import may_draw
from autopar.errors import PlanError
from autopar.ir.ends import before_blocks
from autopar.ir.graph import Block, BlockCall, CapturedGraph, Graph, InputKind, Node, OutputKind
from autopar.ir.halves import late_nodes
from autopar.ir.layout import Layout
from autopar.ir.plan import Plan, mesh_of
from autopar.ir.program import Program
from autopar.ir.reshard import Collective
from autopar.ir.schedules import in_halves
from autopar.ir.staged import (
    MICRO,
    RECEIVED,
    SUMMED,
    Joined,
    PartProgram,
    Piece,
    StagedProgram,
    StagedSource,
    WeightsProgram,
)
from autopar.ir.strategy import Strategy
from autopar.ir.ways import block_ways, blocks_of_parts


def lower_stages(captured: CapturedGraph, plan: Plan) -> StagedProgram:
    """What the ranks execute under a plan with stages or micro-batches.

    Raises PlanError for a model that can't run so with the same numbers; says why, and what to do.
    """
    counts = blocks_of_parts(captured.top, plan)
    whole = Whole(captured=captured, plan=plan, mesh=micro_mesh(plan), ways=_ways(captured, plan))
    cut = cut_graph(captured.top, counts, whole.joins)
    names = {i.value.name: i.target for i in captured.top.inputs if i.kind is InputKind.PARAMETER}
    values = captured.top.values()

    def piece(value: str) -> Piece:
        return Piece(value=value, meta=values[value].meta, layout=whole.made(captured.top, value))

    parts = tuple(_part(whole, cut, k, piece) for k in range(len(counts)))
    return StagedProgram(
        model_name=captured.model_name,
        graph_hash=captured.hash,
        mesh=mesh_of(plan),
        stages=plan.mesh.pipeline,
        chunks=plan.schedule.chunks,
        micro_batches=plan.schedule.micro_batches,
        schedule=plan.schedule.name,
        parts=parts,
        collected=tuple(map(piece, cut.collected)),
        last=_end(whole, cut.last, _outputs(whole)),
        passed=cut.passed,
        pieces={p.value: piece(p.value) for p in cut.passed},
        shared={names[value]: readers for value, readers in cut.shared.items()},
        draws=any(may_draw(function) for part in parts for function in part.main.functions),
    )


def _ways(captured: CapturedGraph, plan: Plan) -> Ways:
    top = captured.top.name
    ends = plan.ends or {"first": top, "last": top}
    return Ways(
        first=ends["first"], last=ends["last"], before=before_blocks(captured.top.nodes),
        blocks=block_ways(captured.top, plan),
    )  # fmt: skip


def _part(whole: Whole, cut: CutGraph, index: int, piece: Callable[[str], Piece]) -> PartProgram:
    first, mesh = cut.first[index], mesh_of(whole.plan)
    joined = []
    for out in first.outputs if first is not None else ():
        assert out.value is not None
        wanted = whole.join_wanted(out.value)
        joined.append(Joined(value=out.value, wanted=without_micro(wanted, mesh)))
    part = _captured(whole, cut.parts[index])
    hoisted = hoist(part, whole.lasting)
    layouts = PartLayouts(hoisted.main, whole.plan, whole.mesh, whole=whole, part=index)
    main = _program(layouts)
    top = main.functions[-1]
    gradients = dict(zip(main.parameters, top.gradients, strict=True))
    summed = [o.value for o in cut.parts[index].outputs if o.target.startswith(SUMMED) and o.value is not None]
    return PartProgram(
        index=index,
        first=_end(whole, first, (j.wanted for j in joined)) if first is not None else None,
        joined=tuple(joined),
        weights={
            name: _weights(whole, layouts, part, weights) for name, weights in hoisted.weights.items()
        },
        main=main,
        held={name: without_micro(layout, mesh) for name, layout in main.parameters.items()},
        sums={name: g.layout for name, g in gradients.items() if g is not None},
        summed=tuple(map(piece, summed)),
        after=_after(whole, cut.after[index]),
    )  # fmt: skip


def _after(whole: Whole, graph: Graph | None) -> Program | None:
    """From sums to gradients as the plan stores the parameters."""
    if graph is None:
        return None
    names = {i.value.name: i.target for i in whole.captured.top.inputs}
    return _end(whole, graph, (whole.device.storage(names[o.target]) for o in graph.outputs))


def _program(layouts: PartLayouts) -> Program:
    """A part's graph in micro-batches."""
    halves = in_halves(layouts.plan.schedule.name)
    program = replace(lower_by(layouts.captured, layouts, late_nodes if halves else None), sums=True)
    check_names(program)
    if layouts.plan.schedule.micro_batches > 1:
        _refuse_joins(program)
    return program


def _weights(whole: Whole, part: PartLayouts, captured: CapturedGraph, weights: Weights) -> WeightsProgram:
    """What makes the weights of a graph as its ops read them."""
    graph = weights.graph
    own = [i for i in graph.inputs if i.kind is InputKind.PARAMETER]
    top = graph.name == captured.top.name
    alone = replace(captured, top=graph, blocks=())
    names = {i.value.name: i.target for i in own} if top else part.parameter_names(graph.name)
    made = [o.value for o in graph.outputs if o.value is not None]
    layouts = _WeightLayouts(
        alone, whole.plan, mesh_of(whole.plan), whole=whole, names=names,
        outputs=tuple(part.weight(graph, value, f"{MADE}{value}") for value in made),
    )  # fmt: skip
    program = lower_by(alone, layouts)
    check_names(program)
    calls = {}
    given_as = {i.value.name: i.target for i in captured.top.inputs}
    for instance, targets in weights.targets.items():
        if top:
            rows = tuple(i.target for i in own)
        else:
            call = next(n for n in captured.top.nodes if n.block is not None and n.block.instance == instance)
            inner = own_inputs(captured.block(graph.name).graph)
            given = dict(zip((i.target for i in inner), call.refs, strict=False))
            rows = tuple(given_as[given[i.target]] for i in own)
        calls[instance] = (rows, targets)
    return WeightsProgram(program=program, calls=calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OnceLayouts(PlanLayouts):
    """Of what runs once a step, on the devices' own mesh. `outputs`: the layouts of what it gives, in order."""

    whole: Whole
    outputs: tuple[Layout, ...]

    def strategy(self, graph: Graph, node: Node) -> Strategy:
        """What the plan chose for an op."""
        return PlanLayouts.strategy(self, replace(graph, name=self.whole.way(graph, node)), node)

    def later(self, graph: Graph) -> None:
        """Nothing is kept: there is no backward."""

    def output(self, position: int) -> Layout:
        """As whoever reads it wants it."""
        return self.outputs[position]


@dataclass(frozen=True, slots=True, kw_only=True)
class _WeightLayouts(_OnceLayouts):
    """Of what is made of stored weights. `names`: of the parameters, by value."""

    names: Mapping[str, str]

    def arrivals(self, graph: Graph) -> dict[str, Layout]:
        """As stored."""
        return {i.value.name: self.storage(self.names[i.value.name]) for i in graph.inputs}


def _captured(whole: Whole, graph: Graph) -> CapturedGraph:
    """A part as a model of its own: blocks by the ways in which it runs them."""
    blocks: dict[str, list[str]] = {}
    of: dict[str, str] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.block is not None:
            way = whole.ways.blocks[node.block.instance]
            of[way] = node.block.key
            if node.op == "autopar.block":
                blocks.setdefault(way, []).append(node.block.instance)
            node = replace(node, block=BlockCall(key=way, instance=node.block.instance))
        nodes.append(node)
    used = {i.target for i in graph.inputs if i.kind is InputKind.PARAMETER}
    captured = whole.captured
    return replace(
        captured,
        top=replace(graph, nodes=tuple(nodes)),
        blocks=tuple(
            Block(key=way, graph=replace(captured.block(of[way]).graph, name=way), instances=tuple(instances))
            for way, instances in blocks.items()
        ),
        parameters=tuple(p for p in captured.parameters if p.name in used),
    )


def _refuse_joins(program: Program) -> None:
    """PlanError for a step between micro-batches inside a part: the plan gathers what others have yet to make."""
    for function in program.functions:
        for convert in function.converts():
            for part in convert.steps:
                if part.step.axis == MICRO and part.step.collective is not Collective.SLICE:
                    raise PlanError(
                        f"{convert.before.value} ({convert.place.key or 'an output'}) is read joined over "
                        f"micro-batches, {part.step}, which are not there at once: search again, or with "
                        f"--micro-batches 1"
                    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _EndLayouts(_OnceLayouts):
    """Of what runs before or after all micro-batches: as the plan has it; what is collected, as it was made."""

    def arrivals(self, graph: Graph) -> dict[str, Layout]:
        """Of each input; of what was collected, the layout in which it was made."""
        own = tuple(i for i in graph.inputs if not i.target.startswith(RECEIVED))
        found = PlanLayouts.arrivals(self, replace(graph, inputs=own))
        top = self.whole.captured.top
        for given in graph.inputs:
            if given.target.startswith(RECEIVED):
                found[given.value.name] = without_micro(self.whole.made(top, given.value.name), self.mesh)
        return found

    def _parameter_names(self, graph: Graph) -> dict[str, str]:
        return {i.value.name: i.target for i in graph.inputs if i.kind is InputKind.PARAMETER}


def emit_stages(program: StagedProgram) -> StagedSource:
    """The modules' text."""
    return StagedSource(
        first={p.index: emit(p.first) for p in program.parts if p.first is not None},
        weights=tuple({name: emit(w.program) for name, w in p.weights.items()} for p in program.parts),
        main=tuple(emit(p.main) for p in program.parts),
        after={p.index: emit(p.after) for p in program.parts if p.after is not None},
        last=emit(program.last),
    )


def _end(whole: Whole, graph: Graph, outputs: Iterable[Layout]) -> Program:
    part = _captured(whole, graph)
    layouts = _EndLayouts(part, whole.plan, mesh_of(whole.plan), whole=whole, outputs=tuple(outputs))
    program = lower_by(part, layouts)
    check_names(program)
    return program


def _outputs(whole: Whole) -> list[Layout]:
    """How the plan gives the model's outputs."""
    planned = whole.plan.outputs.get(whole.ways.last, {})
    return [
        whole.device.parse(planned.get(str(p), "whole"), f"output {p}")
        for p, out in enumerate(whole.captured.top.outputs)
        if out.kind is OutputKind.OUTPUT
    ]

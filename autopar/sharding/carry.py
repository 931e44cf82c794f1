"""A plan with stages or micro-batches for the same model called otherwise: what it chose, op by op.

A graph of another batch, sequence length or mode has the ops of the plan's, but for a few. Each op takes the layouts
that the plan has under its key, axis by axis, where a rule of the op allows them and all dims that they cut are cut in
the same proportions; else the rule that takes most of what it reads as it is made. So numbers stay one device's
whatever the graph is, and at worst something is converted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from autopar.errors import PlanError
from autopar.ir.graph import Block, CapturedGraph, Graph, InputKind, Node, OutputKind, Phase, tensor_keys
from autopar.ir.layout import Kind, Layout, Placement, R, fits, parse_layout
from autopar.ir.mesh import Mesh
from autopar.ir.options import TOKEN_AXES
from autopar.ir.plan import AGAIN, Plan, PlanStage, PlanStrategy, mesh_of
from autopar.ir.reshard import plan_reshard
from autopar.ir.strategy import Rule
from autopar.sharding.build import Survey, survey_model
from autopar.sharding.dtensor_rules import RuleCache
from autopar.sharding.expand import cuts_alike

DATA = "dp"
GATHERED, NEVER = 100, 10_000
CONVERTED = {
    (made, wanted): NEVER if wanted is Kind.PARTIAL else cost
    for made, cost in ((Kind.REPLICATE, 1), (Kind.PARTIAL, 10), (Kind.SHARD, GATHERED))
    for wanted in Kind
}
"""What taking an argument otherwise than it is made counts: cut here, summed, gathered (which in micro-batches would
wait for all of them), or impossible."""


def cuts_of(plan: Plan, captured: CapturedGraph, cache: RuleCache) -> Iterator[tuple[int, bool]]:
    """(micro-batches, whether the batch is cut at all) that a plan may take this batch by, the best first.

    So many that none has more rows than the plan's, but no more than the rank with the fewest rows has: nothing runs
    an empty one. A batch of fewer rows than ranks, or one that can't be cut so, is computed whole by each rank.
    """
    rows = _rows(plan, captured, survey_model(captured, cache))
    if rows is not None:
        planned, given = rows
        ranks, times = plan.mesh.axes.get(DATA, 1), plan.schedule.micro_batches
        largest = -(-given // ranks)
        smallest = given - largest * ((given - 1) // largest)
        each = -(-planned // (ranks * times))
        most = -(-largest // each) if times > 1 else 1
        for count in range(most, 0, -1):
            if _filled(largest, count) and _filled(smallest, count):
                yield count, True
    yield 1, False


def _filled(rows: int, pieces: int) -> bool:
    """True if no piece of so many rows is empty."""
    return -(-rows // pieces) * (pieces - 1) < rows


def _rows(plan: Plan, captured: CapturedGraph, survey: Survey) -> tuple[int, int] | None:
    """(rows of the plan's batch, of this one); None where no input has a batch."""
    placement = survey.traces[DATA][captured.top.name].placement
    known = plan.request.inputs if plan.request is not None else {}
    for own in captured.top.inputs:
        at = placement.get(own.value.name, R)
        if own.kind is InputKind.INPUT and at.kind is Kind.SHARD and own.target in known:
            return known[own.target].shape[at.dim], own.value.meta.shape[at.dim]
    return None


def carried(plan: Plan, captured: CapturedGraph, micro_batches: int, cut: bool, cache: RuleCache) -> Plan:
    """The plan for this graph. `cut`: the batch is cut over data-parallel ranks and micro-batches, else whole on each.

    What it predicts is left as it was.

    Raises:
        PlanError: the graph has other blocks, or a cut of the batch that the plan made can't be made here.
    """
    keys = _block_keys(plan, captured)
    carrier = _Carrier(plan, captured, survey_model(captured, cache), micro_batches, cut)
    ways = {way: _renamed(way, keys) for way in plan.strategies}
    blocks = {b.key: b.graph for b in captured.blocks} | {captured.top.name: captured.top}
    order = sorted(ways.items(), key=lambda pair: pair[1] == captured.top.name)  # the top reads what blocks make
    found = {new: carrier.way(old, new, blocks[new.partition("#")[0]]) for old, new in order}
    few = len([o for o in captured.top.outputs if o.kind is OutputKind.OUTPUT])
    same = all(len(plan.outputs.get(way, {})) == few for way in plan.ends.values())
    return replace(
        plan,
        model=replace(plan.model, graph_hash=captured.hash),
        schedule=replace(plan.schedule, micro_batches=micro_batches),
        stages=[_renamed_stage(stage, keys) for stage in plan.stages],
        strategies={way: work.rows for way, work in found.items()},
        inputs={ways[w]: carrier.inputs(found[ways[w]], texts) for w, texts in plan.inputs.items() if w in ways},
        outputs={
            ways[w]: carrier.outputs(found[ways[w]], texts)
            for w, texts in plan.outputs.items()
            if w in ways and (same or found[ways[w]].graph is not captured.top)
        },
        later={ways[w]: carrier.later(found[ways[w]], texts) for w, texts in plan.later.items() if w in ways},
        held={ways[w]: texts for w, texts in plan.held.items() if w in ways},
        conversions=[],
    )  # fmt: skip


def _renamed(way: str, keys: Mapping[str, str]) -> str:
    graph, mark, number = way.partition("#")
    return keys.get(graph, graph) + mark + number


def _renamed_stage(stage: PlanStage, keys: Mapping[str, str]) -> PlanStage:
    return replace(stage, columns={_renamed(way, keys): n for way, n in stage.columns.items()})


def _block_keys(plan: Plan, captured: CapturedGraph) -> dict[str, str]:
    """Name of each of the plan's blocks -> the block here that as many calls of each stage run, and that is most alike.

    PlanError where there are other blocks.
    """
    held = _calls_of_stages(plan, captured)
    left = {b.key: b for b in captured.blocks}
    found: dict[str, str] = {}
    for way in plan.strategies:
        old = way.partition("#")[0]
        if old in found or old == captured.top.name:
            continue
        counts = [
            sum(n for w, n in stage.columns.items() if w.partition("#")[0] == old) for stage in plan.stages
        ]  # fmt: skip
        alike = [b for key, b in left.items() if held[key] == counts]
        if not alike:
            raise PlanError(
                f"plan for {plan.model.name}: called so the model has other blocks than {old}; search again"
            )
        found[old] = max(alike, key=lambda b: _shared_keys(b, plan.strategies[way])).key
        del left[found[old]]
    if left:
        raise PlanError(f"plan for {plan.model.name}: it knows no block {', '.join(left)}; search again")
    return found


def _shared_keys(block: Block, rows: Mapping[str, PlanStrategy]) -> int:
    mine = {n.key for n in block.graph.nodes}
    return len(mine & set(rows)) - len(mine ^ set(rows))


def _calls_of_stages(plan: Plan, captured: CapturedGraph) -> dict[str, list[int]]:
    """Key of a block -> how many of its calls each stage runs."""
    chunks, stages = plan.schedule.chunks, plan.mesh.pipeline
    each = [sum(count for _, count in stage.blocks) // chunks for stage in plan.stages]
    homes = iter([stage for _ in range(chunks) for stage, count in enumerate(each) for _ in range(count)])
    found = {b.key: [0] * stages for b in captured.blocks}
    for node in captured.top.nodes:
        if node.block is not None and node.phase is Phase.FORWARD:
            stage = next(homes, None)
            if stage is None:
                raise PlanError(f"plan for {plan.model.name}: called so the model has more blocks; search again")
            found[node.block.key][stage] += 1
    return found


@dataclass
class _Way:
    """One way to run a graph. `made`: of each value, by mesh axis; `lasting`: values that parameters alone decide."""

    graph: Graph
    lasting: frozenset[str] = frozenset()
    rows: dict[str, PlanStrategy] = field(default_factory=dict)
    made: dict[str, tuple[Placement, ...]] = field(default_factory=dict)


@dataclass
class _Carrier:
    plan: Plan
    captured: CapturedGraph
    survey: Survey
    micro_batches: int
    cut: bool
    done: dict[str, _Way] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mesh: Mesh = mesh_of(self.plan)
        data = {DATA: self.micro_batches}
        self.sizes = [
            () if a.name in TOKEN_AXES and not self.cut else tuple(n for n in (a.size, data.get(a.name, 1)) if n > 1)
            for a in self.mesh.axes
        ]

    def way(self, old: str, new: str, graph: Graph) -> _Way:
        """The strategies of one way of the plan, on this graph."""
        work = self.done[new] = _Way(graph, _lasting(graph))
        texts = self.plan.inputs.get(old, {})
        for own in graph.inputs:
            text = texts.get(f"{own.kind.value}:{own.target}", "whole")
            work.made[own.value.name] = self._activation(work, own.value.name, parse_layout(text, self.mesh)).placements
        for node in graph.nodes:
            if node.block is not None:
                self._called(work, node)
            else:
                self._node(work, node, self.plan.strategies[old].get(node.key))
        return work

    def _called(self, work: _Way, node: Node) -> None:
        """What a block's call gives: as the block makes it."""
        assert node.block is not None
        inner = self.done[node.block.key]
        kind = OutputKind.OUTPUT if node.phase is Phase.FORWARD else OutputKind.GRADIENT
        given = [o.value for o in inner.graph.outputs if o.kind is kind]
        for out, value in zip(node.outputs, given, strict=True):
            if out is not None and value is not None:
                work.made[out.name] = inner.made[value]

    def _node(self, work: _Way, node: Node, planned: PlanStrategy | None) -> None:
        known = self._planned(node, planned)
        rules = [self._rule(work, node, axis, known[axis] if known else None) for axis in range(len(self.mesh.axes))]
        outputs = ["" if o is None else self._text(work, o.name, [r.outputs[p] for r in rules])
                   for p, o in enumerate(node.outputs)]  # fmt: skip
        work.rows[node.key] = PlanStrategy(
            inputs=[str(self._layout([r.inputs[p] for r in rules])) for p in range(len(node.refs))], outputs=outputs,
            tags=[r.tag for r in rules], us=planned.us if planned is not None else 0.0,
            source=planned.source if planned is not None else "",
        )  # fmt: skip

    def _text(self, work: _Way, name: str, placements: list[Placement | None]) -> str:
        layout = self._layout(placements)
        work.made[name] = layout.placements
        return str(layout)

    def _layout(self, placements: list[Placement | None]) -> Layout:
        return Layout(self.mesh.names, tuple(R if p is None else p for p in placements))

    def _planned(self, node: Node, text: PlanStrategy | None) -> list[Rule] | None:
        """What the plan says of an op, as a rule on each axis; None where that can't be of this op."""
        if text is None or len(text.inputs) != len(node.refs) or len(text.outputs) != len(node.outputs):
            return None
        inputs = [parse_layout(t, self.mesh) for t in text.inputs]
        outputs = [parse_layout(t, self.mesh) if t else None for t in text.outputs]
        tags = text.tags or [""] * len(self.mesh.axes)
        return [
            Rule(tuple(None if o is None else o.placements[a] for o in outputs), tuple(i.placements[a] for i in inputs),
                 tags[a])
            for a in range(len(self.mesh.axes))
        ]  # fmt: skip

    def _rule(self, work: _Way, node: Node, axis: int, planned: Rule | None) -> Rule:
        """The plan's rule on one axis, or one that is good here."""
        rules = self.survey.rules[work.graph.name, node.name]
        name, whole = self.mesh.axes[axis].name, rules[0]
        lasting = all(o is None or o.name in work.lasting for o in node.outputs)
        if lasting:
            return planned if planned in rules else whole
        if not self.sizes[axis]:
            return whole
        good = [r for r in rules if self._cuts_well(work, node, r, axis)]
        if planned in rules and planned not in good and name in TOKEN_AXES:
            raise PlanError(
                f"plan for {self.plan.model.name}: {node.key} can't be cut over {name} with this batch as with that of "
                "the plan"
            )
        if planned in good and self._unlike(work, node, planned, axis)[0] < GATHERED:
            return planned
        return min(good or [whole], key=lambda r: (*self._unlike(work, node, r, axis), r != planned))

    def _cuts_well(self, work: _Way, node: Node, rule: Rule, axis: int) -> bool:
        metas = self.survey.weights[work.graph.name].metas
        outputs = tuple(None if o is None else o.meta for o in node.outputs)
        pieces = self.survey.pieces[node.op]
        return cuts_alike(rule, tuple(metas[r] for r in node.refs), outputs, self.sizes[axis], pieces)

    def _unlike(self, work: _Way, node: Node, rule: Rule, axis: int) -> tuple[int, int]:
        """(what must be converted to run by a rule, results that are not cut)."""
        cost = 0
        for ref, wanted in zip(node.refs, rule.inputs, strict=True):
            made = wanted if ref in work.lasting else work.made[ref][axis]
            cost += CONVERTED[made.kind, wanted.kind] if made != wanted else 0
        return cost, sum(o is not None and o.kind is not Kind.SHARD for o in rule.outputs)

    def _activation(self, work: _Way, name: str, layout: Layout) -> Layout:
        """A layout of the plan as it is here: whole on an axis that cuts nothing."""
        if name in work.lasting:
            return layout
        pairs = zip(layout.placements, self.sizes, strict=True)
        return Layout(layout.axes, tuple(p if sizes else R for p, sizes in pairs))

    def inputs(self, work: _Way, texts: Mapping[str, str]) -> dict[str, str]:
        """Layouts of a graph's inputs."""
        names = {f"{i.kind.value}:{i.target}": i.value for i in work.graph.inputs}
        found = {}
        for key, text in texts.items():
            if key in names:
                layout = self._activation(work, names[key].name, parse_layout(text, self.mesh))
                found[key] = str(
                    layout if fits(layout, names[key].meta.shape) else self._layout([None] * len(layout.axes))
                )
        return found

    def outputs(self, work: _Way, texts: Mapping[str, str]) -> dict[str, str]:
        """Layouts of what a graph gives; whole where a planned one can't be."""
        values = work.graph.values()
        found = {}
        for position, out in enumerate(work.graph.outputs):
            text = texts.get(str(position))
            if text is not None and out.value is not None:
                layout = self._activation(work, out.value, parse_layout(text, self.mesh))
                if fits(layout, values[out.value].meta.shape):
                    found[str(position)] = str(layout)
        return found

    def later(self, work: _Way, texts: Mapping[str, str]) -> dict[str, str]:
        """What waits for the backward: as planned, where the value is made as it was."""
        values = {key: name for name, key in tensor_keys(work.graph).items()}
        found = {}
        for key, text in texts.items():
            if key in values:
                found[key] = text if text == AGAIN else self._kept(work, values[key], parse_layout(text, self.mesh))
        return found

    def _kept(self, work: _Way, name: str, planned: Layout) -> str:
        """The layout that a value waits in: the planned one, where it can be had of what is made."""
        made = Layout(self.mesh.names, work.made[name]) if name in work.made else planned
        layout = self._activation(work, name, planned)
        return str(layout if plan_reshard(made, layout) is not None else made)


def _lasting(graph: Graph) -> frozenset[str]:
    """Values that parameters alone decide."""
    found = {i.value.name for i in graph.inputs if i.kind is InputKind.PARAMETER}
    for node in graph.nodes:
        if node.block is None and node.refs and all(r in found for r in node.refs):
            found |= {o.name for o in node.outputs if o is not None}
    return frozenset(found)

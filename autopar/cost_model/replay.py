"""A lowered program as tasks: what is priced is what is emitted, op by op and collective by collective.

Emitted collectives block: each waits for what stands before it, and what stands after it waits for it. So each list is
a chain, a block's list is run once for all of its calls (`Section`), and the sum is the plan's predicted step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from autopar import ops
from autopar.cost_model.collectives import step_bytes
from autopar.cost_model.context import Prices
from autopar.cost_model.op_kind import op_kind
from autopar.errors import PlanError
from autopar.ir.ends import before_blocks
from autopar.ir.graph import CapturedGraph, Node, Phase, TensorMeta
from autopar.ir.layout import Layout, local_shape, parse_layout
from autopar.ir.plan import Plan
from autopar.ir.program import CallBlock, Compute, Convert, Free, Function, Keep, Program
from autopar.ir.reshard import Collective
from autopar.ir.strategy import Strategy
from autopar.ir.work import COMPUTE, Section, StageWork, Task, Tasks


def replay(captured: CapturedGraph, program: Program, plan: Plan, prices: Prices, state_bytes: int) -> StageWork:
    """The work of a step of one rank. `state_bytes`: that the optimizer keeps for each parameter.

    Raises PlanError where the plan lacks an op of the program.
    """
    replayed = _Replay(captured, program, plan, prices)
    top = captured.top.name
    return StageWork(
        forward=replayed.function(program.function(top, Phase.FORWARD)),
        backward=replayed.function(program.function(top, Phase.BACKWARD)),
        end=chain(_updates(captured, program, prices, state_bytes)),
    )


def replay_part(captured: CapturedGraph, program: Program, plan: Plan, prices: Prices) -> StageWork:
    """The work of one part of a plan with stages, one micro-batch of it, on its program's own mesh."""
    replayed = _Replay(captured, program, plan, prices)
    top = captured.top.name
    backward = replayed.function(program.function(top, Phase.BACKWARD))
    late = replayed.function(program.function(top, Phase.BACKWARD, weights=True)) if program.halves else ()
    return StageWork(
        forward=replayed.function(program.function(top, Phase.FORWARD)), backward=backward, backward_input=backward,
        backward_weight=late,
    )  # fmt: skip


def replay_once(captured: CapturedGraph, program: Program, plan: Plan, prices: Prices, times: int = 1) -> Tasks:
    """A program without a backward, that a step runs so many times."""
    found = _Replay(captured, program, plan, prices)
    whole = next(f for f in program.functions if not f.block and f.phase is Phase.FORWARD)
    return chain(Section(name=program.model_name, tasks=found.function(whole)) for _ in range(times))


def _updates(captured: CapturedGraph, program: Program, prices: Prices, state_bytes: int) -> Iterator[Task]:
    """The optimizer's update of each trained parameter."""
    for parameter in captured.parameters:
        layout = program.parameters.get(parameter.name)
        if layout is not None and parameter.requires_grad:
            piece = TensorMeta(local_shape(parameter.meta.shape, layout, program.mesh), parameter.meta.dtype)
            us = prices.optimizer_us(piece.numel, piece.dtype, state_bytes)
            yield Task(name=parameter.name, kind="optimizer", us=us, bytes=piece.nbytes)


def chain(tasks: Iterable[Task | Section]) -> Tasks:
    """Tasks of which each waits for the one before."""
    found: list[Task | Section] = []
    for task in tasks:
        if isinstance(task, Task) and found:
            task = replace(task, after=(len(found) - 1,))
        found.append(task)
    return tuple(found)


@dataclass
class _Replay:
    """Prices steps. `lists`: of each block's function, by name."""

    captured: CapturedGraph
    program: Program
    plan: Plan
    prices: Prices
    lists: dict[str, Tasks] = field(default_factory=dict)
    nodes: dict[str, dict[str, Node]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.before = before_blocks(self.captured.top.nodes)

    def function(self, function: Function) -> Tasks:
        """The list of one function."""
        return chain(self._steps(function))

    def _steps(self, function: Function) -> Iterator[Task | Section]:
        for step in function.steps:
            match step:
                case Compute():
                    yield from self._compute(function.graph, step)
                case Convert():
                    yield from self._convert(function.graph, step)
                case Keep():
                    nbytes = step.local.meta.nbytes
                    yield Task(
                        name=f"{step.place.module_path} {step.local.value} kept".strip(), kind="copy",
                        us=self.prices.copy_us(nbytes), bytes=nbytes,
                    )  # fmt: skip
                case CallBlock():
                    yield Section(name=step.place.module_path, tasks=self._block(step))
                case Free():
                    pass

    def _block(self, step: CallBlock) -> Tasks:
        if step.function not in self.lists:
            callee = self.program.function(step.block, step.phase, step.weights)
            self.lists[step.function] = self.function(callee)
        return self.lists[step.function]

    def _compute(self, graph: str, step: Compute) -> Iterator[Task]:
        node = self._node(graph, step.place.key)
        strategy = self._strategy(graph, node)
        inputs = tuple(local.meta for local in step.inputs)
        outputs = tuple(
            None
            if out is None or layout is None
            else local.meta
            if local is not None
            else self._piece(out.meta, layout)
            for out, layout, local in zip(node.outputs, strategy.outputs, step.outputs, strict=True)
        )
        us, inner_us = self.prices.op_us(node, strategy, inputs, outputs)
        name = f"{node.module_path} {node.op}".strip()
        times = sum(ops.rounds(node, strategy, self.program.mesh, inputs, outputs)) or 1
        yield Task(
            name=name, kind=op_kind(node.op), us=us, flops=ops.flops(node, inputs, outputs) * times,
            bytes=ops.moved_bytes(node, inputs, outputs) * times,
        )  # fmt: skip
        if inner_us:
            parts = ops.inner_collectives(node, strategy, self.program.mesh, inputs, outputs)
            kind, axis, _ = parts[0]
            sent = sum(size for _, _, size in parts)
            yield Task(name=name, kind=kind_of(kind), us=inner_us, stream=f"comm:{axis}", bytes=sent)

    def _convert(self, graph: str, step: Convert) -> Iterator[Task]:
        """One task for each collective; a slice is a copy."""
        meta = self.program.metas[graph][step.before.value]
        for part in step.steps:
            us = self.prices.reshard_us(meta, part.step.before, part.step.after, part.view)
            sliced = part.step.collective is Collective.SLICE
            yield Task(
                name=f"{step.place.module_path} {step.before.value} {part.step}".strip(),
                kind=kind_of(part.step.collective), us=us, stream=COMPUTE if sliced else f"comm:{part.step.axis}",
                bytes=int(step_bytes(meta, part.step, self.program.mesh)),
            )  # fmt: skip

    def _piece(self, meta: TensorMeta, layout: Layout) -> TensorMeta:
        return TensorMeta(local_shape(meta.shape, layout, self.program.mesh, meta.units), meta.dtype)

    def _node(self, graph: str, key: str) -> Node:
        if graph not in self.nodes:
            found = next(g for g in self.captured.graphs if g.name == graph.partition("#")[0])
            self.nodes[graph] = {n.key: n for n in found.nodes}
        return self.nodes[graph][key]

    def _way(self, graph: str, node: Node) -> str:
        """Which of a plan's ways says how a node runs."""
        if graph != self.captured.top.name or not self.plan.ends:
            return graph
        return self.plan.ends["first" if node.name in self.before else "last"]

    def _strategy(self, graph: str, node: Node) -> Strategy:
        text = self.plan.strategies.get(self._way(graph, node), {}).get(node.key)
        if text is None:
            raise PlanError(
                f"plan for {self.plan.model.name}: no strategy for {node.key} of graph {graph}; search again"
            )
        mesh = self.program.mesh
        return Strategy(
            inputs=tuple(parse_layout(t, mesh) for t in text.inputs),
            outputs=tuple(parse_layout(t, mesh) if t else None for t in text.outputs),
            tags=tuple(text.tags),
        )


def kind_of(collective: Collective) -> str:
    """As timelines call it: "all-reduce", ..., "copy" for a slice."""
    return "copy" if collective is Collective.SLICE else collective.value.replace("_", "-")

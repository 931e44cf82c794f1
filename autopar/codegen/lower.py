"""Graph and plan -> Program: local ops, and the collectives between a layout that is made and one that is wanted.

A value made in layout p and wanted in q is converted once, from p, at its first use; later uses share the version. The
backward reads the versions that the forward made and saved; a version that only the backward wants is converted there
from p. Where the plan says of a value what waits for the backward (`Plan.later`), that version is made in the forward,
and others are converted from it; or its op runs once more in the backward, where its value is first asked for. A
backward in halves is two functions: the second finds what the first leaves as the backward finds what the forward does.
Parameters arrive in storage layout in both phases and are converted in each apart (gathered again in the backward). A
parameter's gradient leaves in its storage layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.codegen.layouts import PlanLayouts, block_parameters, own_inputs
from autopar.codegen.scope import Names, Scope, with_frees
from autopar.codegen.storages import Holders, in_own_storage
from autopar.codegen.tables import stem
from autopar.errors import CompilerError
from autopar.ir.graph import CapturedGraph, Graph, InputKind, Node, OutputKind, Phase, Ref
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan, mesh_of, refuse_stages
from autopar.ir.program import CallBlock, Compute, Function, Local, Place, Program
from autopar.ops import local_call

OUTSIDE = Place(key="", module_path="", source="")
"""Of conversions that no op asks for: outputs and gradients."""


def lower(captured: CapturedGraph, plan: Plan, mesh: Mesh | None = None) -> Program:
    """What each rank executes under `plan`.

    Raises:
        PlanError: the plan has no entry for an op or a parameter, or a layout that is none.
        CompilerError: a layout that doesn't divide its tensor, or a conversion that doesn't exist.
    """
    refuse_stages(plan, "runs")
    return lower_by(captured, PlanLayouts(captured, plan, mesh or mesh_of(plan)))


Late = Callable[[Graph], frozenset[str]]
"""Names of a graph's nodes that the second half of its backward runs. A block's backward is in both halves."""


def lower_by(captured: CapturedGraph, layouts: PlanLayouts, late: Late | None = None) -> Program:
    """`lower` by these layouts, on their mesh. `late`: with backwards in halves."""
    mesh = layouts.mesh
    context = _Context(captured, layouts, block_parameters(captured), late)
    for block in captured.blocks:
        context.lowered[block.key] = _Lowering(block.graph, block.key, context).functions()
    top = captured.top
    lowered = _Lowering(top, "", context).functions()
    arrivals = context.layouts.arrivals(top)
    by_kind = {
        kind: {i.target: arrivals[i.value.name] for i in top.inputs if i.kind is kind} for kind in InputKind
    }  # fmt: skip
    outputs = {o.target: context.layouts.output(p) for p, o in enumerate(top.outputs) if o.kind is OutputKind.OUTPUT}
    return Program(
        model_name=captured.model_name,
        graph_hash=captured.hash,
        mesh=mesh,
        functions=tuple(f for found in (*context.lowered.values(), lowered) for f in found),
        calls={b.key: _instances(captured, b.key) for b in captured.blocks},
        block_parameters=context.parameters_of,
        parameters=by_kind[InputKind.PARAMETER],
        buffers=by_kind[InputKind.BUFFER],
        constants=by_kind[InputKind.CONSTANT],
        inputs=by_kind[InputKind.INPUT],
        outputs=outputs,
        tangents=by_kind[InputKind.TANGENT],
        updates=tuple(o.target for o in top.outputs if o.kind is OutputKind.BUFFER_UPDATE),
        differentiated=_differentiated(top),
        metas={g.name: {name: v.meta for name, v in g.values().items()} for g in captured.graphs},
        halves=late is not None,
    )


def _differentiated(top: Graph) -> tuple[str, ...]:
    """Inputs of the model whose gradients the backward gives, in order."""
    names = {i.value.name: i.target for i in top.inputs if i.kind is InputKind.INPUT}
    return tuple(names[o.target] for o in top.outputs if o.kind is OutputKind.GRADIENT and o.target in names)


def _instances(captured: CapturedGraph, key: str) -> tuple[str, ...]:
    calls = (n.block for n in captured.top.nodes if n.op == "autopar.block" and n.block is not None)
    return tuple(c.instance for c in calls if c.key == key)


@dataclass(frozen=True, slots=True)
class _Context:
    captured: CapturedGraph
    layouts: PlanLayouts
    parameters_of: dict[str, tuple[tuple[int, ...], ...]]
    late: Late | None
    lowered: dict[str, tuple[Function, ...]] = field(default_factory=dict)


class _Lowering:
    """Lowers one joint graph into its forward and its backward, or the halves of its backward."""

    def __init__(self, graph: Graph, block: str, context: _Context) -> None:
        self.graph = graph
        self.block = block
        self.context = context
        self.arrivals = context.layouts.arrivals(graph)
        self.names = Names.of(graph, context.layouts.mesh)
        self.forward = Scope(self.names)
        self.later = context.layouts.later(graph) or {}
        self.makers = {o.name: n for n in graph.nodes if n.phase is Phase.FORWARD for o in n.outputs if o is not None}
        self.backward = self._after(self.forward)
        self.weights = self.backward if context.late is None else self._after(self.backward)
        self.late = frozenset[str]() if context.late is None else context.late(graph)
        self.calls: dict[tuple[str, tuple[Any, ...]], list[int]] = {}
        self.called: dict[str, int] = {}
        self.gradients: dict[str, list[Layout]] = {}
        kinds = {i.value.name: i.kind for i in graph.inputs}
        for out in graph.outputs:
            if out.kind is OutputKind.GRADIENT and out.value and kinds.get(out.target) is InputKind.PARAMETER:
                layout = context.layouts.gradient(graph, out.target, out.value)
                self.gradients.setdefault(out.value, []).append(layout)

    def _after(self, earlier: Scope) -> Scope:
        """The scope of what runs after another one, in the backward."""
        scope = Scope(self.names, earlier=earlier, later=self.later)
        scope.again = lambda value: self._again(value, scope)
        return scope

    @property
    def halves(self) -> bool:
        """True of a backward in halves."""
        return self.weights is not self.backward

    def functions(self) -> tuple[Function, ...]:
        """Forward, backward or its first half, and its second."""
        arguments = {i.value.name: self.forward.make(i.value.name, self.arrivals[i.value.name])
                     for i in own_inputs(self.graph)}  # fmt: skip
        for own in own_inputs(self.graph):
            self._keep(own.value.name, OUTSIDE)
        self._run(Phase.FORWARD)
        outputs, updates = self._leave_forward()
        for own in self.graph.inputs:
            if own.kind in (InputKind.PARAMETER, InputKind.TANGENT):
                arguments[own.value.name] = self.backward.make(own.value.name, self.arrivals[own.value.name])
            if self.halves and own.kind is InputKind.PARAMETER:
                self.weights.make(own.value.name, self.arrivals[own.value.name])
        self._run(Phase.BACKWARD)
        others, gradients = self._leave_backward()
        saved = tuple(self.backward.saved.values())
        forward = self._forward_function(arguments, saved, outputs, updates)
        if not self.halves:
            return forward, self._backward_function(arguments, self.backward, others, gradients)
        early = tuple(o if o is not None and not self._is_late(o.value) else None for o in others)
        later = tuple(o if o is not None and self._is_late(o.value) else None for o in others)
        first = self._backward_function(arguments, self.backward, early, ())
        return forward, first, self._backward_function(arguments, self.weights, later, gradients)

    def _is_late(self, value: str) -> bool:
        """True of what the second half makes."""
        return self.halves and value in self.weights.made and value not in self.backward.made

    def _run(self, phase: Phase) -> None:
        for node in self.graph.nodes:
            if node.phase is phase:
                scope = self.forward if phase is Phase.FORWARD else self.backward
                if node.name in self.late:
                    scope = self.weights
                step = self._compute(node, scope) if node.block is None else self._call(node, scope)
                scope.steps.append(step)
                if phase is Phase.BACKWARD:
                    self._reduce_gradients(step, scope)
                else:
                    for out in node.outputs:
                        if out is not None:
                            self._keep(out.name, step.place)

    def _keep(self, value: str, place: Place) -> None:
        """In the forward: the version that waits for the backward, made where the value is."""
        kept = self.later.get(value)
        if kept is not None:
            self.forward.fetch(value, kept, place)

    def _again(self, value: str, scope: Scope) -> None:
        """In the backward: run the op that makes `value` once more, for those of its outputs that are not kept."""
        step = self._compute(self.makers[value], scope)
        scope.steps.append(step)

    def _reduce_gradients(self, step: Compute | CallBlock, scope: Scope) -> None:
        """A parameter's gradient goes into storage layout as soon as it is made: the larger form needn't wait."""
        for out in step.outputs:
            if out is not None and out.value in self.gradients:
                for storage in self.gradients[out.value]:
                    scope.fetch(out.value, storage, step.place)

    def _compute(self, node: Node, scope: Scope) -> Compute:
        place = Place(key=node.key, module_path=node.module_path, source=node.source)
        strategy = self.context.layouts.strategy(self.graph, node)
        inputs = tuple(scope.fetch(r, w, place) for r, w in zip(node.refs, strategy.inputs, strict=True))
        outputs = tuple(
            self._output(node, scope, value.name, layout)
            if value is not None and (scope is self.forward or self._is_made_here(node, value.name))
            else None
            for value, layout in zip(node.outputs, strategy.outputs, strict=True)
        )
        names = iter(inputs)
        args, kwargs = _renamed((node.args, node.kwargs), names)
        call = local_call(
            replace(node, args=args, kwargs=kwargs),
            strategy,
            self.context.layouts.mesh,
            tuple(i.meta for i in inputs),
            tuple(None if o is None else o.meta for o in outputs),
            tuple(self.names.metas[r] for r in node.refs),
        )
        return Compute(
            function=call.function,
            args=tuple(call.args),
            kwargs=tuple(dict(call.kwargs).items()),
            inputs=inputs,
            wants=strategy.inputs,
            outputs=outputs,
            place=place,
        )

    def _is_made_here(self, node: Node, value: str) -> bool:
        """In the backward: True of what its own ops make, and of a forward op's output that is not kept."""
        return node.phase is Phase.BACKWARD or (value in self.later and self.later[value] is None)

    def _output(self, node: Node, scope: Scope, value: str, layout: Layout | None) -> Local:
        if layout is None:
            raise CompilerError(f"{node.key}: the plan has no layout for its output {value}")
        return scope.make(value, layout)

    def _call(self, node: Node, scope: Scope) -> CallBlock:
        assert node.block is not None
        key = node.block.key
        inner = self.context.captured.block(key).graph
        own = own_inputs(inner)
        refs = node.refs
        arrivals = self.context.layouts.arrivals(inner)
        if node.phase is Phase.FORWARD:
            index = self.called[key] = self.called.get(key, -1) + 1
            self.calls.setdefault((node.block.instance, refs), []).append(index)
            asked = [(r, i) for r, i in zip(refs, own, strict=True) if i.kind is not InputKind.PARAMETER]
        else:
            waiting = self.calls.get((node.block.instance, refs[: len(own)]))
            if not waiting:
                raise CompilerError(f"{node.name}: the backward of a call of {node.block.instance} that was not made")
            index = waiting.pop()
            tangents = [i for i in inner.inputs if i.kind is InputKind.TANGENT]
            asked = list(zip(refs[len(own) :], tangents, strict=True))
        place = Place(key=node.key, module_path=node.block.instance, source=node.source)
        wants = tuple(arrivals[i.value.name] for _, i in asked)
        inputs = tuple(scope.fetch(r, w, place) for (r, _), w in zip(asked, wants, strict=True))
        outputs, gradients = self._call_outputs(node, inner, scope)
        lowered = self.context.lowered[key]
        if node.phase is Phase.BACKWARD and self.halves:
            self.weights.steps.append(
                CallBlock(
                    block=key, index=index, function=lowered[-1].name, phase=node.phase, weights=True,
                    parameters=self.context.parameters_of[key][index], inputs=(), wants=(),
                    outputs=(None,) * len(lowered[-1].outputs), gradients=gradients, place=place,
                )
            )  # fmt: skip
            gradients = ()
        function = lowered[node.phase is Phase.BACKWARD]
        return CallBlock(
            block=key, index=index, function=function.name, phase=node.phase,
            parameters=self.context.parameters_of[key][index], inputs=inputs, wants=wants, outputs=outputs,
            gradients=gradients, place=place,
        )  # fmt: skip

    def _call_outputs(
        self, node: Node, inner: Graph, scope: Scope
    ) -> tuple[tuple[Local | None, ...], tuple[Local | None, ...]]:
        """What the call gives, in the layouts that the block's function makes."""
        assert node.block is not None
        forward, backward, *rest = self.context.lowered[node.block.key]
        weights = rest[0] if rest else backward
        if node.phase is Phase.FORWARD:
            return _made(scope, [None if o is None else o.name for o in node.outputs], forward.outputs), ()
        parameters = {i.value.name for i in inner.inputs if i.kind is InputKind.PARAMETER}
        ends = [o for o in inner.outputs if o.kind is OutputKind.GRADIENT]
        names: dict[bool, list[str | None]] = {True: [], False: []}
        for out, end in zip(node.outputs, ends, strict=True):
            names[end.target in parameters].append(None if out is None else out.name)
        order = [o.target for o in ends if o.target in parameters]
        if order != [i.value.name for i in inner.inputs if i.value.name in set(order)]:
            raise CompilerError(f"block {node.block.key}: gradients of parameters are not in the parameters' order")
        by_target = dict(zip(order, names[True], strict=True))
        rows = [by_target.get(i.value.name) for i in inner.inputs if i.kind is InputKind.PARAMETER]
        return _made(scope, names[False], backward.outputs), _made(self.weights, rows, weights.gradients)

    def _leave_forward(self) -> tuple[tuple[Local, ...], tuple[Local, ...]]:
        outputs, updates = [], []
        for position, out in enumerate(self.graph.outputs):
            if out.kind is OutputKind.GRADIENT:
                continue
            if out.value is None:
                raise CompilerError(f"{self.graph.name}: output {out.target} has no value")
            if self.block:
                local = self.forward.made[out.value]
            else:
                local = self.forward.fetch(out.value, self.context.layouts.output(position), OUTSIDE)
            if out.kind is OutputKind.OUTPUT:
                outputs.append(local)
            elif self.block or not local.layout.replicated:
                raise CompilerError(f"{self.graph.name}: buffer {out.target} is updated in a block, or cut")
            else:
                updates.append(local)
        return tuple(outputs), tuple(updates)

    def _leave_backward(self) -> tuple[tuple[Local | None, ...], tuple[Local | None, ...]]:
        """(gradients of non-parameters: of a block as made, of the model as planned; those of parameters as stored)."""
        others: list[Local | None] = []
        gradients: dict[str, Local] = {}
        parameters = [i.value.name for i in self.graph.inputs if i.kind is InputKind.PARAMETER]
        for position, out in enumerate(self.graph.outputs):
            if out.kind is not OutputKind.GRADIENT:
                continue
            if out.target in parameters:
                if out.value is not None:
                    layout = self.context.layouts.gradient(self.graph, out.target, out.value)
                    gradients[out.target] = self.weights.fetch(out.value, layout, OUTSIDE)
            elif out.value is None:
                others.append(None)
            elif self.block:
                others.append(self._as_made(out.value))
            else:
                scope = self.weights if self._is_late(out.value) else self.backward
                others.append(scope.fetch(out.value, self.context.layouts.output(position), OUTSIDE))
        return tuple(others), tuple(gradients.get(p) for p in parameters)

    def _as_made(self, value: str) -> Local:
        made = self.backward.made.get(value) or self.forward.made.get(value)
        if made is None:
            raise CompilerError(f"{value} leaves before it is made")
        return self.backward.fetch(value, made.layout, OUTSIDE)

    def _forward_function(
        self,
        arguments: dict[str, Local],
        saved: tuple[Local, ...],
        outputs: tuple[Local, ...],
        updates: tuple[Local, ...],
    ) -> Function:
        keep = {x.name for x in (*saved, *outputs, *updates)}
        kinds = {k: self._arguments(arguments, k) for k in InputKind}
        if self.block:
            others = tuple(arguments[i.value.name] for i in own_inputs(self.graph) if i.kind is not InputKind.PARAMETER)
            kinds |= {InputKind.INPUT: others, InputKind.BUFFER: (), InputKind.CONSTANT: ()}
        given = (*kinds[InputKind.BUFFER], *kinds[InputKind.CONSTANT], *kinds[InputKind.INPUT])
        holders = Holders(
            always=(*kinds[InputKind.PARAMETER], *(() if self.block else given)), caller=given if self.block else (),
            waiting={x.name for x in saved}, leaving={x.name for x in (*outputs, *updates)},
            leaving_stay=not self.block,
        )  # fmt: skip
        return Function(
            name=self._name("forward"), graph=self.graph.name, block=self.block, phase=Phase.FORWARD,
            parameters=kinds[InputKind.PARAMETER], buffers=kinds[InputKind.BUFFER],
            constants=kinds[InputKind.CONSTANT], inputs=kinds[InputKind.INPUT], saved=saved,
            steps=with_frees(in_own_storage(self.forward.steps, holders), keep), outputs=outputs, updates=updates,
        )  # fmt: skip

    def _backward_function(
        self, arguments: dict[str, Local], scope: Scope, others: tuple[Local | None, ...],
        gradients: tuple[Local | None, ...],
    ) -> Function:  # fmt: skip
        weights = scope is not self.backward
        waits = tuple(self.weights.saved.values()) if self.halves and not weights else ()
        saved = tuple(scope.saved.values())
        keep = {x.name for x in (*others, *gradients, *waits) if x is not None}
        parameters, tangents = (self._arguments(arguments, k) for k in (InputKind.PARAMETER, InputKind.TANGENT))
        tangents = () if weights else tangents
        holders = Holders(
            always=parameters, caller=tangents, loose=saved,
            waiting={x.name for x in (*gradients, *waits) if x is not None},
            leaving={x.name for x in others if x is not None},
        )  # fmt: skip
        return Function(
            name=self._name("backward_weights" if weights else "backward"), graph=self.graph.name, block=self.block,
            phase=Phase.BACKWARD, parameters=parameters, tangents=tangents, saved=saved,
            steps=with_frees(in_own_storage(scope.steps, holders), keep, held=[x.name for x in saved]),
            outputs=others, gradients=gradients, weights=weights, waits=waits,
        )  # fmt: skip

    def _arguments(self, arguments: dict[str, Local], kind: InputKind) -> tuple[Local, ...]:
        return tuple(arguments[i.value.name] for i in self.graph.inputs if i.kind is kind)

    def _name(self, phase: str) -> str:
        return f"{stem(self.block)}_{phase}" if self.block else phase


def _made(scope: Scope, names: list[str | None], layouts: tuple[Local | None, ...]) -> tuple[Local | None, ...]:
    """Values that a block call makes, in the layouts of the block's own results."""
    found: list[Local | None] = []
    for name, inner in zip(names, layouts, strict=True):
        if name is None:
            found.append(None)
        elif inner is None:
            raise CompilerError(f"{name} is read, but the block gives None there")
        else:
            found.append(scope.make(name, inner.layout))
    return tuple(found)


def _renamed(tree: Any, names: Any) -> Any:
    """The arguments with each Ref, in order, renamed to the version that is passed."""
    if isinstance(tree, Ref):
        return Ref(next(names).name)
    if isinstance(tree, (tuple, list)):
        return tuple(_renamed(item, names) for item in tree)
    return tree

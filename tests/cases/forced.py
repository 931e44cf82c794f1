"""Every layout that the planner may pick, run: plans that together use each strategy of each op at least once.

One plan forces many strategies at a time: it is the cheapest one where a strategy that no plan before used is free and
any other costs 1, and conversions are free. The solver proves what is left unused to be out of reach (a sum that
nothing can make, say), so the planner cannot pick it either. Each plan is emitted and run on in-process ranks beside
one device: loss, every output, all gradients, and parameters and AdamW state afterwards, in float64 to 1e-10.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from autopar import api, sharding
from autopar.cost_model.answer import make_plan
from autopar.cost_model.build import Priced, build_problem
from autopar.cost_model.clusters import load_cluster
from autopar.cost_model.prices import MeshPrices
from autopar.cost_model.wiring import SlotKind, Wiring, wire
from autopar.ir.graph import CapturedGraph, InputKind, Phase, tensor_keys
from autopar.ir.layout import parse_layout, replicated
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.options import Options
from autopar.ir.plan import AGAIN, Plan
from autopar.ir.problem import INFINITY, Problem, evaluate
from autopar.ir.solution import Solution, Status
from autopar.ir.strategy import StrategyTable
from autopar.runtime.module import ParallelModule
from autopar.runtime.threads import run_threads
from autopar.solver import solve
from autopar.verification import Trained, compare, reference, train
from tests.cases.run import wide

SUMMANDS = 12
"""Parameters of a `Function` are sums over so many: a multiple of every axis size, so that they may arrive as sums."""


def line(size: int, axis: str = "free") -> Mesh:
    """One axis. On "free" every rule is a choice; the roles of dp, cp and tp leave some out."""
    return Mesh(axes=(Axis(name=axis, size=size),))


def grid(first: str = "free", second: str = "tp", sizes: tuple[int, int] = (2, 2)) -> Mesh:
    """Two axes."""
    return Mesh(axes=(Axis(name=first, size=sizes[0]), Axis(name=second, size=sizes[1])))


class Function(nn.Module):
    """A function of tensors as a model: `fn(**parameters, **inputs)` -> tensors; the loss weighs each with random
    numbers. Parameters arrive as sums, gradients leave as sums, wherever the planner likes."""

    def __init__(self, fn: Callable[..., Any], parameters: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.fn = fn
        self.names = tuple(parameters)
        g = torch.Generator().manual_seed(7)
        for name, x in parameters.items():
            parts = torch.randn((SUMMANDS - 1, *x.shape), generator=g, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(torch.cat([parts, (x - parts.sum(0)).unsqueeze(0)])))
        for i, out in enumerate(self._outputs(**inputs)):
            if out.is_floating_point():
                shape = (SUMMANDS, *out.shape)
                self.register_buffer(f"weights{i}", torch.randn(shape, generator=g, dtype=torch.float64))

    def _outputs(self, **inputs: Tensor) -> tuple[Tensor, ...]:
        found = self.fn(**{name: getattr(self, name).sum(0) for name in self.names}, **inputs)
        return (found,) if isinstance(found, Tensor) else tuple(found)

    def forward(self, **inputs: Tensor) -> tuple[Tensor, ...]:
        """(loss, every output)."""
        outputs = self._outputs(**inputs)
        loss = torch.zeros((), dtype=torch.float64)
        for i, out in enumerate(outputs):
            if out.is_floating_point():
                loss = loss + (out * getattr(self, f"weights{i}")).sum()
        return loss, *outputs


@dataclass(frozen=True, slots=True)
class Case:
    """A captured model with what one device makes of it."""

    captured: CapturedGraph
    wiring: Wiring
    model: nn.Module
    inputs: Any
    expected: Trained
    outputs: list[Tensor]
    steps: int


@dataclass(frozen=True, slots=True)
class Forced:
    """One choice, and the (slot, strategy)s that it is the first to use."""

    choice: tuple[int, ...]
    new: tuple[tuple[int, int], ...]


def case(model: nn.Module, inputs: Any, *, steps: int = 3, **options: Any) -> Case:
    """Capture, and train on one device, in float64."""
    model, inputs = model.double(), wide(inputs)
    captured = api.capture(model, inputs, options=Options(precision="fp64", **options))
    outputs: list[Tensor] = []
    expected = reference(model, lambda m: _called(m, inputs, outputs, lambda x, i: x), steps)
    return Case(captured, wire(captured), model, inputs, expected, outputs, steps)


def _called(module: nn.Module, inputs: Any, outputs: list[Tensor], whole: Callable[[Tensor, int], Tensor]) -> Any:
    """Call the module; keep the first call's outputs, joined."""
    result = module(**inputs) if isinstance(inputs, Mapping) else module(*inputs)
    if not outputs:
        outputs += [whole(x.detach(), i).clone() for i, x in enumerate(_tensors(result))]
    return result


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        tree = tuple(tree.values())
    return [x for v in tree for x in _tensors(v)] if isinstance(tree, (tuple, list)) else []


def check(
    of: Case, *meshes: Mesh, only: Callable[[str], bool] | None = None, pins: Mapping[str, Any] | None = None
) -> list[Plan]:
    """Every strategy of every op (of those that `only(op)` names) on each mesh. AssertionError says which is wrong."""
    rules = sharding.RuleCache()
    plans: list[Plan] = []
    known: tuple[Any, tuple[Forced, ...]] = (None, ())
    for mesh in meshes:
        table, priced = _priced(of, mesh, rules, pins or {})
        if priced.options != known[0]:  # the same strategies on more ranks are forced by the same choices
            known = priced.options, tuple(cover(priced, only))
        for forced in known[1]:
            plans.append(plan_of(of, table, priced, forced.choice))
            if wrong := difference(of, plans[-1]):
                raise AssertionError(f"{wrong}\non {mesh}; wrong by itself:\n{_blame(of, table, priced, forced)}")
    return plans


def _priced(of: Case, mesh: Mesh, rules: sharding.RuleCache, pins: Mapping[str, Any]) -> tuple[StrategyTable, Priced]:
    options = Options(precision="fp64", pins=dict(pins))
    table = sharding.build_table(of.captured, mesh, options, rules=rules)
    prices = MeshPrices(load_cluster(f"rtx3090:{mesh.size}"), mesh)
    return table, build_problem(of.captured, of.wiring, table, prices, options, 0)


def cover(priced: Priced, only: Callable[[str], bool] | None) -> Iterator[Forced]:
    """Choices until each further one would use nothing new."""
    wanted = {
        (i, k)
        for i, (slot, options) in enumerate(zip(priced.wiring.slots, priced.options, strict=True))
        if only is None or (slot.kind is SlotKind.OP and slot.node is not None and only(slot.node.op))
        for k in range(len(options))
    }
    while wanted:
        choice = _cheapest(priced.problem, lambda i, k: 0.0 if (i, k) in wanted else 1.0)
        new = tuple((i, k) for i, k in enumerate(choice) if (i, k) in wanted)
        if not new:
            return
        wanted.difference_update(new)
        yield Forced(choice, new)


def _cheapest(problem: Problem, price: Callable[[int, int], float]) -> tuple[int, ...]:
    """The choice with the least sum of prices of (node, strategy) among those with all their conversions."""
    nodes = tuple(
        replace(n, cost_us=tuple(price(i, k) for k in range(len(n.cost_us))), cover_us=(), group=None)
        for i, n in enumerate(problem.nodes)
    )
    values = tuple(
        replace(v, reshard_us=tuple(tuple(c if c == INFINITY else 0.0 for c in row) for row in v.reshard_us))
        for v in problem.values
    )
    solution = solve(replace(problem, nodes=nodes, values=values, moments=()), gap=0.0)
    assert solution.choice, solution.status
    return solution.choice


def plan_of(of: Case, table: StrategyTable, priced: Priced, choice: Sequence[int]) -> Plan:
    """The plan that follows a choice."""
    cost = evaluate(priced.problem, tuple(choice)).objective_us
    solution = Solution(
        status=Status.FEASIBLE, choice=tuple(choice), objective_us=cost, bound_us=0.0, time_s=0.0,
        solver="forced",
    )  # fmt: skip
    cluster = load_cluster(f"rtx3090:{priced.mesh.size}")
    prices, options = MeshPrices(cluster, priced.mesh), Options(precision="fp64")
    return make_plan(of.captured, priced, solution, prices, cluster, options, table.notes, 0.0)


def difference(of: Case, plan: Plan) -> str:
    """ "" if the ranks of a plan make what one device makes."""
    source = api.emit_captured(of.captured, plan)
    mesh = api.mesh_of(plan)
    whole = replicated(mesh)
    stored = {name: parse_layout(p.layout, mesh) for name, p in plan.parameters.items()}
    shapes = {p.name: p.meta.shape for p in of.captured.parameters}

    def rank(rt: Any) -> tuple[Trained, list[Tensor]]:
        module = ParallelModule(of.captured, plan, source, of.model, rt)
        layouts = next(iter(module._autopar.programs.values())).outputs
        sizes, outputs = [tuple(x.shape) for x in of.outputs], list[Tensor]()
        trained = train(
            module, lambda m: _called(m, of.inputs, outputs, lambda x, i: rt.convert(x, layouts[i], whole, sizes[i])),
            lambda name, piece: rt.convert(piece, stored[name], whole, shapes[name]), of.steps, module.full_state_dict,
        )  # fmt: skip
        return trained, outputs

    try:
        found = run_threads(mesh, rank)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    report = compare(of.expected, [t for t, _ in found], {})
    if not report.ok:
        return str(report)
    wrong = (_outputs_differ(of.outputs, outs, rank) for rank, (_, outs) in enumerate(found))
    return next(filter(None, wrong), "") or _ranks_differ(found)


def _ranks_differ(found: list[tuple[Trained, list[Tensor]]]) -> str:
    """Losses, outputs and state are bit for bit the same on every rank."""
    (first, outputs), *others = found
    for rank, (mine, outs) in enumerate(others, 1):
        if mine.losses != first.losses:
            return f"rank {rank} has losses {mine.losses}, rank 0 {first.losses}"
        pairs = [*zip(outs, outputs, strict=True), *((mine.state[n], x) for n, x in first.state.items())]
        if not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs):
            return f"an output or a part of the state differs between ranks 0 and {rank}"
    return ""


def unpriced(of: Case, plan: Plan) -> list[str]:
    """Reads of the top graph in a layout that is neither the one made nor a priced conversion of it.

    The backward reads of the forward what the plan keeps, in the layout that it is kept in.
    """
    made: dict[str, str] = {}
    kept = _kept(of, plan)
    strategies = plan.strategies["top"]
    for given in of.captured.top.inputs:
        stored = plan.parameters.get(given.target) if given.kind is InputKind.PARAMETER else None
        planned = plan.inputs["top"].get(f"{given.kind.value}:{given.target}")
        made[given.value.name] = stored.layout if stored is not None else planned or "whole"
    priced = {(c.value, c.before, c.after) for c in plan.conversions if c.graph == "top"}
    wrong = []
    for node in of.captured.top.nodes:
        for ref, wanted in zip(node.refs, strategies[node.key].inputs, strict=True):
            before = kept.get(ref, made[ref]) if node.phase is Phase.BACKWARD else made[ref]
            if wanted != before and (ref, before, wanted) not in priced:
                wrong.append(f"{node.key} reads {ref} as {wanted}, made as {before}")
        made.update({o.name: x for o, x in zip(node.outputs, strategies[node.key].outputs, strict=True) if o})
    return wrong


def _kept(of: Case, plan: Plan) -> dict[str, str]:
    """Value of the top graph -> the layout that it waits for the backward in."""
    later = plan.later.get("top", {})
    keys = tensor_keys(of.captured.top)
    return {value: later[key] for value, key in keys.items() if later.get(key, AGAIN) != AGAIN}


def _outputs_differ(expected: list[Tensor], found: list[Tensor], rank: int) -> str:
    for i, (a, b) in enumerate(zip(expected, found, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"output {i} on rank {rank}: {b.dtype} {tuple(b.shape)}, wanted {a.dtype} {tuple(a.shape)}"
        if a.is_floating_point() or a.is_complex():
            error = float((a - b).abs().max() / max(float(a.abs().max()), 1e-30)) if a.numel() else 0.0
            if not error <= 1e-10 and not torch.allclose(a, b, rtol=1e-10, equal_nan=True):
                return f"output {i} on rank {rank}: off by {error:.2e}"
        elif not torch.equal(a, b):
            return f"output {i} on rank {rank}: {b.flatten()[:8].tolist()}, wanted {a.flatten()[:8].tolist()}"
    return ""


def _blame(of: Case, table: StrategyTable, priced: Priced, forced: Forced) -> str:
    """Which of a plan's new strategies is wrong with little else cut."""
    found = []
    for slot, pick in forced.new:
        forced_to = (slot, pick)
        choice = _cheapest(
            priced.problem, lambda i, k, f=forced_to: 1e4 * (k != f[1]) if i == f[0] else float(k > 0)
        )  # fmt: skip
        if wrong := difference(of, plan_of(of, table, priced, choice)):
            told = priced.wiring.slots[slot]
            op = told.node.op if told.node is not None else ""
            found.append(f"  {told} {op} {priced.options[slot][pick]}: {wrong.splitlines()[-1][:300]}")
    return "\n".join(found) or "  none: it takes several at once"

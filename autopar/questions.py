"""What a person asks of a plan: why this layout and not another, and what another way would cost.

Every answer is a search asked again: on the same cluster, with the same cost model and the plan's own options, under
one pin more. `explain` stays on the plan's mesh and solves to the end on both sides (a search stops within half a
percent of the best), so that its difference is exact: forcing `next_best` through `pins` raises the objective by
`difference_us`. `why_not` searches as `search` does.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from autopar import sharding
from autopar.candidates import TIGHTER, Candidate, Task, plan_of, price_mesh, rank, solve_problem, tightened
from autopar.cost_model.places import Places, short
from autopar.cost_model.wiring import SlotKind
from autopar.errors import CompilerError, InfeasibleError, UserError
from autopar.ir.graph import Graph, Node, ParameterInfo
from autopar.ir.layout import Layout, R, parse_layout
from autopar.ir.mesh import Mesh
from autopar.ir.options import DEGREE_NAMES, RECOMPUTE, Options
from autopar.ir.plan import Plan, mesh_of, refuse_stages
from autopar.ir.problem import Problem
from autopar.ir.solution import Solution, Status
from autopar.ir.strategy import Strategy
from autopar.present.arguments import split_pins
from autopar.present.plan_diff import PlanDiff, diff_plans
from autopar.present.words import bytes_words, change_words, group_name, pattern_of, time_words
from autopar.solver import keep_strategies, minimise_memory

Progress = Callable[[str, float], None]

ROUNDING = 1e-9
"""Relative difference of two objectives that is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """What keeps the chosen layout from being another.

    Attributes:
        kind: "memory" (the limit), "pin", "objective" (least memory was asked for), or "none".
        price_us: what a step would save without it.
    """

    kind: str
    message: str
    price_us: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why something is laid out as it is.

    Attributes:
        name: as asked. `subject`: what that is in the model; `covers`: what else the answer holds for.
        kind: "parameter", "module" or "op".
        chosen, next_best: as layout text, which a pin takes; of an op its layouts as `inputs -> outputs`. `next_best`
            is the cheapest other one on this mesh, "" if there is none that fits. `*_words`: the same in words.
        difference_us: step time that forcing `next_best` adds; below 0 where a pin forced the chosen one. None where
            there is no next best. `difference_bytes`: peak memory per device that it adds.
        binding: see `Binding`.
        pins: what to give to a search, or as --pin, to get `next_best`. Empty for an op: it follows its tensors.
        objective_us: of the best plan on this mesh, to which the difference is.
        diff: from that plan to the one with `next_best`.
        parts: of a module whose parameters belong to several modules: each of those; the rest is then of the part that
            is cheapest to change.
    """

    name: str
    subject: str
    kind: str
    covers: str
    chosen: str
    chosen_words: str
    next_best: str
    next_best_words: str
    difference_us: float | None
    difference_bytes: int | None
    binding: Binding
    pins: Mapping[str, str | int]
    objective_us: float
    diff: PlanDiff | None
    notes: tuple[str, ...] = ()
    parts: tuple[Explanation, ...] = ()

    def __str__(self) -> str:
        rows = [("chosen", _with_words(self.chosen, self.chosen_words))]
        if self.next_best:
            assert self.difference_us is not None and self.difference_bytes is not None
            part = f" ({self.difference_us / self.objective_us:+.2%})" if self.objective_us else ""
            memory = change_words(self.difference_bytes, bytes_words)
            rows += [
                ("next best", _with_words(self.next_best, self.next_best_words)),
                ("costs", f"{_change_us(self.difference_us)} a step{part}, {memory} of memory per device"),
                *_shifts(self.diff),
            ]
        else:
            rows.append(("next best", "none on this mesh"))
        rows.append(("bound by", self.binding.message))
        if self.next_best and self.pins:
            rows.append(("force it", " ".join(f"--pin {_quoted(f'{k}={v}')}" for k, v in self.pins.items())))
        rows += [("holds for", self.covers)] if self.covers else []
        rows += [("note", note) for note in self.notes]
        width = max(len(what) for what, _ in rows) + 2
        text = [f"{self.subject} ({self.kind})", *(f"  {what:{width}}{words}" for what, words in rows)]
        return "\n".join([*text, *("\n" + str(part) for part in self.parts if part.subject != self.subject)])

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyNot:
    """What another way would cost, or why it can't be.

    Attributes:
        verdict: "slower", "same" or "faster" where there is an alternative; "memory" where nothing fits, "impossible"
            where there is no such mesh or pins contradict each other.
        difference_us, difference_bytes: what the alternative adds to this plan's step and peak memory.
        short_bytes: with "memory", how many more bytes per device the least demanding plan would need.
    """

    asked: str
    verdict: str
    message: str
    difference_us: float | None = None
    difference_bytes: int | None = None
    short_bytes: int = 0
    alternative: Plan | None = None
    diff: PlanDiff | None = None

    def __str__(self) -> str:
        text = f"{self.asked}: {self.message}"
        return f"{text}\n\n{self.diff}" if self.diff is not None and self.verdict != "same" else text

    def to_json(self) -> dict[str, Any]:
        """As plain data; of the alternative its mesh, pins and prediction."""
        found: dict[str, Any] = msgspec.to_builtins(replace(self, alternative=None))
        if self.alternative is not None:
            kept = ("mesh", "pins", "predicted", "solver")
            found["alternative"] = {name: msgspec.to_builtins(getattr(self.alternative, name)) for name in kept}
        return found


def _with_words(layout: str, words: str) -> str:
    return f"{layout}  ({words})" if words else layout


def _change_us(us: float) -> str:
    return change_words(us, time_words)


def _quoted(text: str) -> str:
    return f"'{text}'" if any(c in text for c in " *()") else text


def _shifts(diff: PlanDiff | None) -> Iterator[tuple[str, str]]:
    """Where the difference comes from, the largest first."""
    parts = [a for a in (diff.amounts if diff else ()) if a.part and a.unit == "us" and a.matters]
    if parts:
        parts.sort(key=lambda a: -abs(a.after - a.before))
        yield "of which", ", ".join(f"{a.what} {_change_us(a.after - a.before)}" for a in parts[:3])


@dataclass(frozen=True, slots=True)
class _Mesh:
    """The plan's own mesh, solved to the end."""

    plan: Plan
    task: Task
    mesh: Mesh
    base: Candidate
    optimum: Solution
    best: Plan
    progress: Progress

    @property
    def problem(self) -> Problem:
        return self.base.problem

    def solve(self, problem: Problem, cutoff_us: float | None = None) -> Solution | None:
        found = solve_problem(
            problem, self.task.options, gap=0.0, cutoff_us=cutoff_us, within_us=self.task.within_us
        )  # fmt: skip
        return found if found is not None and found.choice else None

    def slot(self, kind: SlotKind, graph: str, name: str) -> int:
        """Index of the choice, by its own name."""
        slots = self.task.wiring.slots
        return next(i for i, s in enumerate(slots) if (s.kind, s.graph, s.name) == (kind, graph, name))

    def only(self, problem: Problem, slot: int, kept: list[int]) -> Solution | None:
        """The best answer with these of the slot's choices."""
        every = [list(range(len(n.cost_us))) for n in problem.nodes]
        every[slot] = kept
        reduction = keep_strategies(problem, every)
        found = self.solve(reduction.problem) if kept else None
        return replace(found, choice=reduction.lift(found.choice)) if found is not None else None


def _on_mesh(plan: Plan, task: Task, progress: Progress) -> _Mesh:
    refuse_stages(plan, "explains")
    mesh = mesh_of(plan)
    progress(f"solve {mesh} to the end", 0.0)
    base = price_mesh(task, mesh)
    optimum = _solve(base, task)
    if optimum is None or not optimum.choice:
        raise CompilerError(f"the plan for {plan.model.name} on {mesh} is no answer of its own problem")
    answer = plan_of(task, base, optimum)
    for _ in range(TIGHTER):  # as the search does
        less = tightened(task, base, optimum, answer)
        found = _solve(less, task) if less is not None else None
        if less is None or found is None or not found.choice:
            break
        base, optimum, answer = less, found, plan_of(task, less, found)
    return _Mesh(plan, task, mesh, base, optimum, answer, progress)


def _solve(candidate: Candidate, task: Task) -> Solution | None:
    """To the end."""
    return solve_problem(candidate.problem, task.options, gap=0.0, cutoff_us=None, within_us=task.within_us)


def explain(plan: Plan, name: str, task: Task, progress: Progress) -> Explanation:
    """See `Explanation`. `name`: a parameter, a module path, a pattern with `*`, or an op's key.

    Raises UserError with the closest names where nothing is called so.
    """
    task = _as_planned(task, plan)
    matched = sharding.matching(task.captured, name)
    ops = [] if matched else _find_ops(task, name)
    if not matched and not ops:
        raise UserError(_unknown(task, name))
    here = _on_mesh(plan, task, progress)
    if ops:
        parts = [_explain_op(here, name, graph, node) for graph, node in ops[:1]]
        return replace(parts[0], notes=(*parts[0].notes, *_more_ops(ops)))
    modules = _by_module(matched, task, name)
    parts = []
    for i, (key, members) in enumerate(modules.items()):
        progress(f"other layouts of {key}", i / len(modules))
        parts.append(_explain_parameters(here, name, key, members))
    if len(parts) == 1:
        return parts[0]
    known = [p for p in parts if p.difference_us is not None]
    cheapest = min(known, key=lambda p: p.difference_us or 0.0) if known else parts[0]
    return replace(cheapest, parts=tuple(parts))


def _as_planned(task: Task, plan: Plan) -> Task:
    """With recomputation only where the plan recomputes, and no step longer than the plan's might be."""
    within = plan.solver.within_us if plan.solver.within_us is not None else math.inf
    return replace(task, options=replace(task.options, allow=(RECOMPUTE,) if plan.later else ()), within_us=within)


def _by_module(matched: list[ParameterInfo], task: Task, name: str) -> dict[str, list[ParameterInfo]]:
    """What to pin -> its parameters. Modules whose parameters are stored alike (layers of one block) are one."""
    if any(name in (p.name, *p.aliases) for p in matched):
        return {name: matched}
    found: dict[str, list[ParameterInfo]] = {}
    for parameter in matched:
        found.setdefault(parameter.name.rpartition(".")[0], []).append(parameter)
    classes: dict[frozenset[int | None], str] = {}
    for path, members in found.items():
        classes.setdefault(frozenset(task.wiring.storage_of.get(p.name) for p in members), path)
    kept = list(classes.values())
    return {name: matched} if len(kept) == 1 else {path: found[path] for path in kept}


def _explain_parameters(here: _Mesh, name: str, key: str, members: list[ParameterInfo]) -> Explanation:
    """The largest parameter stands for its module; a pin on the module is a pin on all that it fits."""
    largest = max(members, key=lambda p: p.meta.numel)
    slot = here.task.wiring.storage_of.get(largest.name)
    mine = here.plan.parameters[largest.name]
    alike = here.task.wiring.slots[slot].parameters if slot is not None else (largest.name,)
    found = _next_layout(here, key, largest, alike) if slot is not None else _Other()
    best, pins = found.plan, found.pins
    is_module = key not in (largest.name, *largest.aliases)
    return Explanation(
        name=name,
        subject=f"{key}: {largest.name.removeprefix(key + '.')}" if is_module else key,
        kind="module" if is_module else "parameter",
        covers=_covers(alike),
        chosen=mine.layout,
        chosen_words=mine.role,
        next_best=found.text,
        next_best_words=best.parameters[largest.name].role if best else "",
        difference_us=best.solver.objective_us - here.optimum.objective_us if best else None,
        difference_bytes=_peak(best) - _peak(here.best) if best else None,
        binding=_binding_of_parameter(here, largest, alike, slot, mine.layout, found),
        pins=pins,
        objective_us=here.optimum.objective_us,
        diff=diff_plans(here.best, best, ("as planned", "next best")) if best else None,
        notes=tuple(_standing(here, found)),
    )


def _peak(plan: Plan) -> int:
    return plan.predicted.peak_memory_bytes


def _covers(alike: tuple[str, ...]) -> str:
    if len(alike) == 1:
        return ""
    return (
        f"{group_name(alike, alone=False)}: {len(alike)} instances of one folded block, so a pin on one pins them all"
    )


def _standing(here: _Mesh, found: _Other) -> Iterator[str]:
    """What limits the answer's exactness."""
    planned, best = here.plan.solver.objective_us, here.optimum.objective_us
    if planned - best > ROUNDING * best:
        yield (
            f"the plan takes {time_words(planned - best)} longer than the best on its mesh: a search stops within its "
            f"gap; differences are to that best"
        )
    if found.wider:
        yield "a search on this mesh has one layout for it; the next best was forced from outside what it looks at"
    if here.optimum.failure:
        yield f"{here.optimum.failure}: the difference is within the gap of local search, not exact"
    stopped = here.optimum.status is Status.TIME_LIMIT
    if stopped or (found.plan is not None and found.plan.solver.status != "optimal"):
        yield "the time limit stopped a solve: the difference is within its gap, not exact"


@dataclass(frozen=True, slots=True)
class _Other:
    """The cheapest other way.

    `short_bytes`: where none fits, what the least demanding one lacks. `wider`: no search would have looked at it.
    """

    text: str = ""
    plan: Plan | None = None
    pins: Mapping[str, str | int] = ()  # type: ignore[assignment]
    short_bytes: int = 0
    wider: bool = False


def _next_layout(here: _Mesh, key: str, parameter: ParameterInfo, alike: tuple[str, ...]) -> _Other:
    """Each layout that a search considers for it, forced by a pin; the best of those."""
    options = here.task.options
    layouts, wider = _layouts(here, parameter)
    tried: list[tuple[Task, Candidate, str]] = []
    for layout in layouts:
        task = here.task.pinned(_forcing(here, key, alike, str(layout)))
        try:
            tried.append((task, price_mesh(task, here.mesh), str(layout)))
        except UserError:
            continue
    best: tuple[tuple[float, float], Task, Candidate, Solution, str] | None = None
    for task, candidate, text in sorted(tried, key=lambda t: t[1].bound_us):
        solution = here.solve(candidate.problem, best[3].objective_us if best else None)
        if solution is None:
            continue
        place = rank(candidate, solution, options)
        if best is None or place < best[0]:
            best = place, task, candidate, solution, text
    if best is None:
        return _Other(short_bytes=_short(tried))
    _, task, candidate, solution, text = best
    return _Other(text, plan_of(task, candidate, solution), task.options.pins, wider=wider)


def _short(tried: list[tuple[Task, Candidate, str]]) -> int:
    """Bytes per device that the least demanding of these lacks."""
    least = [minimise_memory(c.problem) for _, c, _ in tried if c.problem.moments]
    return min((x.excess_bytes for x in least if x is not None), default=0)


def _layouts(here: _Mesh, parameter: ParameterInfo) -> tuple[list[Layout], bool]:
    """What else the search may store it as, with and without the plan's pins.

    Where that is nothing, the chosen one with an axis left whole instead of cut: True says that these are such.
    """
    chosen = parse_layout(here.plan.parameters[parameter.name].layout, here.mesh)
    found = dict.fromkeys(here.base.table.storage[parameter.name])
    free = here.task.pinned({k: v for k, v in here.task.options.pins.items() if not _is_choice(k)})
    if free.options.pins != here.task.options.pins:
        table = sharding.build_table(free.captured, here.mesh, free.options, rules=free.rules)
        found |= dict.fromkeys(table.storage[parameter.name])
    others = [layout for layout in found if layout != chosen]
    if others:
        return others, False
    whole = dict.fromkeys(chosen.replace(axis, R) for axis in here.mesh.names)
    return [layout for layout in whole if layout != chosen], True


def _is_choice(pin: str) -> bool:
    """True for a pin that fixes how parameters are stored; False for one that fixes an axis."""
    return pin == "zero" or sharding.is_layout_pin(pin)


def _forcing(here: _Mesh, key: str, alike: tuple[str, ...], layout: str) -> dict[str, str | int]:
    """The plan's pins, its mesh, and this layout. Where an own pin names some of the instances, all are pinned anew."""
    own = {k: v for k, v in here.task.options.pins.items() if k != key and _is_choice(k)}
    touched = any(
        p.name in alike for k in own if sharding.is_layout_pin(k) for p in sharding.matching(here.task.captured, k)
    )
    own = {k: v for k, v in own.items() if not _within(here, k, alike)}
    wanted = dict.fromkeys((key, *(alike if touched else ())), layout)
    return {**own, **{a.name: a.size for a in here.mesh.axes}, **wanted}


def _within(here: _Mesh, pin: str, alike: tuple[str, ...]) -> bool:
    """True for a layout pin of none but these parameters."""
    named = sharding.matching(here.task.captured, pin) if sharding.is_layout_pin(pin) else []
    return bool(named) and all(p.name in alike for p in named)


def _binding_of_parameter(
    here: _Mesh, parameter: ParameterInfo, alike: tuple[str, ...], slot: int | None, chosen: str, found: _Other
) -> Binding:
    if slot is None:
        return Binding(kind="none", message="nothing: no op reads it, so it stays whole")
    pins = {k: v for k, v in here.task.options.pins.items() if _touches(here, k, parameter, alike)}
    if pins:
        return _lifting(here, pins)
    texts = [str(layout) for layout in here.base.priced.options[slot]]
    limits = _memory_or_objective(here, slot, texts, chosen)
    if limits is not None:
        return limits
    if found.short_bytes > 0:
        return Binding(
            kind="memory",
            message="the memory limit: no other layout fits, the least demanding lacks "
            f"{bytes_words(found.short_bytes)} per device",
        )
    if not found.text:
        return Binding(kind="none", message="nothing: this mesh leaves it no other layout")
    return Binding(kind="none", message="nothing: it is the fastest of what a search considers on this mesh")


def _touches(here: _Mesh, pin: str, parameter: ParameterInfo, alike: tuple[str, ...]) -> bool:
    """True if the pin narrows or widens how the parameter may be stored."""
    if sharding.is_layout_pin(pin):
        return any(p.name in alike for p in sharding.matching(here.task.captured, pin))
    if pin != "zero":
        return False
    free = here.task.pinned({k: v for k, v in here.task.options.pins.items() if k != "zero"})
    table = sharding.build_table(free.captured, here.mesh, free.options, rules=free.rules)
    return table.storage[parameter.name] != here.base.table.storage[parameter.name]


def _lifting(here: _Mesh, pins: Mapping[str, str | int]) -> Binding:
    """What these pins cost."""
    free = here.task.pinned({k: v for k, v in here.task.options.pins.items() if k not in pins})
    solution = here.solve(price_mesh(free, here.mesh).problem)
    saved = here.optimum.objective_us - solution.objective_us if solution is not None else 0.0
    said = ", ".join(f"{k}={v}" for k, v in pins.items())
    words = (
        f"without it a step would take {time_words(saved)} less on this mesh"
        if saved > ROUNDING * here.optimum.objective_us
        else "without it nothing on this mesh would be faster"
    )
    return Binding(kind="pin", message=f"pin {said}: {words}", price_us=max(0.0, saved))


def _memory_or_objective(here: _Mesh, slot: int, texts: list[str], chosen: str) -> Binding | None:
    """The limit binds a choice if without it the best plan that keeps the choice is not the best plan."""
    if not here.problem.moments or chosen not in texts:
        return None
    unlimited = replace(here.problem, moments=())
    options = replace(here.task.options, objective="time")
    free = solve_problem(unlimited, options, gap=0.0, cutoff_us=None)
    if free is None or here.optimum.objective_us - free.objective_us <= ROUNDING * free.objective_us:
        return None
    kept = keep_strategies(unlimited, [
        [texts.index(chosen)] if i == slot else list(range(len(n.cost_us))) for i, n in enumerate(unlimited.nodes)
    ])  # fmt: skip
    keeping = solve_problem(kept.problem, options, gap=0.0, cutoff_us=None)
    if keeping is None or keeping.objective_us - free.objective_us <= ROUNDING * free.objective_us:
        return None
    otherwise = texts[free.choice[slot]]
    price = here.optimum.objective_us - free.objective_us
    if here.task.options.objective == "memory":
        words = (
            f"least memory was asked for: for time alone it would be {otherwise}, and a step {time_words(price)} less"
        )
        return Binding(kind="objective", message=words, price_us=price)
    words = (
        f"the memory limit of {bytes_words(here.task.limit_bytes)} per device: without it this would be {otherwise}, "
        f"and a step would take {time_words(price)} less"
    )
    if here.optimum.memory_price_us_per_byte > 0:
        words += f"; one more GiB would save {time_words(here.optimum.memory_price_us_per_byte * 2**30)} a step"
    return Binding(kind="memory", message=words, price_us=price)


def _find_ops(task: Task, name: str) -> list[tuple[Graph, Node]]:
    """Ops by key ("block: key" or the key alone), or by the module that they are in; the dearest kinds first."""
    places, found = Places.of(task.captured), []
    for graph in task.captured.graphs:
        for node in graph.nodes:
            if node.block is None and _names_op(name, graph, node, places.prefix[graph.name], task):
                found.append((graph, node))
    exact = [x for x in found if name in (x[1].key, f"{x[0].name}: {x[1].key}")]
    weigh = {id(n): sum(o.meta.numel for o in n.outputs if o is not None) for _, n in found}
    return exact or sorted(found, key=lambda x: -weigh[id(x[1])])


def _names_op(name: str, graph: Graph, node: Node, prefix: str, task: Task) -> bool:
    path, _, op = name.partition("/")
    if name in (node.key, f"{graph.name}: {node.key}"):
        return True
    if not path:
        return False
    under = [prefix] if graph is task.captured.top else [prefix, *task.captured.block(graph.name).instances]
    paths = [".".join(x for x in (p, node.module_path) if x) for p in under]
    here = any(p and (fnmatchcase(p, path) or fnmatchcase(p, f"{path}.*") or p == path) for p in paths)
    return here and (not op or op in (short(node.op), node.op, node.key.partition("/")[2]))


def _more_ops(ops: list[tuple[Graph, Node]]) -> Iterator[str]:
    if len(ops) > 1:
        keys = ", ".join(f"{g.name}: {n.key}" for g, n in ops[1:4])
        more = f" and {len(ops) - 4} more" if len(ops) > 4 else ""
        yield f"{len(ops)} ops are called so, this is the one with the largest result; the others: {keys}{more}"


def _explain_op(here: _Mesh, name: str, graph: Graph, node: Node) -> Explanation:
    """As for a parameter, with the op's chosen strategy excluded instead of another pinned."""
    slot = here.slot(SlotKind.OP, graph.name, node.name)
    picks = here.base.priced.options[slot]
    texts = [_strategy_words(s) for s in picks if isinstance(s, Strategy)]
    planned = here.plan.strategies[graph.name][node.key]
    chosen = _words(tuple(planned.inputs), tuple(planned.outputs), tuple(planned.tags))
    here.progress(f"other ways to run {node.key}", 0.0)
    other = here.only(here.problem, slot, [i for i, text in enumerate(texts) if text != chosen])
    best = plan_of(here.task, here.base, other) if other is not None else None
    places = Places.of(here.task.captured)
    found = _Other(texts[other.choice[slot]] if other else "", best)
    limits = _op_pins(here, slot, chosen) or _memory_or_objective(here, slot, texts, chosen)
    single = len(set(texts)) == 1
    best_of = "nothing: it is the fastest of what a search considers on this mesh"
    nothing = "nothing: on this mesh it has one way to run" if single else best_of
    if other is None and not single:
        nothing = "the memory limit: no other way fits"
    return Explanation(
        name=name,
        subject=f"{places.node(graph.name, node)}, {graph.name}: {node.key}",
        kind="op",
        covers=_instances(here.task, graph),
        chosen=chosen,
        chosen_words="",
        next_best=found.text,
        next_best_words="",
        difference_us=best.solver.objective_us - here.optimum.objective_us if best else None,
        difference_bytes=_peak(best) - _peak(here.best) if best else None,
        binding=limits or Binding(kind="memory" if nothing.startswith("the memory") else "none", message=nothing),
        pins={},
        objective_us=here.optimum.objective_us,
        diff=diff_plans(here.best, best, ("as planned", "next best")) if best else None,
        notes=tuple(_standing(here, found)),
    )


def _instances(task: Task, graph: Graph) -> str:
    if graph is task.captured.top:
        return ""
    paths = task.captured.block(graph.name).instances
    return f"{group_name(paths, alone=False)}: {len(paths)} instances of one folded block"


def _op_pins(here: _Mesh, slot: int, chosen: str) -> Binding | None:
    """The plan's pins, if without them another way of this op would be better."""
    pins = {k: v for k, v in here.task.options.pins.items() if _is_choice(k)}
    if not pins:
        return None
    free = price_mesh(here.task.pinned({k: v for k, v in here.task.options.pins.items() if k not in pins}), here.mesh)
    best = here.solve(free.problem)
    texts = [_strategy_words(s) for s in free.priced.options[slot] if isinstance(s, Strategy)]
    keeping = here.only(free.problem, slot, [i for i, text in enumerate(texts) if text == chosen])
    if best is None or (keeping and keeping.objective_us - best.objective_us <= ROUNDING * best.objective_us):
        return None
    return _lifting(here, pins)


def _strategy_words(s: Strategy) -> str:
    return _words(tuple(map(str, s.inputs)), tuple("" if x is None else str(x) for x in s.outputs), tuple(s.tags))


def _words(inputs: tuple[str, ...], outputs: tuple[str, ...], tags: tuple[str, ...]) -> str:
    how = " ".join(dict.fromkeys(t for t in tags if t))
    return f"{', '.join(inputs) or 'nothing'} -> {', '.join(outputs)}" + (f" [{how}]" if how else "")


def _unknown(task: Task, name: str) -> str:
    names = {p for i in task.captured.parameters for n in (i.name, *i.aliases) for p in _and_parents(n)}
    ops = {f"{g.name}: {n.key}" for g in task.captured.graphs for n in g.nodes if n.block is None}
    near = difflib.get_close_matches(name, sorted(names), n=3, cutoff=0.5)
    near = near or difflib.get_close_matches(pattern_of(name), sorted(names | ops), n=3, cutoff=0.3)
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    return f"{name!r} is no parameter, module or op of {task.captured.model_name}{hint}"


def _and_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def why_not(plan: Plan, asked: str | Mapping[str, str | int], task: Task, search: Callable[[Options], Plan]) -> WhyNot:
    """See `WhyNot`. `asked`: pins as a shell gives them ("dp=4 tp=2", "zero=3", "blocks.*.mlp=tp:S(0)"), or a mapping.

    Raises UserError for what is no pin, or names nothing in the model.
    """
    pins = split_pins(asked, "why not") if isinstance(asked, str) else dict(asked)
    said = " ".join(f"{k}={v}" for k, v in pins.items())
    for pattern in filter(sharding.is_layout_pin, pins):
        if not pattern.startswith(sharding.INPUT) and not sharding.matching(task.captured, pattern):
            raise UserError(_unknown(task, pattern))
    own = {k: v for k, v in task.options.pins.items() if k not in pins}
    options = replace(task.options, pins={**own, **pins}, search_space=_with_axes(task, pins))
    if options.objective == "cost":  # on the plan's devices, the same
        options = replace(options, objective="time")
    try:
        found = search(options)
    except InfeasibleError as error:
        short_of = error.needed_bytes - error.budget_bytes
        words = f"doesn't fit, {bytes_words(short_of)} per device short: {error}" if error.needed_bytes else str(error)
        return WhyNot(asked=said, verdict="memory", message=words, short_bytes=max(0, short_of))
    except UserError as error:
        because = f" (the plan's own pins: {', '.join(f'{k}={v}' for k, v in own.items())})" if own else ""
        return WhyNot(asked=said, verdict="impossible", message=f"can't be: {error}{because}")
    return _priced(plan, found, said)


def _with_axes(task: Task, pins: Mapping[str, str | int]) -> dict[str, tuple[int, ...]]:
    """The search space without meshes on which these pins would say nothing, since they lack an axis named."""
    space, devices = dict(task.options.search_space), task.cluster.devices
    for axis, degree in ((axis, name) for name, axis in DEGREE_NAMES.items()):
        if axis in pins or axis in task.options.pins or axis not in _named_axes(pins):
            continue
        sizes = tuple(n for n in space.get(degree, _divisors(devices)) if n > 1)
        space |= {degree: sizes} if sizes else {}
    return space


def _named_axes(pins: Mapping[str, str | int]) -> set[str]:
    layouts = (str(text) for pattern, text in pins.items() if sharding.is_layout_pin(pattern))
    named = {term.partition(":")[0] for text in layouts for term in text.split()}
    return named | ({"dp"} if str(pins.get("zero")) == "3" else set())


def _divisors(n: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, n + 1) if n % d == 0)


def _priced(plan: Plan, found: Plan, said: str) -> WhyNot:
    p, q = plan.predicted, found.predicted
    step, memory = q.step_time_us - p.step_time_us, q.peak_memory_bytes - p.peak_memory_bytes
    diff = diff_plans(plan, found, ("this plan", said))
    if not diff.layouts and not diff.amounts and not any(f.what == "mesh" for f in diff.facts):
        return WhyNot(
            asked=said, verdict="same", message="this plan is so already", difference_us=0.0, difference_bytes=0,
            alternative=found, diff=diff,
        )  # fmt: skip
    verdict = "slower" if step > 0 else "faster" if step < 0 else "same"
    part = f" ({step / p.step_time_us:+.1%})" if p.step_time_us else ""
    words = (
        f"{time_words(q.step_time_us)} a step instead of {time_words(p.step_time_us)}{part}, "
        f"{bytes_words(q.peak_memory_bytes)} per device instead of {bytes_words(p.peak_memory_bytes)}"
    )
    return WhyNot(
        asked=said, verdict=verdict, message=words, difference_us=step, difference_bytes=memory, alternative=found,
        diff=diff,
    )  # fmt: skip

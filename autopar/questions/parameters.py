"""Why a parameter is stored as it is: each other layout forced by a pin."""

from __future__ import annotations

from autopar import sharding
from autopar.candidates import Candidate, Task, plan_of, price_mesh, rank
from autopar.errors import UserError
from autopar.ir.graph import ParameterInfo
from autopar.ir.layout import Layout, R, parse_layout
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.solution import Solution
from autopar.present.plan_diff import diff_plans
from autopar.present.words import bytes_words, group_name
from autopar.questions.answers import Binding, Explanation
from autopar.questions.on_mesh import OnMesh, Other, is_choice, lifting, memory_or_objective, peak, standing
from autopar.solver import minimise_memory


def by_module(matched: list[ParameterInfo], task: Task, name: str) -> dict[str, list[ParameterInfo]]:
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


def explain_parameters(here: OnMesh, name: str, key: str, members: list[ParameterInfo]) -> Explanation:
    """The largest parameter stands for its module; a pin on the module is a pin on all that it fits."""
    largest = max(members, key=lambda p: p.meta.numel)
    slot = here.task.wiring.storage_of.get(largest.name)
    mine = here.plan.parameters[largest.name]
    alike = here.task.wiring.slots[slot].parameters if slot is not None else (largest.name,)
    found = _next_layout(here, key, largest, alike) if slot is not None else Other()
    best, pins = found.plan, found.pins
    is_module = key not in (largest.name, *largest.aliases)
    return Explanation(
        name=name,
        subject=f"{key}: {largest.name.removeprefix(key + '.')}" if is_module else key,
        kind="module" if is_module else "parameter",
        covers=covers(alike),
        chosen=mine.layout,
        chosen_words=mine.role,
        next_best=found.text,
        next_best_words=best.parameters[largest.name].role if best else "",
        difference_us=best.solver.objective_us - here.optimum.objective_us if best else None,
        difference_bytes=peak(best) - peak(here.best) if best else None,
        binding=_binding_of_parameter(here, largest, alike, slot, mine.layout, found),
        pins=pins,
        objective_us=here.optimum.objective_us,
        diff=diff_plans(here.best, best, ("as planned", "next best")) if best else None,
        notes=tuple(standing(here, found)),
    )


def covers(alike: tuple[str, ...]) -> str:
    """What else an answer about one of these parameters holds for."""
    if len(alike) == 1:
        return ""
    return (
        f"{group_name(alike, alone=False)}: {len(alike)} instances of one folded block, so a pin on one pins them all"
    )


def _next_layout(here: OnMesh, key: str, parameter: ParameterInfo, alike: tuple[str, ...]) -> Other:
    """Each layout that a search considers for it, forced by a pin; the best of those."""
    options = here.task.options
    layouts, wider = other_layouts(here.plan, here.task, here.mesh, parameter)
    tried: list[tuple[Task, Candidate, str]] = []
    for layout in layouts:
        task = here.task.pinned(forcing(here.task, here.mesh, key, alike, str(layout)))
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
        return Other(short_bytes=_short(tried))
    _, task, candidate, solution, text = best
    return Other(text, plan_of(task, candidate, solution), task.options.pins, wider=wider)


def _short(tried: list[tuple[Task, Candidate, str]]) -> int:
    """Bytes per device that the least demanding of these lacks."""
    least = [minimise_memory(c.problem) for _, c, _ in tried if c.problem.moments]
    return min((x.excess_bytes for x in least if x is not None), default=0)


def other_layouts(plan: Plan, task: Task, mesh: Mesh, parameter: ParameterInfo) -> tuple[list[Layout], bool]:
    """What else the search may store it as, with and without the plan's pins.

    Where that is nothing, the chosen one with an axis left whole instead of cut: True says that these are such.
    """
    chosen = parse_layout(plan.parameters[parameter.name].layout, mesh)
    free = task.pinned({k: v for k, v in task.options.pins.items() if not is_choice(k)})
    found: dict[Layout, None] = {}
    for asked in (task, free) if free.options.pins != task.options.pins else (task,):
        table = sharding.build_table(asked.captured, mesh, asked.options, rules=asked.rules)
        found |= dict.fromkeys(table.storage[parameter.name])
    others = [layout for layout in found if layout != chosen]
    if others:
        return others, False
    whole = dict.fromkeys(chosen.replace(axis, R) for axis in mesh.names)
    return [layout for layout in whole if layout != chosen], True


def forcing(task: Task, mesh: Mesh, key: str, alike: tuple[str, ...], layout: str) -> dict[str, str | int]:
    """The task's pins, this mesh, and this layout. Where a pin names some of the instances, all are pinned anew."""
    own = {k: v for k, v in task.options.pins.items() if k != key and is_choice(k)}
    touched = any(
        p.name in alike for k in own if sharding.is_layout_pin(k) for p in sharding.matching(task.captured, k)
    )
    own = {k: v for k, v in own.items() if not _within(task, k, alike)}
    wanted = dict.fromkeys((key, *(alike if touched else ())), layout)
    return {**own, **{a.name: a.size for a in mesh.axes}, **wanted}


def _within(task: Task, pin: str, alike: tuple[str, ...]) -> bool:
    """True for a layout pin of none but these parameters."""
    named = sharding.matching(task.captured, pin) if sharding.is_layout_pin(pin) else []
    return bool(named) and all(p.name in alike for p in named)


def _binding_of_parameter(
    here: OnMesh, parameter: ParameterInfo, alike: tuple[str, ...], slot: int | None, chosen: str, found: Other
) -> Binding:
    if slot is None:
        return Binding(kind="none", message="nothing: no op reads it, so it stays whole")
    pins = {k: v for k, v in here.task.options.pins.items() if _touches(here, k, parameter, alike)}
    if pins:
        return lifting(here, pins)
    texts = [str(layout) for layout in here.base.priced.options[slot]]
    limits = memory_or_objective(here, slot, texts, chosen)
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


def _touches(here: OnMesh, pin: str, parameter: ParameterInfo, alike: tuple[str, ...]) -> bool:
    """True if the pin narrows or widens how the parameter may be stored."""
    if sharding.is_layout_pin(pin):
        return any(p.name in alike for p in sharding.matching(here.task.captured, pin))
    if pin != "zero":
        return False
    free = here.task.pinned({k: v for k, v in here.task.options.pins.items() if k != "zero"})
    table = sharding.build_table(free.captured, here.mesh, free.options, rules=free.rules)
    return table.storage[parameter.name] != here.base.table.storage[parameter.name]

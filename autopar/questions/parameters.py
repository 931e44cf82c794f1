"""Why a parameter is stored as it is: each other layout forced by a pin."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Asked:
    """What parameters one answer is about: the largest of a module stands for it, a pin on that is one on all.

    `slot`: of the choice how it is stored, None where no op reads it; `alike`: what is stored by the same choice.
    """

    name: str
    key: str
    largest: ParameterInfo
    slot: int | None
    alike: tuple[str, ...]

    @classmethod
    def of(cls, name: str, key: str, members: list[ParameterInfo], task: Task) -> Asked:
        """`name`: as asked. `key`: what to pin."""
        largest = max(members, key=lambda p: p.meta.numel)
        slot = task.wiring.storage_of.get(largest.name)
        return cls(
            name, key, largest, slot, task.wiring.slots[slot].parameters if slot is not None else (largest.name,)
        )

    def answer(
        self, plan: Plan, found: Other, binding: Binding, notes: Iterable[str], *, against: Plan, against_us: float
    ) -> Explanation:  # fmt: skip
        """Of what a plan chose. Differences are to the plan `against`, whose objective is `against_us`."""
        best, mine = found.plan, plan.parameters[self.largest.name]
        is_module = self.key not in (self.largest.name, *self.largest.aliases)
        return Explanation(
            name=self.name,
            subject=f"{self.key}: {self.largest.name.removeprefix(self.key + '.')}" if is_module else self.key,
            kind="module" if is_module else "parameter",
            covers=_covers(self.alike),
            chosen=mine.layout,
            chosen_words=mine.role,
            next_best=found.text,
            next_best_words=best.parameters[self.largest.name].role if best else "",
            difference_us=best.solver.objective_us - against_us if best else None,
            difference_bytes=peak(best) - peak(against) if best else None,
            binding=binding,
            pins=found.pins,
            objective_us=against_us,
            diff=diff_plans(against, best, ("as planned", "next best")) if best else None,
            notes=tuple(notes),
        )


def explain_parameters(here: OnMesh, name: str, key: str, members: list[ParameterInfo]) -> Explanation:
    """Of the plan's mesh, solved to the end."""
    asked = Asked.of(name, key, members, here.task)
    found = _next_layout(here, key, asked.largest, asked.alike) if asked.slot is not None else Other()
    binding = _binding_of_parameter(here, asked, found)
    return asked.answer(
        here.plan, found, binding, standing(here, found), against=here.best, against_us=here.optimum.objective_us
    )


def _covers(alike: tuple[str, ...]) -> str:
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
    others = {_where_cut(layout, mesh): layout for layout in found}
    others.pop(_where_cut(chosen, mesh), None)
    if others:
        return list(others.values()), False
    whole = dict.fromkeys(chosen.replace(axis.name, R) for axis in mesh.axes if axis.size > 1)
    return [layout for layout in whole if layout != chosen], True


def forcing(task: Task, mesh: Mesh, key: str, alike: tuple[str, ...], layout: str) -> dict[str, str | int]:
    """The task's pins, this mesh, and this layout. Where a pin names some of the instances, all are pinned anew."""
    own = {k: v for k, v in task.options.pins.items() if k != key and is_choice(k)}
    touched = any(names_some(task, k, alike) for k in own)
    own = {k: v for k, v in own.items() if not _within(task, k, alike)}
    wanted = dict.fromkeys((key, *(alike if touched else ())), layout)
    return {**own, **{a.name: a.size for a in mesh.axes}, **wanted}


def _where_cut(layout: Layout, mesh: Mesh) -> Layout:
    """The layout without what it says of axes of one rank."""
    for axis in mesh.axes:
        layout = layout if axis.size > 1 else layout.replace(axis.name, R)
    return layout


def names_some(task: Task, pin: str, alike: tuple[str, ...]) -> bool:
    """True for a layout pin of some of these parameters."""
    return sharding.is_layout_pin(pin) and any(p.name in alike for p in sharding.matching(task.captured, pin))


def _within(task: Task, pin: str, alike: tuple[str, ...]) -> bool:
    """True for a layout pin of none but these parameters."""
    named = sharding.matching(task.captured, pin) if sharding.is_layout_pin(pin) else []
    return bool(named) and all(p.name in alike for p in named)


UNREAD = Binding(kind="none", message="nothing: no op reads it, so it stays whole")


def _binding_of_parameter(here: OnMesh, asked: Asked, found: Other) -> Binding:
    if asked.slot is None:
        return UNREAD
    slot, chosen = asked.slot, here.plan.parameters[asked.largest.name].layout
    pins = {k: v for k, v in here.task.options.pins.items() if _touches(here, k, asked.largest, asked.alike)}
    if pins:
        return lifting(here, pins)
    texts = [str(layout) for layout in here.base.priced.options[slot]]
    limits = memory_or_objective(here, slot, texts, chosen)
    if limits is not None:
        return limits
    return unforced(found, "on this mesh")


def unforced(found: Other, where: str) -> Binding:
    """What binds a layout that no pin forces and that would be chosen with more memory too."""
    if found.short_bytes > 0:
        lacking = f"no other layout fits, the least demanding lacks {bytes_words(found.short_bytes)} per device"
        return Binding(kind="memory", message=f"the memory limit: {lacking}")
    if not found.text:
        return Binding(kind="none", message="nothing: this mesh leaves it no other layout")
    return Binding(kind="none", message=f"nothing: it is the fastest of what a search considers {where}")


def _touches(here: OnMesh, pin: str, parameter: ParameterInfo, alike: tuple[str, ...]) -> bool:
    """True if the pin narrows or widens how the parameter may be stored."""
    if sharding.is_layout_pin(pin):
        return names_some(here.task, pin, alike)
    if pin != "zero":
        return False
    free = here.task.pinned({k: v for k, v in here.task.options.pins.items() if k != "zero"})
    table = sharding.build_table(free.captured, here.mesh, free.options, rules=free.rules)
    return table.storage[parameter.name] != here.base.table.storage[parameter.name]

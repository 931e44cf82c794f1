"""The same questions of a plan with stages: the whole search asked again, on the plan's stages, mesh and micro-batches.

Both sides of a difference are found by a search that stops within its gap, so it is as exact as these; a note says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.candidates import Task
from autopar.cost_model.places import Places
from autopar.errors import InfeasibleError, UserError
from autopar.ir.graph import Graph, Node, ParameterInfo
from autopar.ir.mesh import Mesh
from autopar.ir.options import Options
from autopar.ir.plan import STAGE, Plan
from autopar.present.plan_diff import diff_plans
from autopar.present.words import bytes_words, time_words
from autopar.questions.answers import Binding, Explanation
from autopar.questions.on_mesh import Other, Progress, is_choice, peak
from autopar.questions.ops import instances, subject, words
from autopar.questions.parameters import covers, forcing, other_layouts

Search = Callable[[Options], Plan]
"""The whole search under other options. InfeasibleError: nothing fits; UserError: a pin can't hold."""
UNLIMITED = 2**62
"""Bytes per device that no step needs."""


@dataclass(frozen=True, slots=True)
class OnStages:
    """A plan and how to search again beside it. `mesh`: of one stage."""

    plan: Plan
    task: Task
    mesh: Mesh
    search: Search
    progress: Progress

    def again(self, pins: Mapping[str, str | int], *, memory_limit: int | None = None) -> Plan:
        """The best plan under these pins on the same stages, mesh and micro-batches."""
        options = self.task.options
        return self.search(
            replace(
                options,
                pins={**pins, **{a.name: a.size for a in self.mesh.axes}, STAGE: self.plan.mesh.pipeline},
                micro_batches=self.plan.schedule.micro_batches,
                memory_limit=memory_limit if memory_limit is not None else options.memory_limit,
                objective="time" if options.objective == "cost" else options.objective,
            )
        )

    @property
    def choices(self) -> dict[str, str | int]:
        """The plan's own pins of how parameters are stored."""
        return {k: v for k, v in self.task.options.pins.items() if is_choice(k)}


def explain_parameters(here: OnStages, name: str, key: str, members: list[ParameterInfo]) -> Explanation:
    """The largest parameter stands for its module, as in plans of one stage."""
    largest = max(members, key=lambda p: p.meta.numel)
    slot = here.task.wiring.storage_of.get(largest.name)
    mine = here.plan.parameters[largest.name]
    alike = here.task.wiring.slots[slot].parameters if slot is not None else (largest.name,)
    found = _next_layout(here, key, largest, alike) if slot is not None else Other()
    best = found.plan
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
        difference_us=best.solver.objective_us - here.plan.solver.objective_us if best else None,
        difference_bytes=peak(best) - peak(here.plan) if best else None,
        binding=_binding(here, largest.name, key, found, read=slot is not None),
        pins=found.pins,
        objective_us=here.plan.solver.objective_us,
        diff=diff_plans(here.plan, best, ("as planned", "next best")) if best else None,
        notes=tuple(_standing(here, found)),
    )


def _next_layout(here: OnStages, key: str, parameter: ParameterInfo, alike: tuple[str, ...]) -> Other:
    layouts, wider = other_layouts(here.plan, here.task, here.mesh, parameter)
    found: list[Other] = []
    short: list[int] = []
    for i, layout in enumerate(layouts):
        here.progress(f"{key} as {layout}", i / len(layouts))
        pins = forcing(here.task, here.mesh, key, alike, str(layout))
        try:
            found.append(Other(str(layout), here.again(pins), {**pins, STAGE: here.plan.mesh.pipeline}, wider=wider))
        except InfeasibleError as error:
            short.append(error.needed_bytes - error.budget_bytes)
        except UserError:
            continue
    if not found:
        return Other(short_bytes=min((x for x in short if x > 0), default=0))
    return min(found, key=lambda other: other.plan.solver.objective_us if other.plan else 0.0)


def _binding(here: OnStages, name: str, key: str, found: Other, *, read: bool) -> Binding:
    if not read:
        return Binding(kind="none", message="nothing: no op reads it, so it stays whole")
    if here.choices:
        return _lifting(here, name)
    here.progress(f"{key} without a limit of memory", 0.0)
    free = here.again({}, memory_limit=UNLIMITED)
    otherwise = free.parameters[name].layout
    price = here.plan.solver.objective_us - free.solver.objective_us
    if otherwise != here.plan.parameters[name].layout and price > 0:
        message = (
            f"the memory limit of {bytes_words(here.task.limit_bytes)} per device: without it this would be "
            f"{otherwise}, and a step would take {time_words(price)} less"
        )
        return Binding(kind="memory", message=message, price_us=price)
    if found.short_bytes > 0:
        lacking = f"no other layout fits, the least demanding lacks {bytes_words(found.short_bytes)} per device"
        return Binding(kind="memory", message=f"the memory limit: {lacking}")
    if not found.text:
        return Binding(kind="none", message="nothing: this mesh leaves it no other layout")
    return Binding(kind="none", message="nothing: it is the fastest of what a search considers on these stages")


def _lifting(here: OnStages, name: str) -> Binding:
    """What the plan's own pins of layouts cost together."""
    said = ", ".join(f"{k}={v}" for k, v in here.choices.items())
    free = here.again({})
    saved = here.plan.solver.objective_us - free.solver.objective_us
    if saved <= 0 or free.parameters[name].layout == here.plan.parameters[name].layout:
        return Binding(kind="pin", message=f"pin {said}: without it nothing faster was found on these stages")
    words = f"pin {said}: without it a step would take {time_words(saved)} less on these stages"
    return Binding(kind="pin", message=words, price_us=saved)


def _standing(here: OnStages, found: Other) -> Iterator[str]:
    """What limits the answer's exactness."""
    if found.plan is not None:
        gaps = f"{here.plan.solver.gap:.2%} and {found.plan.solver.gap:.2%}"
        yield f"both plans are within {gaps} of the best, so the difference is exact to that"
    if found.wider:
        yield "a search on this mesh has one layout for it; the next best was forced from outside what it looks at"


def explain_op(here: OnStages, name: str, graph: Graph, node: Node) -> Explanation:
    """The ways that stages run the op in. What another would cost is not asked: an op follows its tensors."""
    ways: dict[str, list[str]] = {}
    for way, strategies in here.plan.strategies.items():
        if way.partition("#")[0] == graph.name and node.key in strategies:
            s = strategies[node.key]
            ways.setdefault(words(tuple(s.inputs), tuple(s.outputs), tuple(s.tags)), []).append(way)
    chosen = "; ".join(f"{text} ({', '.join(of)})" if len(ways) > 1 else text for text, of in ways.items())
    return Explanation(
        name=name,
        subject=subject(Places.of(here.task.captured), graph, node),
        kind="op",
        covers=instances(here.task, graph),
        chosen=chosen,
        chosen_words="",
        next_best="",
        next_best_words="",
        difference_us=None,
        difference_bytes=None,
        binding=Binding(kind="none", message="its tensors' layouts: ask for the parameter that it reads"),
        pins={},
        objective_us=here.plan.solver.objective_us,
        diff=None,
        notes=("of a plan with stages, what another way of one op would cost is not searched",),
    )

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
from autopar.present.words import bytes_words, time_words
from autopar.questions.answers import Binding, Explanation
from autopar.questions.on_mesh import Other, Progress, is_choice
from autopar.questions.ops import instances, subject, words
from autopar.questions.parameters import UNREAD, Asked, forcing, names_some, other_layouts, unforced

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
    """Beside the plan itself."""
    asked = Asked.of(name, key, members, here.task)
    found = _next_layout(here, key, asked.largest, asked.alike) if asked.slot is not None else Other()
    binding = _binding(here, asked, found)
    return asked.answer(
        here.plan, found, binding, _standing(here, found), against=here.plan,
        against_us=here.plan.solver.objective_us,
    )  # fmt: skip


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


def _binding(here: OnStages, asked: Asked, found: Other) -> Binding:
    if asked.slot is None:
        return UNREAD
    name = asked.largest.name
    pins = {k: v for k, v in here.choices.items() if k == "zero" or names_some(here.task, k, asked.alike)}
    if pins:
        return _lifting(here, name, pins)
    here.progress(f"{asked.key} without a limit of memory", 0.0)
    free = here.again(here.choices, memory_limit=UNLIMITED)
    otherwise = free.parameters[name].layout
    price = here.plan.solver.objective_us - free.solver.objective_us
    if otherwise != here.plan.parameters[name].layout and price > 0:
        message = (
            f"the memory limit of {bytes_words(here.task.limit_bytes)} per device: without it this would be "
            f"{otherwise}, and a step would take {time_words(price)} less"
        )
        return Binding(kind="memory", message=message, price_us=price)
    return unforced(found, "on these stages")


def _lifting(here: OnStages, name: str, pins: Mapping[str, str | int]) -> Binding:
    """What these of the plan's own pins cost together."""
    said = ", ".join(f"{k}={v}" for k, v in pins.items())
    free = here.again({k: v for k, v in here.choices.items() if k not in pins})
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
        schedules = "".join(f" --space schedule={name}" for name in here.task.options.schedules)
        yield f"forced with --micro-batches {here.plan.schedule.micro_batches}{schedules} as well"
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

"""`why_not`: a search under other pins, beside the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from autopar import sharding
from autopar.candidates import Task
from autopar.errors import InfeasibleError, UserError
from autopar.ir.options import DEGREE_NAMES, Options
from autopar.ir.plan import Plan
from autopar.present.arguments import split_pins
from autopar.present.plan_diff import diff_plans
from autopar.present.words import bytes_words, time_words
from autopar.questions.answers import WhyNot
from autopar.questions.explain import unknown_words


def why_not(plan: Plan, asked: str | Mapping[str, str | int], task: Task, search: Callable[[Options], Plan]) -> WhyNot:
    """See `WhyNot`. `asked`: pins as a shell gives them ("dp=4 tp=2", "zero=3", "blocks.*.mlp=tp:S(0)"), or a mapping.

    Raises UserError for what is no pin, or names nothing in the model.
    """
    pins = split_pins(asked, "why not") if isinstance(asked, str) else dict(asked)
    said = " ".join(f"{k}={v}" for k, v in pins.items())
    for pattern in filter(sharding.is_layout_pin, pins):
        if not pattern.startswith(sharding.INPUT) and not sharding.matching(task.captured, pattern):
            raise UserError(unknown_words(task, pattern))
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

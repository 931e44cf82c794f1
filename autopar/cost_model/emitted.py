"""A plan's times once its program is known: where lowering saves a copy, or makes one, that the search did not count.

The search prices a slice as a copy unless what is cut is there throughout; lowering takes more of them as views, and
copies what waits for the backward out of larger storages (`codegen.storages`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import msgspec

from autopar.cost_model.context import Prices
from autopar.ir.plan import Plan, PlanPrediction, PlanReshard
from autopar.ir.program import Convert, Keep, Program

Key = tuple[str, str, str, str]


def as_emitted(plan: Plan, program: Program, prices: Prices) -> Plan:
    """The plan with the times of its program's slices and copies; the solver's own figures stay."""
    converts: dict[Key, list[Convert]] = defaultdict(list)
    for function in program.functions:
        for convert in function.converts():
            key = (function.graph, convert.before.value, str(convert.before.layout), str(convert.after.layout))
            converts[key].append(convert)
    found = [_priced(entry, converts, program, prices) for entry in plan.conversions]
    converted = sum(
        (new.us - old.us) * new.count for new, old in zip(found, plan.conversions, strict=True) if new is not old
    )
    copies = list(_copies(program, prices))
    strategies = {graph: dict(nodes) for graph, nodes in plan.strategies.items()}
    for graph, op, us, _ in copies:
        maker = strategies[graph][op]
        strategies[graph][op] = msgspec.structs.replace(maker, us=maker.us + us)
    copied = sum(us * calls for _, _, us, calls in copies)
    return msgspec.structs.replace(
        plan, conversions=found, strategies=strategies, predicted=_later(plan.predicted, converted, copied)
    )


def _priced(entry: PlanReshard, converts: dict[Key, list[Convert]], program: Program, prices: Prices) -> PlanReshard:
    """An entry as its conversion is emitted: entries of one value are in the order of their conversions."""
    mine = converts[entry.graph, entry.value, entry.before, entry.after]
    if not mine:
        return entry
    meta = program.metas[entry.graph][entry.value]
    steps = [prices.reshard_us(meta, p.step.before, p.step.after, p.view) for p in mine.pop(0).steps]
    return entry if steps == entry.steps_us else msgspec.structs.replace(entry, us=sum(steps), steps_us=steps)


def _copies(program: Program, prices: Prices) -> Iterator[tuple[str, str, float, int]]:
    """(graph, op that makes it, µs, how often) of what is copied out: its maker's time."""
    for function in program.functions:
        calls = len(program.calls.get(function.block, ("",)))
        for step in function.steps:
            if isinstance(step, Keep):
                yield function.graph, step.place.key, prices.copy_us(step.local.meta.nbytes), calls


def _later(predicted: PlanPrediction, communication_us: float, compute_us: float) -> PlanPrediction:
    """The step with so much more of each."""
    more = {"communication": communication_us, "compute": compute_us}
    spent = dict(predicted.breakdown_us)
    for what, us in more.items():
        if us:
            spent[what] = max(0.0, spent.get(what, 0.0) + us)
    step = predicted.step_time_us + sum(more.values())
    part = predicted.step_time_us / step if step else 1.0
    return msgspec.structs.replace(
        predicted, step_time_us=step, tokens_per_s=predicted.tokens_per_s * part, mfu=predicted.mfu * part,
        breakdown_us=spent, device_hours_per_million_tokens=predicted.device_hours_per_million_tokens / (part or 1.0),
    )  # fmt: skip

"""`explain`: from a name to what it names, and from there to the answer."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from autopar import sharding
from autopar.candidates import Task
from autopar.errors import UserError
from autopar.ir.graph import Graph, Node, ParameterInfo
from autopar.ir.plan import Plan, is_staged, mesh_of
from autopar.present.words import pattern_of
from autopar.questions import stages
from autopar.questions.answers import Explanation
from autopar.questions.on_mesh import Progress, as_planned, on_mesh
from autopar.questions.ops import explain_op, find_ops, more_ops
from autopar.questions.parameters import by_module, explain_parameters
from autopar.questions.stages import OnStages, Search


def explain(plan: Plan, name: str, task: Task, search: Search, progress: Progress) -> Explanation:
    """See `Explanation`. `name`: a parameter, a module path, a pattern with `*`, or an op's key.

    `search`: the whole search under other options; plans with stages ask it.

    Raises UserError with the closest names where nothing is called so.
    """
    task = as_planned(task, plan)
    matched = sharding.matching(task.captured, name)
    ops = [] if matched else find_ops(task, name)
    if not matched and not ops:
        raise UserError(unknown_words(task, name))
    of_parameters: Callable[[str, str, list[ParameterInfo]], Explanation]
    of_op: Callable[[str, Graph, Node], Explanation]
    if is_staged(plan):
        staged = OnStages(plan, task, mesh_of(plan), search, progress)
        of_parameters, of_op = partial(stages.explain_parameters, staged), partial(stages.explain_op, staged)
    else:
        here = on_mesh(plan, task, progress)
        of_parameters, of_op = partial(explain_parameters, here), partial(explain_op, here)
    if ops:
        answer = of_op(name, *ops[0])
        return replace(answer, notes=(*answer.notes, *more_ops(ops)))
    modules = by_module(matched, task, name)
    parts = []
    for i, (key, members) in enumerate(modules.items()):
        progress(f"other layouts of {key}", i / len(modules))
        parts.append(of_parameters(name, key, members))
    if len(parts) == 1:
        return parts[0]
    known = [p for p in parts if p.difference_us is not None]
    cheapest = min(known, key=lambda p: p.difference_us or 0.0) if known else parts[0]
    return replace(cheapest, parts=tuple(parts))


def unknown_words(task: Task, name: str) -> str:
    """That nothing is called so, and what is called nearly so."""
    names = {p for i in task.captured.parameters for n in (i.name, *i.aliases) for p in _and_parents(n)}
    ops = {f"{g.name}: {n.key}" for g in task.captured.graphs for n in g.nodes if n.block is None}
    near = difflib.get_close_matches(name, sorted(names), n=3, cutoff=0.5)
    near = near or difflib.get_close_matches(pattern_of(name), sorted(names | ops), n=3, cutoff=0.3)
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    return f"{name!r} is no parameter, module or op of {task.captured.model_name}{hint}"


def _and_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]

"""A plan on a screen: mesh, layouts by parameter group, predicted time and memory, dear conversions, solver, notes."""

from __future__ import annotations

import io
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from autopar.errors import UserError
from autopar.ir.options import COMPUTE_DTYPE, HALF
from autopar.ir.plan import (
    AGAIN,
    Plan,
    PlanInput,
    PlanNote,
    PlanParameter,
    PlanPrediction,
    PlanReshard,
    PlanStage,
    memory_limit_bytes,
)
from autopar.ir.reshard import Collective
from autopar.present.words import bar, bytes_words, count_words, group_name, pattern_of, shorten, time_words

CONVERSIONS_SHOWN = 6
NOTES_SHOWN = 8
LARGEST_SHOWN = 4
SUMS = (Collective.ALL_REDUCE.value, Collective.REDUCE_SCATTER.value)
SOURCE_SHOWN = 200
"""Characters of the cost source; the plan's JSON has all of it."""

WIDE = 100
"""From this many columns on, a parameter's own bytes are shown beside those of its group with optimizer state."""


def plan_text(plan: Plan, width: int | None = None) -> str:
    """The plan as plain text, `width` columns wide (None: the terminal's)."""
    columns = width or terminal_columns()
    return plain(plan_view(plan, columns), columns)


def terminal_columns() -> int:
    """How wide the terminal is; 100 where there is none."""
    return shutil.get_terminal_size((100, 24)).columns


def plain(view: RenderableType, columns: int) -> str:
    """What a rich console would print, without colours and trailing spaces."""
    console = Console(file=io.StringIO(), width=columns, color_system=None, force_terminal=False, highlight=False)
    console.print(view)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def plan_view(plan: Plan, width: int) -> RenderableType:
    """The plan as something that a rich console of this width prints."""
    limit = memory_limit_bytes(plan)
    parts: list[RenderableType] = [
        _head(plan, limit),
        _section("Layouts"),
        _parameters(plan.parameters, wide=width >= WIDE),
        _section("Predicted step"),
        _shares(plan.predicted.breakdown_us, plan.predicted.step_time_us, time_words),
        _section("Memory per device"),
        _shares(plan.predicted.breakdown_bytes, limit or plan.predicted.peak_memory_bytes, bytes_words),
    ]
    if len(plan.stages) > 1:
        parts[1:1] = [_section("Stages"), _stages(plan)]
    if plan.predicted.memory_largest:
        parts.append(Text(_at_peak(plan.predicted), style="dim"))
    if any(c.us > 0 for c in plan.conversions):
        parts += [
            _section("Communication that costs most"),
            # Stages work side by side: what all of them send is held against as many steps.
            _conversions(plan.conversions, plan.predicted.step_time_us * plan.mesh.pipeline),
        ]
    if plan.notes:
        parts += [_section("Notes"), *notes_view(plan.notes)]
    return Group(*parts, Text(f"\ncosts from: {shorten(plan.predicted.cost_source, SOURCE_SHOWN)}", style="dim"))


def _at_peak(p: PlanPrediction) -> str:
    """When the peak is, and what holds the most of it."""
    listed = ", ".join(f"{what} {bytes_words(size)}" for what, size in list(p.memory_largest.items())[:LARGEST_SHOWN])
    return f"peak at {p.memory_at}: {listed}"


def _section(title: str) -> Text:
    return Text(f"\n{title}", style="bold")


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    return grid


def _head(plan: Plan, limit: int | None) -> RenderableType:
    grid = _grid()
    for what, words in head_rows(plan, limit):
        grid.add_row(what, Text(words))
    return grid


def head_rows(plan: Plan, limit: int | None) -> Iterator[tuple[str, str]]:
    """(what, in words) of a plan at a glance. `limit`: bytes per device."""
    p = plan.predicted
    yield "model", f"{plan.model.name} ({count_words(plan.model.parameters)} parameters), {plan.precision}"
    if plan.precision in HALF:
        yield "dtypes", dtype_words(plan)
    if plan.request is not None and plan.request.inputs:
        yield "batch", inputs_words(plan.request.inputs)
    yield "cluster", f"{plan.cluster.name} ({plan.cluster.devices} devices)"
    yield "mesh", mesh_words(plan)
    if plan.mesh.pipeline > 1 or plan.schedule.micro_batches > 1:
        s = plan.schedule
        chunks = f" of {s.chunks} chunks a stage" if s.chunks > 1 else ""
        stages = f"{plan.mesh.pipeline} stages, " if plan.mesh.pipeline > 1 else ""
        yield "schedule", f"{stages}{s.name}{chunks}, {s.micro_batches} micro-batches"
    yield "step", f"{time_words(p.step_time_us)}, {count_words(p.tokens_per_s)} tokens/s, MFU {p.mfu:.1%}"
    if p.device_hours_per_million_tokens:
        yield "cost", f"{p.device_hours_per_million_tokens:.3g} device-hours per million tokens"
    of = f" of {bytes_words(limit)} ({p.peak_memory_bytes / limit:.0%})" if limit else ""
    yield "memory", f"{bytes_words(p.peak_memory_bytes)}{of} per device"
    if plan.later:
        yield "backward", later_words(plan)
    yield "solver", solver_words(plan)
    if plan.pins:
        yield "pins", ", ".join(f"{k}={v}" for k, v in plan.pins.items())
    if asked := asked_words(plan):
        yield "asked", asked


def dtype_words(plan: Plan) -> str:
    """ "bfloat16 ops; float32 parameters and updates; gradients summed in float32"."""
    stored = list(dict.fromkeys(p.dtype for p in plan.parameters.values() if p.dtype))
    summed = list(dict.fromkeys(c.dtype for c in plan.conversions if c.dtype and is_gradient_sum(c)))
    words = [f"{COMPUTE_DTYPE[plan.precision]} ops"]
    words += [f"{' and '.join(stored)} parameters and updates"] if stored else []
    words += [f"gradients summed in {' and '.join(summed)}"] if summed else []
    return "; ".join(words)


def is_gradient_sum(c: PlanReshard) -> bool:
    """True of a conversion that adds up a parameter's gradient over ranks."""
    return c.where.startswith("gradient of ") and any(step.startswith(SUMS) for step in c.steps)


def asked_words(plan: Plan) -> str:
    """What else the search was asked, that is not as it is unless told: all that limited it beside the pins."""
    options = plan.request.options if plan.request is not None else {}
    return ", ".join(
        f"{name} {_asked_value(name, value)}" for name, value in options.items() if name not in ("pins", "precision")
    )


def _asked_value(name: str, value: object) -> str:
    if name == "memory_limit" and isinstance(value, int):
        return bytes_words(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{k}={_asked_value('', v)}" for k, v in value.items()) or "none"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " or ".join(map(str, value)) or "none"
    return str(value)


def _stages(plan: Plan) -> Table:
    """One row for each run of stages that are alike."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("stage", "devices", "blocks", "a micro-batch", "kept", "made again", "memory"):
        table.add_column(name, justify="left" if name in ("stage", "blocks") else "right", overflow="fold")
    alike: list[list[PlanStage]] = []
    for stage in plan.stages:
        if alike and _stage_row(alike[-1][0]) == _stage_row(stage):
            alike[-1].append(stage)
        else:
            alike.append([stage])
    for group in alike:
        first, last = group[0], group[-1]
        most = max(s.peak_memory_bytes for s in group)
        which = f"{first.index}" if first is last else f"{first.index} to {last.index}"
        table.add_row(which, *_stage_row(first), bytes_words(most))
    return table


def _stage_row(stage: PlanStage) -> tuple[str, ...]:
    blocks = ", ".join(f"{n} {path}" for path, n in stage.blocks)
    counts = (str(stage.saved_count), str(stage.recomputed_count))
    return str(stage.devices), blocks, time_words(stage.busy_us), *counts


def later_words(plan: Plan) -> str:
    """ "finds 17 tensors kept and makes 13 again: gelu, mul of GPT2Block": what the backward reads of the forward."""
    later = {graph: found for graph, found in plan.later.items() if "#" not in graph}  # ways: see the stages
    kept = sum(how != AGAIN for found in later.values() for how in found.values())
    again = {
        graph: list(dict.fromkeys(_op_word(key) for key, how in found.items() if how == AGAIN))
        for graph, found in later.items()
    }
    count = sum(how == AGAIN for found in later.values() for how in found.values())
    if not count:
        return f"finds {kept} tensors kept, makes none again"
    where = "; ".join(f"{', '.join(ops)} of {_graph_word(graph)}" for graph, ops in again.items() if ops)
    return f"finds {kept} tensors kept and makes {count} again: {where}"


def _graph_word(graph: str) -> str:
    """A block's class, of its name "GPT2Block_261212"; the model of "top"."""
    return "the model outside blocks" if graph == "top" else graph.rpartition("_")[0] or graph


def _op_word(key: str) -> str:
    """`gelu` of an op's key "mlp/aten.gelu.default/forward#0"."""
    parts = key.split("/")
    return parts[-2].removeprefix("aten.").rpartition(".")[0] if len(parts) > 2 else key


def inputs_words(inputs: Mapping[str, PlanInput]) -> str:
    """`16 × 1024 (input_ids, labels)`: the global batch, inputs of one shape together."""
    alike: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for path, tensor in inputs.items():
        alike[tensor.shape].append(path)
    return ", ".join(
        f"{' × '.join(map(str, shape)) or 'a scalar'} ({', '.join(paths)})" for shape, paths in alike.items()
    )


def mesh_words(plan: Plan) -> str:
    """`dp=2 over infiniband × tp=8 over nvlink4`."""
    links = [level.name for level in plan.cluster.spec.levels] if plan.cluster.spec is not None else []

    def axis(name: str, size: int) -> str:
        level = plan.mesh.levels.get(name)
        if size == 1 or level is None:
            return f"{name}={size}"
        return f"{name}={size} over {links[level] if level < len(links) else f'link level {level}'}"

    axes = " × ".join(axis(n, s) for n, s in plan.mesh.axes.items()) or "one device"
    return f"{axes} × {plan.mesh.pipeline} stages" if plan.mesh.pipeline > 1 else axes


def solver_words(plan: Plan) -> str:
    """How sure the solver is, and what memory is worth."""
    s = plan.solver
    words = f"{s.status.replace('_', ' ')}, gap {s.gap:.2%}, {s.time_s:.1f} s"
    if s.memory_price > 0:
        words += f"; one more GiB per device would save {time_words(s.memory_price * 2**30)} a step"
    return words


def _parameters(parameters: Mapping[str, PlanParameter], *, wide: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("parameters", overflow="fold", ratio=3)
    table.add_column("n", justify="right", no_wrap=True)
    table.add_column("as", overflow="fold", ratio=2)
    table.add_column("layout", overflow="fold", ratio=2)
    if wide:
        table.add_column("each", justify="right", no_wrap=True)
    table.add_column("all + state", justify="right", no_wrap=True)
    above = ""
    for name, members in parameter_groups(parameters):
        first, n = members[0], len(members)
        prefix, name = _split(name)
        if prefix and prefix != above:
            table.add_row(prefix)
        above = prefix
        state = n * (first.bytes_per_device + first.optimizer_bytes_per_device)
        sizes = [bytes_words(first.bytes_per_device)] if wide else []
        table.add_row(name, str(n), first.role, first.layout, *sizes, bytes_words(state))
    return table


def parameter_groups(parameters: Mapping[str, PlanParameter]) -> Iterator[tuple[str, list[PlanParameter]]]:
    """(name with `*`, members) of parameters that differ in indices only and are laid out alike, in plan order.

    Which stage a parameter is on is no difference.
    """
    groups: dict[tuple[str, PlanParameter], dict[str, PlanParameter]] = defaultdict(dict)
    for name, p in parameters.items():
        groups[pattern_of(name), msgspec.structs.replace(p, stage=0)][name] = p
    per_pattern = Counter(key[0] for key in groups)
    for key, members in groups.items():
        yield group_name(members, alone=per_pattern[key[0]] == 1), list(members.values())


def _split(name: str) -> tuple[str, str]:
    """`model.layers.*` and `  mlp.up_proj.weight` of their join; no prefix where nothing repeats."""
    parts = name.split(".")
    at = max((i for i, part in enumerate(parts) if part == "*" or part.startswith("{")), default=-1)
    return (".".join(parts[: at + 1]), "  " + ".".join(parts[at + 1 :])) if at >= 0 else ("", name)


def _shares(breakdown: Mapping[str, float], whole: float, words: Callable[[float], str]) -> Table:
    """A bar for each part of `whole`, largest first."""
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(ratio=1)
    for what, amount in sorted(breakdown.items(), key=lambda item: -item[1]):
        if amount > 0:
            part = amount / whole if whole else 0.0
            table.add_row(what, words(amount), f"{part:.1%}", _Bar(part))
    return table


class _Bar:
    """A bar that fills as much of its cell as `part` says."""

    def __init__(self, part: float) -> None:
        self.part = part

    def __rich_console__(self, console: Console, options: object) -> Iterator[Text]:
        """Rich's protocol: what to print in the width given."""
        width = getattr(options, "max_width", 40)
        yield Text(bar(self.part, min(width, 60)), style="cyan", no_wrap=True)


def conversion_groups(conversions: Sequence[PlanReshard]) -> list[list[PlanReshard]]:
    """Conversions that cost something, those of alike steps and layouts together, the dearest first."""
    totals: dict[tuple[str, str, str], list[PlanReshard]] = defaultdict(list)
    for c in (c for c in conversions if c.us > 0):
        totals[" then ".join(c.steps), c.before, c.after].append(c)
    rows = [sorted(group, key=lambda c: -c.us * c.count) for group in totals.values()]
    return sorted(rows, key=lambda group: -sum(c.us * c.count for c in group))


def conversion_name(c: PlanReshard) -> str:
    """Which tensor, layers folded. Plans of before `where` was kept have only the graph's own name."""
    return pattern_of(c.where or c.value)


def _conversions(conversions: Sequence[PlanReshard], step_us: float) -> Table:
    """Conversions of alike values added up, the dearest first."""
    rows = conversion_groups(conversions)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("step", overflow="fold", ratio=2)
    table.add_column("from → to", overflow="fold", ratio=2)
    table.add_column("of", overflow="fold", ratio=2)
    table.add_column("times", justify="right", no_wrap=True)
    table.add_column("total", justify="right", no_wrap=True)
    table.add_column("of step", justify="right", no_wrap=True)
    for group in rows[:CONVERSIONS_SHOWN]:
        table.add_row(*_conversion_row(group, step_us))
    rest = [c for group in rows[CONVERSIONS_SHOWN:] for c in group]
    if rest:
        us = sum(c.us * c.count for c in rest)
        count = sum(c.count for c in rest)
        table.add_row(
            f"{len(rows) - CONVERSIONS_SHOWN} more kinds", "", "", str(count), time_words(us), _part(us, step_us)
        )
    return table


def _conversion_row(group: Sequence[PlanReshard], step_us: float) -> tuple[str, ...]:
    first = group[0]
    us = sum(c.us * c.count for c in group)
    names = list(dict.fromkeys(conversion_name(c) for c in group))
    of = names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
    arrow = f"{first.before} → {first.after}"
    count = sum(c.count for c in group)
    return " then ".join(first.steps), arrow, of, str(count), time_words(us), _part(us, step_us)


def parameter_view(plan: Plan, pattern: str, width: int) -> tuple[RenderableType, dict[str, object]]:
    """Parameters that match a name or a pattern, with their conversions; and the same as plain data.

    Raises UserError with the closest names where nothing matches.
    """
    names = [n for n in plan.parameters if fnmatchcase(n, pattern) or fnmatchcase(pattern_of(n), pattern)]
    if not names:
        near = get_close_matches(pattern, plan.parameters, n=3, cutoff=0.3)
        hint = f"; closest: {', '.join(near)}" if near else ""
        raise UserError(f"--param {pattern}: no such parameter in the plan for {plan.model.name}{hint}")
    chosen = {n: plan.parameters[n] for n in names}
    patterns = {pattern_of(n) for n in names}
    moved = [c for c in plan.conversions if pattern_of(_tensor(c)) in patterns]
    parts: list[RenderableType] = [_parameters(chosen, wide=width >= WIDE)]
    if moved:
        parts += [_section("Conversions"), _conversions(moved, plan.predicted.step_time_us)]
    data: dict[str, object] = {
        "parameters": {n: msgspec.to_builtins(p) for n, p in chosen.items()},
        "conversions": [msgspec.to_builtins(c) for c in moved],
    }
    return Group(*parts), data


def _tensor(c: PlanReshard) -> str:
    """The parameter that a conversion is of, or whose gradient; where it is of another tensor, its maker."""
    return (c.where or c.value).removeprefix("gradient of ").partition(" (")[0]


def _part(us: float, step_us: float) -> str:
    return f"{us / step_us:.1%}" if step_us else ""


def notes_view(notes: Sequence[PlanNote], shown: int | None = NOTES_SHOWN) -> Iterator[RenderableType]:
    """Notes that say the same, once, with how many places; at most `shown` (None: all).

    Regions come first, then what is said most often.
    """
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for note in notes:
        alike[note.kind, note.message].append(note.where)
    ordered = sorted(alike.items(), key=lambda item: (item[0][0] != "region", -len(item[1])))
    grid = _grid()
    for (kind, message), places in ordered[:shown]:
        more = f" and {len(places) - 1} more places" if len(places) > 1 else ""
        grid.add_row(kind, f"{message} — {places[0]}{more}" if places[0] else message)
    yield grid
    if shown is not None and len(ordered) > shown:
        yield Text(f"{len(ordered) - shown} more notes: `autopar inspect PLAN --notes`", style="dim")

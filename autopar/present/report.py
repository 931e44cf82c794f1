"""A plan as one HTML page: no script, no font, no picture from anywhere else, so that it can be mailed and kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from autopar.errors import UserError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan, PlanNote, memory_limit_bytes
from autopar.present.plan_text import (
    asked_words,
    conversion_groups,
    conversion_name,
    inputs_words,
    mesh_words,
    parameter_groups,
    solver_words,
)
from autopar.present.words import bytes_words, count_words, time_words

CONVERSIONS_SHOWN = 20
PLACES_SHOWN = 5
COLOURS = ("#3b6fd4", "#e08a2e", "#3f9c6b", "#b2508c", "#8a8f98", "#7a5cc9", "#c9463d")
"""Of a breakdown's parts, largest first; told apart by the common kinds of colour blindness, and named beside."""

STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #5d6675; --line: #dfe3ea; --page: #f6f7f9; --card: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ef; --soft: #9aa3b2; --line: #333a47; --page: #14171c; --card: #1d2129; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 26px; margin: 0 0 2px; } h2 { font-size: 17px; margin: 0 0 12px; }
.sub { color: var(--soft); margin: 0 0 24px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px;
  margin: 16px 0; overflow-x: auto; }
.figures { display: flex; flex-wrap: wrap; gap: 12px; margin: 0; }
.figures div { flex: 1 1 140px; background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; padding: 12px 16px; }
.figures dt { color: var(--soft); font-size: 13px; } .figures dd { margin: 0; font-size: 23px; font-weight: 600; }
.figures small { display: block; color: var(--soft); font-size: 12px; font-weight: 400; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--soft); font-weight: 500; font-size: 13px; }
th, td { padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
td.n, th.n { text-align: right; white-space: nowrap; }
code { font: 13px/1.4 ui-monospace, "SF Mono", Menlo, Consolas, monospace; overflow-wrap: anywhere; }
code.whole { white-space: nowrap; }
svg { width: 100%; height: 26px; display: block; border-radius: 5px; background: var(--line); }
.key { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 8px; }
.facts th { width: 130px; } .facts td { border: 0; } .facts th { border: 0; }
footer { color: var(--soft); font-size: 13px; }
"""


def write_report(plan: Plan, path: str | Path) -> None:
    """Write the page. UserError where that can't be."""
    target = Path(path)
    try:
        target.write_text(report(plan), "utf-8")
    except OSError as error:
        raise UserError(f"report {target}: cannot be written ({error.strerror})") from None


def report(plan: Plan) -> str:
    """The page as text."""
    limit = memory_limit_bytes(plan)
    p = plan.predicted
    title = f"{plan.model.name} on {plan.cluster.name}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="sub">A parallel training plan: {escape(mesh_words(plan))}</p>',
        _figures(plan, limit),
        _section("Predicted step", _breakdown(p.breakdown_us, p.step_time_us, time_words, "step")),
        _section(
            "Memory per device", _breakdown(p.breakdown_bytes, limit or p.peak_memory_bytes, bytes_words, "limit")
        ),
        _section("Layouts", _layouts(plan)),
        _section("Communication", _conversions(plan)) if any(c.us > 0 for c in plan.conversions) else "",
        _section("How sure", _facts(_standing(plan, limit))),
        _section("What was planned for", _facts(_setting(plan))),
        _section("Cluster", _cluster(plan.cluster.spec)) if plan.cluster.spec is not None else "",
        _section("Notes", _notes(plan.notes)) if plan.notes else "",
        f"<footer><p>Costs from: {escape(p.cost_source)}</p></footer>",
    ]
    body = "\n".join(part for part in parts if part)
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
    )
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>{head}</head>\n<body><main>\n{body}\n</main></body>\n</html>\n'


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _figures(plan: Plan, limit: int | None) -> str:
    p, s = plan.predicted, plan.solver
    of = f"{p.peak_memory_bytes / limit:.0%} of {bytes_words(limit)}" if limit else "per device"
    cards = (
        ("Step", time_words(p.step_time_us), "predicted"),
        ("Throughput", f"{count_words(p.tokens_per_s)}/s", "tokens"),
        ("MFU", f"{p.mfu:.1%}", "of the devices' peak"),
        ("Memory", bytes_words(p.peak_memory_bytes), of),
        ("Devices", str(plan.cluster.devices), " × ".join(f"{n} {k}" for n, k in plan.mesh.axes.items()) or "one"),
        ("Solver", f"{s.gap:.2%} gap", s.status.replace("_", " ")),
    )
    inner = "".join(
        f"<div><dt>{escape(what)}</dt><dd>{escape(figure)}<small>{escape(more)}</small></dd></div>"
        for what, figure, more in cards
    )
    return f'<dl class="figures">{inner}</dl>'


def _breakdown(parts: Mapping[str, float], whole: float, say: Callable[[float], str], of: str) -> str:
    """One bar of all parts beside each other, and a row for each."""
    shown = sorted(((w, x) for w, x in parts.items() if x > 0), key=lambda item: -item[1])
    scale = max(whole, sum(x for _, x in shown)) or 1.0
    at, bars, rows = 0.0, [], []
    for i, (what, amount) in enumerate(shown):
        colour, wide = COLOURS[i % len(COLOURS)], 1000 * amount / scale
        label = escape(f"{what}: {say(amount)}")
        bars.append(
            f'<rect x="{at:.2f}" y="0" width="{wide:.2f}" height="26" fill="{colour}"><title>{label}</title></rect>'
        )
        share = f"{amount / whole:.1%}" if whole else ""
        key = f'<span class="key" style="background:{colour}"></span>'
        rows.append((key + escape(what), escape(say(amount)), escape(share)))
        at += wide
    svg = f'<svg viewBox="0 0 1000 26" preserveAspectRatio="none" role="img">{"".join(bars)}</svg>'
    return svg + _table(("part", ">amount", f">of the {of}"), rows)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML already. A column that begins with ">" holds numbers."""
    cls = [' class="n"' if c.startswith(">") else "" for c in columns]
    head = "".join(f"<th{k}>{escape(c.removeprefix('>'))}</th>" for k, c in zip(cls, columns, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{k}>{cell}</td>" for k, cell in zip(cls, row, strict=True)) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def _layout(text: str) -> str:
    return f'<code class="whole">{escape(text)}</code>'


def _layouts(plan: Plan) -> str:
    rows = []
    for name, members in parameter_groups(plan.parameters):
        first, n = members[0], len(members)
        state = n * (first.bytes_per_device + first.optimizer_bytes_per_device)
        sizes = (str(n), bytes_words(first.bytes_per_device), bytes_words(state))
        rows.append((_code(name), escape(first.role), _layout(first.layout), *map(escape, sizes)))
    return _table(("parameters", "as", "layout", ">count", ">each", ">all, with optimizer state"), rows)


def _conversions(plan: Plan) -> str:
    step, rows = plan.predicted.step_time_us, []
    groups = conversion_groups(plan.conversions)
    for group in groups[:CONVERSIONS_SHOWN]:
        first, us = group[0], sum(c.us * c.count for c in group)
        names = list(dict.fromkeys(conversion_name(c) for c in group))
        more = f" and {len(names) - PLACES_SHOWN} more" if len(names) > PLACES_SHOWN else ""
        of = "<br>".join(map(_code, names[:PLACES_SHOWN])) + more
        cells = (str(sum(c.count for c in group)), time_words(us), f"{us / step:.1%}" if step else "")
        rows.append(
            (
                _code(" then ".join(first.steps)),
                _layout(first.before) + " → " + _layout(first.after),
                of,
                *map(escape, cells),
            )
        )
    left = f"<p>{len(groups) - CONVERSIONS_SHOWN} more kinds cost less.</p>" if len(groups) > CONVERSIONS_SHOWN else ""
    return _table(("collective", "from → to", "of", ">times", ">total", ">of the step"), rows) + left


def _facts(rows: Iterable[tuple[str, str]]) -> str:
    body = "".join(f"<tr><th>{escape(what)}</th><td>{escape(words)}</td></tr>" for what, words in rows)
    return f'<table class="facts"><tbody>{body}</tbody></table>'


def _standing(plan: Plan, limit: int | None) -> Iterator[tuple[str, str]]:
    s = plan.solver
    yield "solver", solver_words(plan)
    yield (
        "objective",
        f"{time_words(s.objective_us)}; no plan takes less than {time_words(s.bound_us)} by this cost model",
    )
    if limit:
        yield "memory limit", f"{bytes_words(limit)} per device"
    if plan.pins:
        yield "pins", ", ".join(f"{k}={v}" for k, v in plan.pins.items())
    if asked := asked_words(plan):
        yield "asked", asked


def _setting(plan: Plan) -> Iterator[tuple[str, str]]:
    yield "model", f"{plan.model.name}, {count_words(plan.model.parameters)} parameters, graph {plan.model.graph_hash}"
    if plan.request is not None and plan.request.inputs:
        yield "global batch", inputs_words(plan.request.inputs)
    yield "precision", plan.precision
    for stage in plan.stages:
        blocks = ", ".join(f"{n} × {path}" for path, n in stage.blocks) or "no repeated blocks"
        yield (
            f"stage {stage.index}",
            f"{stage.devices} devices, {blocks}, {stage.saved_count} tensors kept for the backward"
            + (f", {stage.recomputed_count} made again in it" if stage.recomputed_count else ""),
        )


def _cluster(spec: ClusterSpec) -> str:
    devices = [
        (
            escape(f"{g.count} × {g.device.name}"), escape(bytes_words(g.device.memory_bytes)),
            escape(f"{g.device.peak_flops.get('bfloat16', 0.0) / 1e12:.0f} TFLOP/s"),
            escape(f"{g.device.memory_bytes_per_us / 1e3:.0f} GB/s"), escape(g.device.source),
        )
        for g in spec.groups
    ]  # fmt: skip
    links = [
        (
            escape(level.name), str(level.size), escape(f"{level.bytes_per_us / 1e3:.1f} GB/s"),
            escape(time_words(level.latency_us)), escape(level.source),
        )
        for level in spec.levels
    ]  # fmt: skip
    return _table(("devices", ">memory", ">bf16 peak", ">bandwidth", "source"), devices) + _table(
        ("link", ">joins", ">each device sends", ">latency", "source"), links
    )


def _notes(notes: Sequence[PlanNote]) -> str:
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for note in notes:
        alike[note.kind, note.message].append(note.where)
    rows = []
    for (kind, message), places in sorted(alike.items(), key=lambda item: -len(item[1])):
        more = f"<br>and {len(places) - PLACES_SHOWN} more places" if len(places) > PLACES_SHOWN else ""
        rows.append((escape(kind), escape(message), "<br>".join(map(_code, places[:PLACES_SHOWN])) + more))
    return _table(("kind", "what", "where"), rows)

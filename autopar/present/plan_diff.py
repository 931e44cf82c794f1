"""What differs between two plans: as a record, and as the table that a person reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autopar.ir.plan import Plan, memory_limit_bytes
from autopar.present.plan_text import inputs_words, mesh_words, plain, terminal_columns
from autopar.present.words import bytes_words, change_words, count_words, group_name, pattern_of, time_words

OPS_SHOWN = 6
SAME = 1e-9
"""Relative difference below which two predictions are the same: rounding."""
SEEN = 5e-4
"""Relative difference below which a table leaves a part out."""


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """Something said in words, of either plan; "" where that says nothing."""

    what: str
    before: str
    after: str


class LayoutChange(msgspec.Struct, frozen=True, kw_only=True):
    """`count` parameters that are one name but for indices, laid out otherwise. Roles are the layouts in words."""

    parameters: str
    count: int
    before: str
    before_role: str
    after: str
    after_role: str


class Amount(msgspec.Struct, frozen=True, kw_only=True):
    """A predicted quantity. `unit`: "us", "bytes" or "" (a plain number). `part`: of the amount above it."""

    what: str
    unit: str
    before: float
    after: float
    part: bool = False

    @property
    def matters(self) -> bool:
        """More than rounds to nothing when read."""
        return abs(self.after - self.before) > SEEN * max(abs(self.before), abs(self.after))

    @property
    def words(self) -> tuple[str, str, str]:
        """Before, after, and the change."""
        say = {"us": time_words, "bytes": bytes_words}.get(self.unit, count_words)
        change = self.after - self.before
        part = f" ({change / self.before:+.1%})" if self.before else ""
        return say(self.before), say(self.after), change_words(change, say) + part


class OpChange(msgspec.Struct, frozen=True, kw_only=True):
    """An op that runs under another strategy: its layouts as `inputs -> outputs`."""

    op: str
    before: str
    after: str


class PlanDiff(msgspec.Struct, frozen=True, kw_only=True):
    """What differs between plan `a` and plan `b`. Times of the solver don't count.

    `ops` are of graphs and ops that both have; on another mesh nearly all of them differ.
    """

    a: str
    b: str
    facts: list[Fact]
    layouts: list[LayoutChange]
    amounts: list[Amount]
    ops: list[OpChange]

    @property
    def same(self) -> bool:
        """True if nothing differs."""
        return not (self.facts or self.layouts or self.amounts or self.ops)

    def __str__(self) -> str:
        columns = terminal_columns()
        return plain(diff_view(self), columns)


def diff_plans(a: Plan, b: Plan, names: tuple[str, str] = ("this plan", "the other")) -> PlanDiff:
    """From plan `a` to plan `b`; `names` are what to call them."""
    return PlanDiff(
        a=names[0],
        b=names[1],
        facts=[f for f in _facts(a, b) if f.before != f.after],
        layouts=list(_layouts(a, b)),
        amounts=[x for x in _amounts(a, b) if abs(x.after - x.before) > SAME * max(abs(x.before), abs(x.after))],
        ops=list(_ops(a, b)),
    )


def _facts(a: Plan, b: Plan) -> Iterator[Fact]:
    for what, before, after in (
        ("model", _model(a), _model(b)),
        ("batch", _batch(a), _batch(b)),
        ("precision", a.precision, b.precision),
        ("cluster", _cluster(a), _cluster(b)),
        ("mesh", mesh_words(a), mesh_words(b)),
        ("schedule", _schedule(a), _schedule(b)),
        ("pins", _pins(a), _pins(b)),
        ("memory limit", _limit(a), _limit(b)),
        ("solver", _standing(a), _standing(b)),
    ):
        yield Fact(what=what, before=before, after=after)
    if a.cluster.name == b.cluster.name and a.cluster.spec != b.cluster.spec:
        yield Fact(what="cluster's figures", before="its own", after="others, under the same name")


def _model(plan: Plan) -> str:
    return f"{plan.model.name} (graph {plan.model.graph_hash})"


def _cluster(plan: Plan) -> str:
    return f"{plan.cluster.name} ({plan.cluster.devices} devices)"


def _batch(plan: Plan) -> str:
    return inputs_words(plan.request.inputs) if plan.request is not None else ""


def _schedule(plan: Plan) -> str:
    s = plan.schedule
    return f"{plan.mesh.pipeline} stages, {s.name}, {s.micro_batches} micro-batches, {s.chunks} chunks"


def _pins(plan: Plan) -> str:
    return ", ".join(f"{k}={v}" for k, v in sorted(plan.pins.items()))


def _limit(plan: Plan) -> str:
    limit = memory_limit_bytes(plan)
    return bytes_words(limit) if limit is not None else ""


def _standing(plan: Plan) -> str:
    return plan.solver.status.replace("_", " ")


def _layouts(a: Plan, b: Plan) -> Iterator[LayoutChange]:
    groups: dict[tuple[str, str, str, str, str], list[str]] = defaultdict(list)
    for name in dict.fromkeys((*a.parameters, *b.parameters)):
        mine, other = a.parameters.get(name), b.parameters.get(name)
        before, after = (mine.layout if mine else "", other.layout if other else "")
        if before != after:
            roles = (mine.role if mine else "not there", other.role if other else "not there")
            groups[pattern_of(name), before, roles[0], after, roles[1]].append(name)
    per_pattern: dict[str, int] = defaultdict(int)
    for key in groups:
        per_pattern[key[0]] += 1
    for (pattern, before, before_role, after, after_role), names in groups.items():
        whole = per_pattern[pattern] == 1 and len(names) == sum(pattern_of(n) == pattern for n in a.parameters)
        yield LayoutChange(
            parameters=group_name(names, alone=whole), count=len(names), before=before, before_role=before_role,
            after=after, after_role=after_role,
        )  # fmt: skip


def _amounts(a: Plan, b: Plan) -> Iterator[Amount]:
    p, q = a.predicted, b.predicted
    yield Amount(what="step", unit="us", before=p.step_time_us, after=q.step_time_us)
    for what in dict.fromkeys((*p.breakdown_us, *q.breakdown_us)):
        before, after = p.breakdown_us.get(what, 0.0), q.breakdown_us.get(what, 0.0)
        yield Amount(what=what, unit="us", before=before, after=after, part=True)
    yield Amount(what="tokens/s", unit="", before=p.tokens_per_s, after=q.tokens_per_s)
    yield Amount(what="memory", unit="bytes", before=p.peak_memory_bytes, after=q.peak_memory_bytes)
    for what in dict.fromkeys((*p.breakdown_bytes, *q.breakdown_bytes)):
        held, other = p.breakdown_bytes.get(what, 0), q.breakdown_bytes.get(what, 0)
        yield Amount(what=what, unit="bytes", before=held, after=other, part=True)


def _ops(a: Plan, b: Plan) -> Iterator[OpChange]:
    for graph, mine in a.strategies.items():
        other = b.strategies.get(graph, {})
        for key, strategy in mine.items():
            if key not in other:
                continue
            before, after = (f"{', '.join(s.inputs)} -> {', '.join(s.outputs)}" for s in (strategy, other[key]))
            if before != after:
                yield OpChange(op=f"{graph}: {key}", before=before, after=after)


def diff_view(diff: PlanDiff) -> RenderableType:
    """The differences as something that a rich console prints: "same" if there are none."""
    if diff.same:
        return Text("same")
    parts: list[RenderableType] = []
    if diff.facts:
        table = _table("", diff.a, diff.b)
        for fact in diff.facts:
            table.add_row(fact.what, fact.before or "-", fact.after or "-")
        parts.append(table)
    if diff.layouts:
        table = _table("parameters", "n", diff.a, diff.b)
        for x in diff.layouts:
            words = (f"{x.before_role}  {x.before}".strip(), f"{x.after_role}  {x.after}".strip())
            table.add_row(x.parameters, str(x.count), *words)
        parts.append(table)
    if diff.amounts:
        table = _table("predicted", diff.a, diff.b, "change", numbers=True)
        for amount in diff.amounts:
            if amount.matters or not amount.part:
                table.add_row(("  " if amount.part else "") + amount.what, *amount.words)
        parts.append(table)
    if diff.ops and not any(f.what in ("mesh", "model") for f in diff.facts):
        table = _table(f"ops run otherwise: {len(diff.ops)}", diff.a, diff.b)
        for op in diff.ops[:OPS_SHOWN]:
            table.add_row(op.op.removeprefix("top: "), op.before, op.after)
        parts.append(table)
    spaced = [x for part in parts for x in (part, Text(""))]
    return Group(*spaced[:-1])


def _table(*columns: str, numbers: bool = False) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for i, name in enumerate(columns):
        right = (numbers and i > 0) or name == "n"
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    return table

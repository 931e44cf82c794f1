"""Small problems for the solver's tests, and brute force."""

from __future__ import annotations

import itertools
import math
import random

from autopar.ir.problem import (
    INFINITY,
    Consumer,
    Moment,
    NodeBytes,
    Problem,
    ProblemNode,
    ProblemValue,
    VersionBytes,
    evaluate,
)


def brute_force(problem: Problem) -> float:
    """The optimum by trying everything; inf if nothing fits."""
    priced = (evaluate(problem, c) for c in all_choices(problem))
    return min((p.objective_us for p in priced if p.feasible), default=math.inf)


def least_excess(problem: Problem, within_us: float = math.inf) -> float:
    """Smallest max over moments of used - limit, over choices of finite time or within a time; inf if none."""
    priced = (evaluate(problem, c) for c in all_choices(problem))
    return min(
        (
            max(u - m.limit_bytes for u, m in zip(p.used_bytes, problem.moments, strict=True))
            for p in priced
            if math.isfinite(p.objective_us) and p.objective_us <= within_us
        ),
        default=math.inf,
    )


def all_choices(problem: Problem) -> itertools.product[tuple[int, ...]]:
    return itertools.product(*(range(len(n.cost_us)) for n in problem.nodes))


def random_problem(seed: int) -> Problem:
    """Up to 5 nodes: shared conversions, cycles, self reads, repeated reads, overlap groups, versions, infinities."""
    draw = random.Random(seed)
    count = draw.randint(1, 5)
    strategies = [draw.randint(1, 4) for _ in range(count)]
    groups = draw.randint(0, 2)
    amount = (lambda: draw.randint(0, 9)) if draw.random() < 0.5 else (lambda: round(draw.uniform(0, 9), 3))
    nodes = []
    for n in range(count):
        group = draw.randrange(groups) if groups and draw.random() < 0.6 else None
        cost = tuple(float(amount()) for _ in range(strategies[n]))
        cover = tuple(draw.choice((0.0, c / 2, c)) for c in cost) if group is not None else ()
        nodes.append(ProblemNode(name=f"n{n}", cost_us=cost, cover_us=cover, group=group))
    values = [_random_value(draw, f"v{v}", strategies, groups, amount) for v in range(draw.randint(0, 6))]
    moments = [_random_moment(draw, f"m{m}", strategies, values) for m in range(draw.choice((0, 0, 1, 1, 2, 3)))]
    return Problem(
        name=f"random {seed}", nodes=tuple(nodes), values=tuple(values), moments=tuple(moments), groups=groups,
        fixed_us=draw.choice((0.0, 3.5)),
    )  # fmt: skip


def _random_value(draw, name, strategies, groups, amount):  # type: ignore[no-untyped-def]
    layouts = draw.randint(1, 4)

    def table(node: int) -> tuple[int, ...]:
        return tuple(draw.randrange(layouts) for _ in range(strategies[node]))

    infinite, free = draw.choice((0.0, 0.15)), draw.choice((0.0, 0.3))

    def price(p: int, q: int) -> float:
        roll = draw.random()
        if p == q or roll < free:
            return 0.0
        return INFINITY if roll > 1 - infinite else float(amount())

    producer = draw.randrange(len(strategies))
    readers = [draw.randrange(len(strategies)) for _ in range(draw.randint(0, 4))]
    consumers = [Consumer(node=n, wants=table(n)) for n in readers]
    if consumers and draw.random() < 0.2:
        consumers.append(consumers[0])
    return ProblemValue(
        name=name, producer=producer, made=table(producer), consumers=tuple(consumers),
        reshard_us=tuple(tuple(price(p, q) for q in range(layouts)) for p in range(layouts)),
        group=draw.randrange(groups) if groups and draw.random() < 0.5 else None,
    )  # fmt: skip


def _random_moment(draw, name, strategies, values):  # type: ignore[no-untyped-def]
    unit = draw.choice((1, 7, 2**20))
    holders = [n for n in range(len(strategies)) if draw.random() < 0.7]
    nodes = tuple(
        NodeBytes(node=n, bytes=tuple(unit * draw.randint(0, 9) for _ in range(strategies[n]))) for n in holders
    )
    versions = []
    for index, value in enumerate(values):
        positions = tuple(k for k in range(len(value.consumers)) if draw.random() < 0.6)
        if positions and draw.random() < 0.7:
            sizes = tuple(unit * draw.randint(0, 9) for _ in value.reshard_us)
            versions.append(VersionBytes(value=index, consumers=positions, bytes=sizes))
    fixed = unit * draw.randint(0, 3)
    terms = len(nodes) + len(versions)
    return Moment(
        name=name, limit_bytes=fixed + unit * draw.randint(terms, 6 * terms + 1), fixed_bytes=fixed, nodes=nodes,
        versions=tuple(versions),
    )  # fmt: skip


def hard_problem(*, nodes: int, memory: bool = True, seed: int = 3) -> Problem:
    """A chain with skips whose memory limit makes the LP fractional."""
    draw = random.Random(seed)
    layouts = 4
    made = tuple(range(layouts))
    chain = tuple(
        ProblemNode(name=f"n{i}", cost_us=tuple(round(draw.uniform(5, 20), 2) for _ in made)) for i in range(nodes)
    )

    def value(first: int, readers: tuple[int, ...]) -> ProblemValue:
        table = tuple(tuple(0.0 if p == q else round(draw.uniform(1, 9), 2) for q in made) for p in made)
        consumers = tuple(
            Consumer(node=r, wants=tuple(draw.sample(made, layouts))) for r in readers if r < nodes
        )  # fmt: skip
        return ProblemValue(name=f"v{first}", producer=first, made=made, consumers=consumers, reshard_us=table)

    values = tuple(value(i, (i + 1, i + 3) if memory and i % 3 == 0 else (i + 1,)) for i in range(nodes - 1))
    held = tuple(NodeBytes(node=i, bytes=tuple(draw.randint(1, 99) for _ in made)) for i in range(nodes))
    least = sum(min(h.bytes) for h in held)
    moment = Moment(name="step", limit_bytes=int(1.5 * least), nodes=held)
    return Problem(name=f"hard {nodes}", nodes=chain, values=values, moments=(moment,) if memory else ())

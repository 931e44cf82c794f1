"""Random problems in parts, small enough to try every choice."""

from __future__ import annotations

import itertools
import math
import random

from autopar.ir.parts import Amount, Choice, Frame, Paid, PartedProblem, Term, Tie
from autopar.ir.problem import INFINITY, Consumer, Problem, ProblemNode, ProblemValue, evaluate
from autopar.ir.stages import Stage

FIRST, BLOCK, LAST = 0, 1, 2


def random_parts(seed: int) -> tuple[PartedProblem, Frame]:
    """Two ends and a block of several instances, whose layouts meet at what passes between them; memory may bind."""
    rng = random.Random(seed)
    blocks = rng.randint(2, 7)
    sizes = [rng.randint(2, 3) for _ in range(rng.randint(4, 5))]  # first, block..., last
    parts = [FIRST, *[BLOCK] * (len(sizes) - 2), LAST]
    nodes = tuple(
        ProblemNode(name=f"n{i}", cost_us=tuple(float(rng.randint(1, 40)) for _ in range(n)))
        for i, n in enumerate(sizes)
    )
    values = []
    for i in range(len(sizes) - 1):
        layouts = rng.randint(1, 2)
        table = tuple(
            tuple(0.0 if p == q else rng.choice([INFINITY, *[float(rng.randint(0, 15))] * 3]) for q in range(layouts))
            for p in range(layouts)
        )
        values.append(
            ProblemValue(
                name=f"v{i}", producer=i, made=tuple(rng.randrange(layouts) for _ in range(sizes[i])),
                consumers=(Consumer(node=i + 1, wants=tuple(rng.randrange(layouts) for _ in range(sizes[i + 1]))),),
                reshard_us=table,
            )
        )  # fmt: skip
    problem = Problem(name=f"random {seed}", nodes=nodes, values=tuple(values))
    terms = []
    for i, node in enumerate(nodes):
        amount = Amount.ONCE if rng.random() < 0.2 else rng.choice((Amount.FORWARD, Amount.BACKWARD))
        terms.append(Term(i, (parts[i],), amount, "", node.cost_us))
        for held, most in ((Amount.SAVED, 40), (Amount.RESIDENT, 60), (Amount.REMADE, 10), (Amount.WORKING, 15)):
            if rng.random() < 0.6:
                times = blocks if parts[i] == BLOCK and held in (Amount.SAVED, Amount.RESIDENT) else 1
                terms.append(Term(i, (parts[i],), held, "", tuple(times * rng.randint(0, most) for _ in node.cost_us)))
    passed = [float(rng.randint(0, 9)) for _ in range(2)]  # by layout
    terms.append(Term(len(sizes) - 2, (BLOCK,), Amount.PASSED, "", tuple(passed[p] for p in values[-1].made)))
    ties = []
    for i, value in enumerate(values):
        if parts[i] != parts[i + 1]:
            ties += [Tie(i, value.made), Tie(i + 1, value.consumers[0].wants)]
    stages = rng.randint(1, min(4, blocks))
    limit = rng.choice([10**6, rng.randint(60, 900)])
    parted = PartedProblem(
        problem=problem, parts=("first", "block", "last"), counts=(1, blocks, 1),
        homes=tuple((p,) for p in parts), runs=((FIRST, 1), (BLOCK, blocks), (LAST, 1)), terms=tuple(terms),
        paid=tuple(Paid(i, parts[i], Amount.FORWARD, "") for i in range(len(values))), ties=tuple(ties),
        fixed_bytes=rng.randint(0, 5),
    )  # fmt: skip
    frame = Frame(
        stages=tuple(Stage(limit_bytes=limit, speed=rng.choice([1.0, 1.0, 1.5])) for _ in range(stages)),
        micro_batches=rng.randint(1, 8), latency_us=rng.choice([0.0, 2.0]), bytes_per_us=rng.choice([math.inf, 3.0]),
    )  # fmt: skip
    return parted, frame


def every_choice(parted: PartedProblem) -> list[Choice]:
    """All that have a price."""
    ranges = (range(len(n.cost_us)) for n in parted.problem.nodes)
    return [c for c in itertools.product(*ranges) if evaluate(parted.problem, c).feasible]

"""A problem cut into parts of the model, which pipeline stages hold, before anything says how often a step pays for it.

The parts are the model's ends and its blocks, in the order of their calls; several equal instances of a block are one
part, with the sizes of all of them together. A *term* says what a node's strategies take in a part: time of one
micro-batch, time once a step, or bytes. Conversions of a value are paid by one part. Everything that a schedule weighs
is made of these: `PartedProblem.columns` for the assignment to stages, and the linear models of `solver.parts`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from autopar.ir.problem import Problem, conversions
from autopar.ir.stages import Column, Halves, Run, Stage, StageProblem, StageSolution, in_flight, ramp_of

Choice = tuple[int, ...]
"""A strategy for every node."""


class Amount(Enum):
    """What a term counts: µs of one micro-batch or once a step, or bytes per device.

    SAVED: of one micro-batch, from its forward to its backward. RESIDENT: all through the step. REMADE: made again in
    the backward of one instance at a time. WORKING: beside all these while an op runs, so that the largest counts.
    PASSED: of one micro-batch, from one stage to the next.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    ONCE = "once"
    SAVED = "saved"
    RESIDENT = "resident"
    REMADE = "remade"
    WORKING = "working"
    PASSED = "passed"


@dataclass(frozen=True, slots=True)
class Term:
    """`sizes` of each strategy of `node`, of all instances together (REMADE, WORKING, PASSED: of one), in each of
    `parts`. `label`: what that is, for people."""

    node: int
    parts: tuple[int, ...]
    amount: Amount
    label: str
    sizes: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Paid:
    """Who pays for a value's conversions, of all instances together, and when."""

    value: int
    part: int
    amount: Amount
    label: str


@dataclass(frozen=True, slots=True)
class Tie:
    """Parts agree about this: what passes between them, and parameters that several hold. One key per strategy."""

    node: int
    keys: tuple[int, ...]


Sums = Mapping[tuple[Amount, str], float]
"""Of one part: by amount and label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartedProblem:
    """A problem without moments, and where its numbers belong.

    Attributes:
        problem: its costs are µs of all instances, of one micro-batch or, where the terms say so, once a step.
        parts: names. counts: instances whose sizes are summed, by part.
        homes: of each node the parts that it is in, at least one.
        runs: (part, instances that follow one another), in model order.
        fixed_bytes: on every stage, whatever is chosen.
    """

    problem: Problem
    parts: tuple[str, ...]
    counts: tuple[int, ...]
    homes: tuple[tuple[int, ...], ...]
    runs: tuple[tuple[int, int], ...]
    terms: tuple[Term, ...]
    paid: tuple[Paid, ...]
    ties: tuple[Tie, ...]
    fixed_bytes: int = 0

    def agreed(self, choice: Choice) -> tuple[int, ...]:
        """Choices with the same answer may stand beside each other in the parts of one model."""
        return tuple(tie.keys[choice[tie.node]] for tie in self.ties)

    def sums(self, choice: Choice) -> tuple[Sums, ...]:
        """What every part takes under a choice, all its instances together."""
        found: tuple[dict[tuple[Amount, str], float], ...] = tuple({} for _ in self.parts)
        for term in self.terms:
            size, key = term.sizes[choice[term.node]], (term.amount, term.label)
            for part in term.parts:
                most = term.amount is Amount.WORKING
                known = found[part].get(key, 0.0)
                found[part][key] = max(known, size) if most else known + size
        for paid in self.paid:
            value = self.problem.values[paid.value]
            us = sum(value.reshard_us[p][q] for p, q in conversions(value, choice))
            key = (paid.amount, paid.label)
            found[paid.part][key] = found[paid.part].get(key, 0.0) + us
        return found

    def columns(self, choice: Choice, name: str) -> tuple[Column, ...]:
        """One instance of every part under a choice."""
        return tuple(_column(sums, n, name) for sums, n in zip(self.sums(choice), self.counts, strict=True))

    def runs_of(self, choices: Sequence[Choice]) -> tuple[Run, ...]:
        """The runs with a column of each choice, named by its index; of equal columns the first."""
        columns = [self.columns(choice, str(k)) for k, choice in enumerate(choices)]
        return tuple(
            Run(name=self.parts[part], count=count, columns=_distinct([c[part] for c in columns]))
            for part, count in self.runs
        )

    def passed_bytes(self, choice: Choice) -> float:
        """From one stage to the next, for one micro-batch."""
        return sum(t.sizes[choice[t.node]] for t in self.terms if t.amount is Amount.PASSED)


def _column(sums: Sums, count: int, name: str) -> Column:
    total = dict.fromkeys(Amount, 0.0)
    for (amount, _), size in sums.items():
        total[amount] += size
    return Column(
        name=name,
        forward_us=total[Amount.FORWARD] / count,
        backward_us=total[Amount.BACKWARD] / count,
        finish_us=total[Amount.ONCE] / count,
        saved_bytes=-(-int(total[Amount.SAVED]) // count),
        resident_bytes=-(-int(total[Amount.RESIDENT]) // count),
        transient_bytes=int(total[Amount.WORKING] + total[Amount.REMADE]),
    )


def _distinct(columns: Sequence[Column]) -> tuple[Column, ...]:
    """Columns that differ in more than their name, the first of equals."""
    found: dict[tuple[float, ...], Column] = {}
    for c in columns:
        key = (c.forward_us, c.backward_us, c.finish_us, c.saved_bytes, c.resident_bytes, c.transient_bytes)
        found.setdefault(key, c)
    return tuple(found.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What the parts are put on.

    Attributes:
        stages: their devices; what is in flight on them follows from the schedule.
        latency_us, bytes_per_us: of the link from one stage to the next.
        cuts: [stage][run]: what each stage holds, if that is decided.
        schedule: one with backwards in `halves`; "" and None: 1F1B, or interleaved with several chunks.
    """

    stages: tuple[Stage, ...]
    micro_batches: int
    latency_us: float = 0.0
    bytes_per_us: float = math.inf
    cuts: tuple[tuple[int, ...], ...] | None = None
    schedule: str = ""
    halves: Halves | None = None

    def problem(
        self, parted: PartedProblem, runs: tuple[Run, ...], chunks: int, passed_bytes: float = 0.0
    ) -> StageProblem:
        """The assignment of these runs, under the schedule or, with several `chunks` on a stage, interleaved."""
        count = len(self.stages)
        schedule = self.schedule or ("interleaved" if chunks > 1 else "1f1b")
        waiting = self.halves.waiting if self.halves is not None else 1.0
        flying = in_flight(schedule, stages=count, micro_batches=self.micro_batches, chunks=chunks, waiting=waiting)
        return StageProblem(
            name=parted.problem.name,
            runs=runs,
            stages=tuple(
                replace(s, fixed_bytes=parted.fixed_bytes, in_flight=n)
                for s, n in zip(self.stages, flying, strict=True)
            ),
            micro_batches=self.micro_batches,
            boundary_us=self.latency_us + passed_bytes / self.bytes_per_us if count > 1 else 0.0,
            boundary_hidden=False,
            chunks=chunks,
            cuts=self.cuts if count > 1 else None,
            ramp=ramp_of(self.halves) if self.halves is not None else None,
            schedule=self.schedule,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeSolution:
    """`choices`: what columns named "0", "1", … of `problem` mean. `price_us_per_byte`: of the first stage's memory."""

    choices: tuple[Choice, ...]
    problem: StageProblem
    assignment: StageSolution
    price_us_per_byte: float

    @property
    def step_us(self) -> float:
        """Of the step."""
        return self.assignment.step_us

"""What the ranks of a plan with pipeline stages or micro-batches execute: one program for each part of the model.

The mesh of a part's program has an axis more than that of its devices, `MICRO`: micro-batches, one after another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.graph import Phase, TensorMeta
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.plan import ACCUMULATE
from autopar.ir.program import Program, Source
from autopar.ir.schedule import Schedule
from autopar.ir.schedules import build_schedule

MICRO = "mb"
"""The axis of micro-batches."""
RECEIVED, JOINED = "received ", "joined "
"""What the target of an input that another part, or all micro-batches, make begins with."""
SUMMED = "summed "
"""What the target of a gradient that other ops still read, summed over micro-batches, begins with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """A value that one part sends to others, in the forward or in the backward of a micro-batch."""

    value: str
    source: int
    targets: tuple[int, ...]
    phase: Phase

    def __str__(self) -> str:
        return f"{self.value}: part {self.source} → {', '.join(map(str, self.targets))} in the {self.phase.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A value of all micro-batches: its global meta, and how each of them makes its piece."""

    value: str
    meta: TensorMeta
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A value that micro-batches make pieces of and read whole, in the layout `wanted` of the devices' mesh."""

    value: str
    wanted: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsProgram:
    """What makes weights as ops read them, once a step, of those that are stored.

    Attributes:
        calls: by instance of the block ("" of the top) the names of its parameters, in the program's order, and those
            by which the part's program knows what is made.
    """

    program: Program
    calls: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartProgram:
    """One part of the model.

    Attributes:
        first: run on the whole batch before any of the rest, for what micro-batches read whole (`joined`); None: they
            read nothing so.
        weights: run once before all, by name of graph.
        main: forward and backward of one micro-batch. Its parameters are weights as `held` has them, on the devices'
            own mesh; its gradients leave in the layouts of `sums`, and its backward gives `summed` behind those.
        after: run once at the end, on the sums of `summed`: gradients by name of parameter; None: nothing is left.
    """

    index: int
    first: Program | None
    joined: tuple[Joined, ...]
    weights: Mapping[str, WeightsProgram]
    main: Program
    held: Mapping[str, Layout]
    sums: Mapping[str, Layout]
    summed: tuple[Piece, ...]
    after: Program | None

    def __str__(self) -> str:
        return f"part {self.index}\n{self.main}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedProgram:
    """All parts.

    Attributes:
        mesh: of one stage's devices.
        stages, chunks, micro_batches, schedule: part k is chunk k // stages of stage k % stages.
        collected: what `last` takes of all micro-batches: the last outputs of the last part's forward.
        last: run once, on the last part's stage: what is collected -> the model's outputs.
        passed: what goes between parts; `pieces`: of each value passed.
        shared: parameter (name) -> parts that each make a summand of its gradient, and all hold it.
        draws: some part draws random numbers, so that each step has a number of its own on all ranks.
    """

    model_name: str
    graph_hash: str
    mesh: Mesh
    stages: int
    chunks: int
    micro_batches: int
    schedule: str
    parts: tuple[PartProgram, ...]
    collected: tuple[Piece, ...]
    last: Program
    passed: tuple[Passed, ...]
    pieces: Mapping[str, Piece]
    shared: Mapping[str, tuple[int, ...]]
    draws: bool

    def __str__(self) -> str:
        head = f"program {self.model_name}: {len(self.parts)} parts on {self.stages} stages of {self.mesh}"
        return "\n".join([head, *map(str, self.passed), *map(str, self.parts), f"at the end\n{self.last}"])


def schedule_of(program: StagedProgram) -> Schedule:
    """The order in which its stages run."""
    name = "none" if program.schedule == ACCUMULATE else program.schedule
    return build_schedule(name, stages=program.stages, micro_batches=program.micro_batches, chunks=program.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedSource:
    """The emitted Python of all parts: one module each."""

    first: Mapping[int, Source]
    weights: tuple[Mapping[str, Source], ...]
    main: tuple[Source, ...]
    after: Mapping[int, Source]
    last: Source

    @property
    def text(self) -> str:
        """All modules, one after the other."""
        found = []
        for k, main in enumerate(self.main):
            if k in self.first:
                found.append(f"# Part {k}, before the micro-batches\n{self.first[k].text}")
            found += [f"# Part {k}, weights once a step: {name}\n{s.text}" for name, s in self.weights[k].items()]
            found.append(f"# Part {k}\n{main.text}")
            if k in self.after:
                found.append(f"# Part {k}, after the micro-batches\n{self.after[k].text}")
        return "\n\n".join([*found, f"# At the end, on the last stage\n{self.last.text}"])

"""The parts of a model that one rank of a plan with stages or micro-batches runs, and in which order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.layout import Layout
from autopar.ir.plan import STAGE
from autopar.ir.staged import (
    MICRO,
    PartProgram,
    StagedProgram,
    StagedSource,
    schedule_of,
)
from autopar.runtime.comm import Communicator, View
from autopar.runtime.loaded import Executable
from autopar.runtime.spread_numbers import is_of_a_stage


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the model on this rank."""

    index: int
    first: Executable | None
    program: PartProgram
    weights: Mapping[str, Executable]
    main: Executable
    after: Executable | None


class Pipeline:
    """This rank's parts, ready to run.

    Attributes:
        everyone: all ranks; `rt`: those of this stage; `micro`: the same, in one micro-batch.
        stored: of each parameter its shape, and how it is stored; `names`: its name, by its value in the graph.
    """

    def __init__(
        self, program: StagedProgram, source: StagedSource, everyone: Communicator,
        stored: Mapping[str, tuple[tuple[int, ...], Layout]], names: Mapping[str, str],
    ) -> None:  # fmt: skip
        self.program = program
        self.stored = stored
        self.names = names
        self.everyone = everyone
        self.stage = everyone.index(STAGE)
        self.rt = View(everyone, program.mesh)
        whole = everyone.device_mesh
        if whole is not None and program.mesh.axes:
            self.rt.device_mesh = whole[program.mesh.names]
            if program.stages > 1:
                is_of_a_stage(self.rt.device_mesh)
        self.micro = View(everyone, program.parts[0].main.mesh, {MICRO: 0})
        chunks, stages = program.chunks, program.stages
        self.parts = tuple(self._part(c * stages + self.stage, source) for c in range(chunks))
        last = len(program.parts) - 1
        self.last = Executable(source.last, program.model_name) if last % stages == self.stage else None
        self.order = schedule_of(program).orders[self.stage]

    def _part(self, index: int, source: StagedSource) -> Part:
        part = self.program.parts[index]
        name = f"{self.program.model_name} part {index}"
        return Part(
            index=index,
            first=Executable(source.first[index], name) if part.first is not None else None,
            program=part,
            weights={key: Executable(text, f"{name} weights") for key, text in source.weights[index].items()},
            main=Executable(source.main[index], name),
            after=Executable(source.after[index], name) if part.after is not None else None,
        )

    def begin(self, seed: int, step: int) -> None:
        """Draw from here."""
        for rt in (self.rt, self.micro):
            rt.seed, rt.step = seed, step

    def home(self, part: int) -> int:
        """The stage of a part."""
        return part % self.program.stages

    def neighbour(self, stage: int) -> int:
        """The rank of another stage at this rank's place."""
        return stage * self.program.mesh.size + self.rt.rank

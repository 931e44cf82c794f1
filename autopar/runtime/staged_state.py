"""What a module of a plan with stages knows besides its parameters: its programs, by the calls that they are for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from autopar.errors import InputError, PlanError, RankError
from autopar.ir.graph import CapturedGraph
from autopar.ir.plan import Plan
from autopar.ir.staged import StagedProgram, StagedSource
from autopar.ir.timeline import Timeline
from autopar.runtime.calls import (
    Planned,
    Request,
    Wanted,
)
from autopar.runtime.comm import Communicator
from autopar.runtime.parameters import storage_layouts
from autopar.runtime.pipeline import Pipeline
from autopar.runtime.programs import Programs
from autopar.runtime.stage_times import StageMeasuring

Compiled = tuple[CapturedGraph, Plan, StagedProgram, StagedSource]


@dataclass(frozen=True, slots=True)
class ReadyProgram:
    """One captured graph ready to run, for calls of one kind."""

    planned: Planned
    captured: CapturedGraph
    pipeline: Pipeline
    constants: Mapping[str, Tensor]


class StagedState(Programs[ReadyProgram, Compiled]):
    """What a StagedModule knows besides its parameters.

    Attributes:
        pipeline: of the program that the module was compiled with.
        scale: what backwards begin with. `scaler`: by which `step` scales its loss.
        failed: what ended a step here before its end, "" if nothing has.
    """

    def __init__(
        self, captured: CapturedGraph, plan: Plan, source: StagedSource, pipeline: Pipeline,
        recompile: Callable[[Request], Compiled] | None, seed: int,
    ) -> None:  # fmt: skip
        super().__init__(captured, plan, source, pipeline.rt, recompile, seed)
        self.pipeline = pipeline
        self.predicts: Callable[[], Timeline] | None = None
        self.measuring: StageMeasuring | None = None
        self.scale = 1.0
        self.scaler: torch.amp.GradScaler | None = None
        self.failed = ""

    def require_whole(self) -> None:
        """RankError once a step has failed here: other ranks are left in the middle of it."""
        if self.failed:
            everyone = self.pipeline.everyone
            raise RankError(
                f"rank {everyone.rank} of {everyone.mesh.size} failed in a step before ({self.failed}), in which the "
                "other ranks still wait for it: no further step can be run; end the ranks and start again"
            )

    def copied(self, root: nn.Module) -> Self:
        """Measured is the module that was asked."""
        new = super().copied(root)
        new.measuring = None
        return new

    def refuse(self, wanted: Wanted, known: Wanted, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See `Programs`."""
        if self.recompile is None:
            self.captured.signature.flatten(args, kwargs)
            raise InputError(
                f"the module is called as ({wanted}), and was made for ({known}): make it by compile(), which can make "
                "what runs this call"
            )
        if wanted.unfrozen or any(grad for _, _, _, grad in wanted.leaves):
            raise InputError(
                f"the module is called as ({wanted}), its plan with stages is for ({known}): with stages this version "
                "gives no gradients of inputs, nor of parameters that were frozen when it was compiled"
            )

    def ready(self, compiled: Compiled, wanted: Wanted, seconds: float) -> ReadyProgram:
        """See `Programs`."""
        captured, plan, program, source = compiled
        pipeline = pipeline_of(captured, plan, program, source, self.pipeline.everyone)
        missing = held_here(captured, plan, pipeline) - held_here(self.captured, self.plan, self.pipeline)
        if missing or any(p.layout != self.plan.parameters[n].layout for n, p in plan.parameters.items()):
            raise PlanError(
                f"called so the model reads {min(missing, default='parameters')} on another stage than before, or "
                "stored otherwise: search for these inputs"
            )
        return self.made(captured, pipeline, Planned(wanted=wanted, plan=plan, seconds=seconds))

    def made(self, captured: CapturedGraph, pipeline: Pipeline, planned: Planned) -> ReadyProgram:
        """A captured graph with what runs it."""
        constants = {name: value.to(self.rt.device) for name, value in captured.constants.items()}
        return ReadyProgram(planned, captured, pipeline, constants)


def pipeline_of(
    captured: CapturedGraph, plan: Plan, program: StagedProgram, source: StagedSource, everyone: Communicator
) -> Pipeline:  # fmt: skip
    """This rank's parts of a program, ready to run."""
    stored = storage_layouts({name: p.layout for name, p in plan.parameters.items()}, program.mesh)
    return Pipeline(
        program, source, everyone,
        {p.name: (p.meta.shape, stored[p.name]) for p in captured.parameters if p.name in stored},
        {i.value.name: i.target for i in captured.top.inputs},
    )  # fmt: skip


def held_here(captured: CapturedGraph, plan: Plan, pipeline: Pipeline) -> set[str]:
    """Parameters of this stage: those that its parts read; of those that none reads, those that the plan puts here."""
    metas = {p.name for p in captured.parameters}
    read = {name for part in pipeline.program.parts for name in part.main.parameters}
    mine = {name for part in pipeline.parts for name in part.main.parameters if name in metas}
    return mine | {p.name for p in captured.parameters
                   if p.name not in read and plan.parameters[p.name].stage == pipeline.stage}  # fmt: skip

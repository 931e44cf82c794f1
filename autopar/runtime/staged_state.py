"""What a module of a plan with stages knows besides its parameters: its programs, by the calls that they are for."""

from __future__ import annotations

import copy
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

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
    add_program,
    autocast_now,
    captured_leaves,
    leaves_of,
    modes_of,
    read_call,
    unfrozen,
)
from autopar.runtime.comm import Communicator
from autopar.runtime.parameters import Weights, storage_layouts
from autopar.runtime.pipeline import Pipeline
from autopar.runtime.stage_times import StageMeasuring

Compiled = tuple[CapturedGraph, Plan, StagedProgram, StagedSource]


@dataclass(frozen=True, slots=True)
class ReadyProgram:
    """One captured graph ready to run, for calls of one kind."""

    planned: Planned
    captured: CapturedGraph
    pipeline: Pipeline
    constants: Mapping[str, Tensor]


@dataclass
class StagedState:
    """See `CompiledModule`. `captured`, `plan`, `source` and `pipeline` are what the module was compiled with, and
    `programs` all that there are, the one called last at the end. `scale`: what backwards begin with."""

    captured: CapturedGraph
    plan: Plan
    source: StagedSource
    pipeline: Pipeline
    rt: Communicator
    recompile: Callable[[Request], Compiled] | None
    predicts: Callable[[], Timeline] | None
    trains: Mapping[str, bool]
    weights: Weights = field(init=False)
    programs: OrderedDict[Wanted, ReadyProgram] = field(default_factory=OrderedDict)
    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    replans: int = 0
    seed: int = 0
    step: int = 0
    measuring: StageMeasuring | None = None
    scale: float = 1.0
    scaler: torch.amp.GradScaler | None = None
    failed: str = ""

    def require_whole(self) -> None:
        """RankError once a step has failed here: other ranks are left in the middle of it."""
        if self.failed:
            everyone = self.pipeline.everyone
            raise RankError(
                f"rank {everyone.rank} of {everyone.mesh.size} failed in a step before ({self.failed}), in which the "
                "other ranks still wait for it: no further step can be run; end the ranks and start again"
            )

    def copied(self, root: nn.Module) -> StagedState:
        """See `CompiledModule.__deepcopy__`."""
        new = copy.copy(self)
        new.weights = self.weights.of_copy(root)
        new.modules = dict(root.named_modules())
        new.programs = OrderedDict(self.programs)
        return new

    def root(self, module: nn.Module) -> None:
        """The module is this one now."""
        self.weights.root = module
        self.modules = dict(module.named_modules())

    def add_first(self) -> None:
        """The program that the module was compiled with."""
        captured = self.captured
        wanted = Wanted(
            modes=modes_of(tuple(self.modules.values())), leaves=captured_leaves(captured),
            autocast=autocast_now(self.rt.device),
        )  # fmt: skip
        self.programs[wanted] = self._ready(captured, self.pipeline, Planned(wanted=wanted, plan=self.plan, seconds=0))

    def program_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[ReadyProgram, dict[str, Tensor]]:
        """(what runs this call, made now if there is a way to; the call's tensors by path).

        Raises:
            InputError: the call differs from the captured one and there is no way to run it; says how it differs.
        """
        signature = self.captured.signature
        given = read_call(signature, args, kwargs)
        as_captured = signature.as_captured or (lambda dtype: dtype)
        wanted = Wanted(
            modes=modes_of(tuple(self.modules.values())), leaves=leaves_of(given, as_captured),
            unfrozen=unfrozen(self.weights.parameters, self.trains), autocast=autocast_now(self.rt.device),
        )  # fmt: skip
        found = self.programs.get(wanted)
        if found is None:
            found = self._made_again(wanted, args, kwargs)
        self.programs.move_to_end(wanted)
        dtypes = {i.target: getattr(torch, i.value.meta.dtype) for i in found.captured.top.inputs}
        return found, {
            path: x.detach().to(self.rt.device, dtypes.get(path, x.dtype))
            for path, x in given.items()
            if isinstance(x, Tensor)
        }

    def _made_again(self, wanted: Wanted, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ReadyProgram:
        known = next(reversed(self.programs))
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
        start = time.perf_counter()
        modes = {path: m.training for path, m in self.modules.items()}
        with torch.inference_mode(False):
            captured, plan, program, source = self.recompile(
                Request(wanted=wanted, modes=modes, args=args, kwargs=kwargs)
            )
            pipeline = pipeline_of(captured, plan, program, source, self.pipeline.everyone)
            missing = held_here(captured, plan, pipeline) - held_here(self.captured, self.plan, self.pipeline)
            if missing or any(p.layout != self.plan.parameters[n].layout for n, p in plan.parameters.items()):
                raise PlanError(
                    f"called so the model reads {min(missing, default='parameters')} on another stage than before, or "
                    "stored otherwise: search for these inputs"
                )
            planned = Planned(wanted=wanted, plan=plan, seconds=time.perf_counter() - start)
            found = self._ready(captured, pipeline, planned)
        self.replans += 1
        add_program(self.programs, wanted, found)
        return found

    def _ready(self, captured: CapturedGraph, pipeline: Pipeline, planned: Planned) -> ReadyProgram:
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

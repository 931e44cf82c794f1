"""From a plan with pipeline stages or micro-batches to modules that run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from autopar import sharding
from autopar.codegen.stages import emit_stages, lower_stages
from autopar.errors import PlanError
from autopar.ir.graph import CapturedGraph
from autopar.ir.plan import Plan
from autopar.ir.staged import StagedProgram, StagedSource
from autopar.ir.timeline import Timeline
from autopar.runtime.calls import Request
from autopar.runtime.comm import Communicator
from autopar.runtime.staged import StagedModule
from autopar.runtime.staged_state import Compiled


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A plan's programs, and their text."""

    captured: CapturedGraph
    plan: Plan
    program: StagedProgram
    source: StagedSource

    def module(
        self, model: nn.Module, everyone: Communicator, *, recompile: Callable[[Request], Compiled] | None = None,
        predicts: Callable[[], Timeline] | None = None, seed: int = 0,
    ) -> StagedModule:  # fmt: skip
        """The module of one rank. `everyone`: on the mesh of all ranks. For the others see `StagedModule`."""
        return StagedModule(self.compiled, model, everyone, recompile=recompile, predicts=predicts, seed=seed)

    @property
    def compiled(self) -> Compiled:
        """What a module runs."""
        return self.captured, self.plan, self.program, self.source


def staged(captured: CapturedGraph, plan: Plan) -> Staged:
    """The programs that a plan makes of a captured graph. PlanError where it can't run so with the same numbers."""
    program = lower_stages(captured, plan)
    return Staged(captured=captured, plan=plan, program=program, source=emit_stages(program))


def carried_on(plan: Plan, captured: CapturedGraph, rules: sharding.RuleCache) -> Plan:
    """The plan for the same model called otherwise: its stages, mesh, stored layouts and choices, op by op.

    PlanError where no cut of the batch runs with one device's numbers; says why the last one doesn't.
    """
    refused: PlanError | None = None
    for micro_batches, cut in sharding.cuts_of(plan, captured, rules):
        try:
            found = sharding.carried(plan, captured, micro_batches, cut, rules)
            lower_stages(captured, found)
        except PlanError as error:
            refused = error
        else:
            return found
    assert refused is not None
    raise refused

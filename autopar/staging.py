"""From a plan with pipeline stages or micro-batches to modules that run it, and to what `verify` compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from autopar import sharding
from autopar.codegen.stages import emit_stages, lower_stages
from autopar.errors import PlanError
from autopar.ir.graph import CapturedGraph
from autopar.ir.layout import parse_layout, replicated
from autopar.ir.plan import Plan, all_ranks
from autopar.ir.staged import StagedProgram, StagedSource
from autopar.ir.timeline import Timeline
from autopar.runtime.calls import Request
from autopar.runtime.comm import Communicator
from autopar.runtime.staged import StagedModule
from autopar.runtime.staged_state import Compiled
from autopar.runtime.threads import run_threads
from autopar.verification import Trained, train


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


def train_staged(
    made: Staged, model: nn.Module, call: Callable[[nn.Module], Any], steps: int, timeout_s: float
) -> list[Trained]:
    """What `steps` steps leave on every rank; what its stage doesn't hold is that of another rank."""
    shapes = {p.name: p.meta.shape for p in made.captured.parameters}

    def rank(everyone: Communicator) -> Trained:
        module = made.module(model, everyone)
        rt = module.communicator
        layouts = {name: parse_layout(p.layout, rt.mesh) for name, p in made.plan.parameters.items()}

        def whole(name: str, piece: Tensor) -> Tensor:
            return rt.convert(piece, layouts[name], replicated(rt.mesh), shapes[name])

        return train(module, call, whole, steps, module.full_state_dict, made.plan.precision)

    return _completed(run_threads(all_ranks(made.plan), rank, timeout_s=timeout_s))


def _completed(found: Sequence[Trained]) -> list[Trained]:
    """Each rank's results with those of others for what it doesn't hold."""
    gradients: dict[str, Tensor | None] = {}
    moments: dict[str, Tensor] = {}
    every: list[dict[str, Tensor | None]] = [{} for _ in found[0].every]
    for mine in found:
        gradients = {**mine.gradients, **gradients}
        moments = {**mine.optimizer, **moments}
        every = [_with(own, known) for own, known in zip(mine.every, every, strict=True)]
    return [
        replace(
            mine,
            gradients=_with(gradients, mine.gradients),
            optimizer=_with(moments, mine.optimizer),
            every=tuple(map(_with, every, mine.every)),
        )
        for mine in found
    ]


def _with(everyone: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, Any]:
    return {**everyone, **mine}

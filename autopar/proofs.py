"""A plan's modules on in-process ranks beside the model on one device: what `verify` compares, and `--bisect`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from autopar import codegen, tracer
from autopar.ir.graph import CapturedGraph
from autopar.ir.layout import parse_layout, replicated
from autopar.ir.options import HALF
from autopar.ir.plan import Plan, all_ranks, mesh_of
from autopar.ir.program import Source
from autopar.ops.lowering import is_random
from autopar.runtime.comm import Communicator
from autopar.runtime.compiled import CompiledModule
from autopar.runtime.module import ParallelModule
from autopar.runtime.threads import run_threads
from autopar.runtime.watch import Seen, Watcher, aligned, missing, watched
from autopar.staging import Staged
from autopar.verification import DRAWN_ALIKE, TOLERANCE, Trained, VerifyReport, compare, objective, reference, train
from autopar.verification.bisect import Bisection
from autopar.verification.bisect import bisect as bisect_values
from autopar.verification.narrowed import narrowed, stored, widened

TIMEOUT_S = 600.0
"""Ranks that have not ended by then are said to be stuck."""


@dataclass(frozen=True, slots=True)
class Proof:
    """One plan for one model and batch.

    Attributes:
        args, kwargs: of the model's call, the whole batch.
        on_one_device: makes the captured graph a module of one device, which draws the random numbers that every plan
            draws.
    """

    captured: CapturedGraph
    plan: Plan
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    on_one_device: Callable[[], nn.Module]
    timeout_s: float = TIMEOUT_S

    def of_stages(self, made: Staged, steps: int) -> VerifyReport:
        """Of a plan with stages or micro-batches."""
        found = run_threads(
            all_ranks(self.plan), lambda everyone: self._trained(made.module(self.model, everyone), steps),
            timeout_s=self.timeout_s,
        )  # fmt: skip
        return self._report(self._expected(steps), _completed(found))

    def of_source(self, source: Source, steps: int, *, bisect: bool) -> VerifyReport:
        """Of emitted source, edited or not: every rank's results are compared, so replicas that differ are seen."""
        found = run_threads(
            mesh_of(self.plan), lambda rt: self._trained(self._module(source, rt), steps), timeout_s=self.timeout_s
        )
        expected = self._expected(steps)
        report = self._report(expected, found)
        if not bisect:
            return report
        bisection = self.bisect(source)
        if bisection.first is None and report.first_difference is not None:
            elsewhere = (
                f"{report.first_difference.name} differs all the same: look at what goes into and out of the program"
            )
            if not self.draws and self._captured_differs(expected.trained):
                elsewhere = "the captured graph does not compute what the model computes: that is a bug in the capture"
            bisection = replace(bisection, elsewhere=elsewhere)
        return replace(report, bisection=bisection)

    def bisect(self, source: Source) -> Bisection:
        """The first op of one forward and backward, on any rank, whose result is not one device's."""
        program = codegen.lower(self.captured, self.plan, mesh_of(self.plan))
        original = codegen.emit(program)
        made = aligned(original, source.text)
        talking = watched(source, made)

        def rank(rt: Communicator) -> Sequence[Seen]:
            watcher = Watcher()
            module = self._module(talking, rt)
            watcher.attach(rt)
            objective(self._called(module)).backward()  # type: ignore[no-untyped-call]
            return watcher.seen

        seen = run_threads(mesh_of(self.plan), rank, timeout_s=self.timeout_s)
        found = bisect_values(self.captured, program, source, made, seen, self._interpreted, TOLERANCE, is_random)
        return replace(found, missing=missing(original, source.text))

    @property
    def draws(self) -> bool:
        """True if the model draws random numbers: then one device runs its captured graph."""
        return any(is_random(n.op) for g in self.captured.graphs for n in g.nodes)

    def _module(self, source: Source, rt: Communicator) -> ParallelModule:
        return ParallelModule(self.captured, self.plan, source, self.model, rt)

    def _called(self, module: Callable[..., Any]) -> Any:
        return module(*self.args, **self.kwargs)

    def _trained(self, module: CompiledModule, steps: int) -> Trained:
        """What `steps` steps leave on this rank, in whole tensors; of a plan with stages what its stage holds."""
        rt = module.communicator
        layouts = {name: parse_layout(p.layout, rt.mesh) for name, p in self.plan.parameters.items()}
        shapes = {p.name: p.meta.shape for p in self.captured.parameters}

        def whole(name: str, piece: Tensor) -> Tensor:
            return rt.convert(piece, layouts[name], replicated(rt.mesh), shapes[name])

        return train(module, self._called, whole, steps, module.full_state_dict, self.plan.precision)

    def _expected(self, steps: int) -> _Expected:
        precision = self.plan.precision
        if self.draws:
            return _Expected(reference(self.on_one_device(), self._called, steps, precision))
        if precision not in HALF:
            return _Expected(reference(self.model, self._called, steps))
        model = stored(self.model)
        half = reference(model, lambda m: self._called(narrowed(m, precision)), steps, precision)
        return _Expected(half, reference(model, lambda m: self._called(widened(m)), steps))

    def _report(self, expected: _Expected, found: list[Trained]) -> VerifyReport:
        layouts = {name: p.layout for name, p in self.plan.parameters.items()}
        report = compare(expected.trained, found, layouts, self.plan.precision, expected.exact)
        return replace(report, note=DRAWN_ALIKE if self.draws else "")

    def _interpreted(self, watch: tracer.Watch) -> tracer.Result:
        """The captured graph on one device, with the gradients of `objective`."""
        captured, model = self.captured, self.model
        named = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        dtypes = {p.name: p.meta.dtype for p in captured.parameters} | {b.name: b.meta.dtype for b in captured.buffers}
        held = {name: named[name].detach().clone().to(getattr(torch, dtype)) for name, dtype in dtypes.items()}
        signature = captured.signature

        def tangents(outputs: list[Tensor]) -> list[Tensor]:
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_(d) for x, d in zip(outputs, signature.differentiable, strict=True)]
                wanted = [x for x in leaves if x.requires_grad]
                found = torch.autograd.grad(objective(signature.rebuild(leaves)), wanted, allow_unused=True)
            return [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)]

        return tracer.interpret(captured, held, held, signature.flatten(self.args, self.kwargs), tangents, watch)

    def _captured_differs(self, expected: Trained) -> bool:
        """True if the captured graph's gradients, on one device, are not the model's own."""
        found = self._interpreted(lambda call, name, node, value: value).gradients
        mine = replace(expected, gradients={name: found.get(name) for name in expected.gradients})
        return not compare(expected, [mine], {}).ok


@dataclass(frozen=True, slots=True)
class _Expected:
    """What one device's steps leave. `exact`: of a plan in half precision, what they leave in the precision of what is
    stored."""

    trained: Trained
    exact: Trained | None = None


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

"""The compiled model: an nn.Module with the model's own parameters' names, call and return type.

Its forward runs the emitted forward as one autograd function, whose backward runs the emitted backward. A module holds
one program for each kind of call that it has seen (`Wanted`); parameters are stored alike in all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import InputError, UserError
from autopar.ir.account import RunReport
from autopar.ir.graph import CapturedGraph, OutputKind
from autopar.ir.layout import Layout
from autopar.ir.plan import Plan
from autopar.ir.profile import Fingerprint
from autopar.ir.program import Source
from autopar.runtime.calls import (
    Request,
)
from autopar.runtime.comm import Communicator
from autopar.runtime.compiled import CompiledModule
from autopar.runtime.loaded import Executable
from autopar.runtime.module_state import Compiled, FlatState, ReadyFlat
from autopar.runtime.parameters import Weights, placements, unwrap, wrap
from autopar.runtime.programs import declared
from autopar.runtime.timing import NOTHING, Measuring
from autopar.runtime.torch_private import keeps_graph

MEASURE_VARIABLE = "AUTOPAR_MEASURE"
"""Environment: measure so many steps of every module, and print the report."""


class ParallelModule(CompiledModule):
    """A model compiled for one rank of a plan.

    Args:
        model: gives the weights (real tensors, or meta: then load them before the first call).
        rt: this rank's communicator. With process groups, parameters are DTensors; with one device, or threads, plain
            tensors.
        recompile: called when the module is called otherwise than captured (mode, shapes, plain values, ...); gives
            what to run there, with parameters stored alike. Without it such a call is an InputError.
        seed: of the random ops, the same on every rank.
        hardware: of this rank; a report of a run says what it holds for.
    """

    _autopar: FlatState

    def __init__(
        self,
        captured: CapturedGraph,
        plan: Plan,
        source: Source,
        model: nn.Module,
        rt: Communicator,
        *,
        recompile: Callable[[Request], Compiled] | None = None,
        seed: int = 0,
        hardware: Fingerprint | None = None,
    ) -> None:
        super().__init__()
        self._autopar = state = FlatState(captured, plan, source, rt, recompile, seed)
        state.weights = Weights(self, model, *declared(captured, plan, rt.mesh), rt)
        state.hardware = hardware
        self._begin(model)
        state.add_first(lambda planned: state.made(captured, source, planned))
        steps = os.environ.get(MEASURE_VARIABLE, "")
        if steps:
            if not (steps.isascii() and steps.isdigit() and int(steps) > 0):
                raise UserError(f"{MEASURE_VARIABLE} is {steps!r}; wanted how many steps to measure, 1 or more")
            self.measure(steps=int(steps))
            state.tells = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own return value. Arguments: the global batch, plain and equal on all ranks, or DTensors."""
        state = self._autopar
        state.weights.require_loaded()
        program, given = state.program_for(args, kwargs)
        if state.measuring is not None:
            state.begin_measured(program)
            state.measuring.hold((), given.values())
            with state.measured("forward_s"):
                return self._forward(program, given)
        return self._forward(program, given)

    def _forward(self, program: ReadyFlat, given: dict[str, Any]) -> Any:
        state = self._autopar
        inputs = [_place(given[path], dtype, layout, state.rt) for path, (layout, dtype) in program.inputs.items()]
        if state.measuring is not None:
            state.measuring.hold(inputs, ())
        names = list(program.executable.parameters)
        parameters = [state.weights.parameters[state.weights.first[n]] for n in names]
        sources = [given[path] for path in program.executable.differentiated]
        outputs = _Run.apply(state, program, inputs, torch.is_grad_enabled(), *parameters, *sources)  # type: ignore[no-untyped-call]
        signature = program.captured.signature
        found = [
            _outward(out, shape, layout, state.rt)
            for out, shape, layout in zip(outputs, program.output_shapes, program.outputs, strict=True)
        ]
        return signature.rebuild(found)

    def measure(self, steps: int = 3) -> None:
        """Measure coming steps: one to warm up, `steps` as they are, as many with every line timed, one with memory
        watched. So train 2 · `steps` + 2 of them, then ask for the `report`.

        A step is a call of the module, its backward, and the optimizer's step after it. Others run unchanged.
        """
        state = self._autopar
        if state.measuring is not None:
            state.measuring.stop()
        state.measuring = Measuring(steps, state.rt, state.tensors)

    def report(self, path: str | Path | None = None) -> RunReport:
        """Predicted against measured time and memory, in all and by class of op and by collective; rank 0 prints it.

        Args:
            path: where to write it as JSON too (by rank 0), for `autopar profile --refit`.

        Raises:
            UserError: no step was measured.
        """
        state = self._autopar
        if state.measuring is None:
            raise UserError(NOTHING)
        found = state.measuring.report(state.hardware)
        self._tell(found, state.rt.rank, path)
        return found


class _Run(torch.autograd.Function):
    """The emitted forward and backward as one step of autograd. Saved tensors are freed as the backward goes.

    `tensors`: the parameters, then the inputs whose gradients the program gives. `records`: a backward may follow.
    """

    @staticmethod
    def forward(
        ctx: Any, state: FlatState, program: ReadyFlat, inputs: list[Tensor], records: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        executable = program.executable
        parameters = tensors[: len(executable.parameters)]
        local = [unwrap(p) for p in parameters]
        buffers = state.buffers(executable)
        drawn = state.rt.seed, state.rt.step = state.seed, state.step
        state.step += executable.draws
        state.rt.regions = program.regions
        with _no_autocast(state.rt):
            outputs, updates, saved = state.running(program).forward(
                state.rt, local, buffers, program.constants, inputs
            )
        state.update(executable, updates)
        if records:
            ctx.held = (state, program, local, buffers, tensors, drawn)
            ctx.saved = saved
            ctx.versions = _versions(local, buffers)
        ctx.set_materialize_grads(False)
        given = {id(x) for x in (*inputs, *local, *buffers, *program.constants)}
        outputs = [o.view_as(o) if id(o) in given else o for o in outputs]
        signature = program.captured.signature
        known = {p for p, _ in program.tangents} | {p for p, yes in enumerate(signature.detached) if yes}
        ctx.mark_non_differentiable(*(o for p, o in enumerate(outputs) if p not in known))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        with ctx.held[0].measured("backward_s"):
            return _backward(ctx, gradients)


def _backward(ctx: Any, gradients: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    """Gradients for every argument of `_Run.forward`."""
    if torch.is_grad_enabled():
        raise InputError(
            "backward with create_graph=True: the compiled backward cannot be differentiated once more. Compute "
            "the gradient penalty inside the model's forward, with torch.autograd.grad(..., create_graph=True)"
        )
    state, program, local, buffers, tensors, drawn = ctx.held
    executable = program.executable
    _refuse_detached(program, gradients)
    if ctx.saved is None:
        raise InputError(
            "backward a second time through the same call: its saved tensors are freed. Call the module again, or "
            "use retain_graph=True in the first backward"
        )
    _refuse_changed(executable, local, buffers, ctx.versions)
    saved = _copy(ctx.saved) if keeps_graph() else ctx.saved
    if saved is ctx.saved:
        ctx.saved = None
    tangents = [state.rt.cut(_tangent(gradients[p], program, p, state.rt), layout) for p, layout in program.tangents]
    state.rt.regions, state.rt.ungiven = program.regions, set()
    state.rt.seed, state.rt.step = drawn  # what is drawn again is drawn as in its own call
    with _no_autocast(state.rt):
        found = state.running(program).backward(state.rt, local, buffers, program.constants, saved, tangents)
    none = {name for name, sources in program.sources.items() if sources <= state.rt.ungiven}
    layouts, first = state.weights.layouts, state.weights.first
    count = len(executable.parameters)
    wrapped = [
        None if g is None or not p.requires_grad or name in none
        else wrap(g.contiguous(), tuple(p.shape), layouts[first[name]], state.rt)
        for name, p, g in zip(executable.parameters, tensors[:count], found[:count], strict=True)
    ]  # fmt: skip
    of_inputs = [_like_given(g, x) for g, x in zip(found[count:], tensors[count:], strict=True)]
    return (None, None, None, None, *wrapped, *of_inputs)


def _no_autocast(rt: Communicator) -> Any:
    """Casts are in the program already: none may be added while it runs."""
    on = torch.is_autocast_enabled(rt.device.type)
    return torch.autocast(rt.device.type, enabled=False) if on else nullcontext()


def _versions(local: Sequence[Tensor], buffers: Sequence[Tensor]) -> list[int]:
    return [0 if x.is_inference() else x._version for x in (*local, *buffers)]


def _refuse_changed(
    executable: Executable, local: Sequence[Tensor], buffers: Sequence[Tensor], before: list[int]
) -> None:
    """InputError, as autograd's own, if a weight was changed between a forward and its backward."""
    names = (*executable.parameters, *executable.buffers)
    for name, was, now in zip(names, before, _versions(local, buffers), strict=True):
        if was != now:
            raise InputError(
                f"{name} was changed in place between this call and its backward (by an optimizer step, for example), "
                "and the gradients would be those of the new value: call backward() first, or call the module again"
            )


def _refuse_detached(program: ReadyFlat, gradients: Sequence[Tensor | None]) -> None:
    """InputError if the loss depends on an output that the program has no backward of."""
    signature = program.captured.signature
    for path, detached, gradient in zip(
        signature.outputs, signature.detached or (False,) * len(gradients), gradients, strict=True
    ):
        if detached and gradient is not None:
            raise InputError(
                f"the backward goes through output {path!r}, and this module gives gradients of the model's scalar "
                "losses only: compile with Options(differentiable='all')"
            )


def _tangent(gradient: Tensor | None, program: ReadyFlat, output: int, rt: Communicator) -> Tensor:
    """The gradient of an output, whole; zeros where the loss does not depend on it."""
    if gradient is not None:
        return gradient.contiguous()
    outs = [o for o in program.captured.top.outputs if o.kind is OutputKind.OUTPUT]
    meta = program.captured.top.values()[outs[output].value or ""].meta
    return torch.zeros(meta.shape, dtype=getattr(torch, meta.dtype), device=rt.device)


def _like_given(gradient: Tensor | None, given: Tensor) -> Tensor | None:
    """The gradient of an input, whole, as the caller's tensor is laid out."""
    if gradient is None or not given.requires_grad:
        return None
    if isinstance(given, DTensor):
        whole = DTensor.from_local(gradient, given.device_mesh, run_check=False)
        return whole.redistribute(placements=given.placements).to(given.dtype)
    return gradient.to(given.device, given.dtype)


def _copy(saved: list[Any]) -> list[Any]:
    """Saved tensors in new lists: the backward empties those that it is given."""
    return [_copy(x) if isinstance(x, list) else x for x in saved]


def _place(given: Tensor, dtype: torch.dtype, layout: Layout, rt: Communicator) -> Tensor:
    """This rank's piece of an argument."""
    given = given.detach().to(dtype)
    if isinstance(given, DTensor):
        wanted = placements(layout)
        laid = given if tuple(given.placements) == wanted else given.redistribute(placements=wanted)
        return laid.to_local().contiguous()
    return rt.cut(given.to(rt.device), layout)


def _outward(out: Tensor, shape: tuple[int, ...], layout: Layout, rt: Communicator) -> Tensor:
    """As the user gets it: a plain tensor where it is whole on every rank, else a DTensor in its layout."""
    return out if layout.replicated else wrap(out, shape, layout, rt)

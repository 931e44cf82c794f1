"""The compiled model of a plan with pipeline stages or micro-batches: this rank holds what its stage runs.

The forward runs the whole schedule, backwards too, and the backward of the loss hands over the gradients that these
made. So the loss alone can be gone back through, and no gradient can come from outside but a factor.

In float16 that factor, the scale of losses, must be there when the backwards run. They begin with the one that came
last; where another one comes the step runs again with it, which is once each time a scale changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import InputError, UserError
from autopar.ir.account import StagesReport
from autopar.ir.graph import CapturedGraph, OutputKind, TensorMeta
from autopar.ir.layout import Layout, parse_layout
from autopar.ir.plan import STAGE
from autopar.ir.timeline import Timeline
from autopar.runtime.calls import Request
from autopar.runtime.comm import Communicator
from autopar.runtime.compiled import CompiledModule
from autopar.runtime.parameters import Weights, unwrap, wrap
from autopar.runtime.pipeline import Pipeline
from autopar.runtime.pipeline_step import Result, Step
from autopar.runtime.programs import declared
from autopar.runtime.stage_times import NOTHING, StageClock, StageMeasuring
from autopar.runtime.staged_state import Compiled, ReadyProgram, StagedState, held_here, pipeline_of


class StagedModule(CompiledModule):
    """A model compiled for one rank of a plan with stages or micro-batches.

    Parameters of other stages stand as None; `parameters()` gives this stage's, as DTensors where ranks are processes.

    Args:
        compiled: the captured graph, its plan, programs and their text.
        model: gives the weights.
        everyone: the communicator of all ranks, on the mesh `ir.plan.all_ranks`.
        recompile: called when the module is called otherwise than captured (mode, shapes, plain values); gives what to
            run there, with parameters stored alike on the same stages. Without it such a call is an InputError.
        predicts: gives the predicted step, for a report.
        seed: of the random ops, the same on every rank.
    """

    _autopar: StagedState

    def __init__(
        self, compiled: Compiled, model: nn.Module, everyone: Communicator, *,
        recompile: Callable[[Request], Compiled] | None = None, predicts: Callable[[], Timeline] | None = None,
        seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        captured, plan, program, source = compiled
        pipeline = pipeline_of(captured, plan, program, source, everyone)
        self._autopar = state = StagedState(captured, plan, source, pipeline, recompile, seed)
        state.predicts = predicts
        first = _firsts(model)
        here = {first[name] for name in held_here(captured, plan, pipeline)}
        state.weights = Weights(self, model, *declared(captured, plan, program.mesh), pipeline.rt, here)
        self._begin(model)
        state.add_first(lambda planned: state.made(captured, pipeline, planned))

    @property
    def stage(self) -> int:
        """The pipeline stage of this rank."""
        return self._autopar.pipeline.stage

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own return value; outputs that are no single number are there on the last stage, and tensors on
        the meta device elsewhere. Arguments: the global batch, plain and equal on all ranks.

        Where gradients are wanted the backwards of all micro-batches have run when it returns.
        """
        program, outputs = self._run(args, kwargs, torch.is_grad_enabled())
        return program.captured.signature.rebuild(outputs)

    def step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward of a whole batch: gradients are added to `.grad`. Gives the loss, on every rank."""
        program, outputs = self._run(args, kwargs, True)
        loss = outputs[_loss(program.captured)]
        scaler = self._autopar.scaler
        (loss if scaler is None else scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def measure(self, steps: int = 3) -> None:
        """Measure coming steps, after one to warm up: train `steps` + 1 of them, then ask for the `report`."""
        self._autopar.measuring = StageMeasuring(steps)

    def report(self, path: str | Path | None = None) -> StagesReport:
        """Predicted against measured time of the actions of every stage; rank 0 prints it. Collective.

        A step is the module's call, all of the schedule; the optimizer is no part of it.

        Args:
            path: where to write it as JSON too (by rank 0).

        Raises:
            UserError: no step was measured, or the module was not made by compile().
        """
        state = self._autopar
        if state.measuring is None:
            raise UserError(NOTHING)
        if state.predicts is None:
            raise UserError("report: what was predicted is known to modules of compile() only")
        everyone = state.pipeline.everyone
        found = state.measuring.report(state.plan, state.predicts(), everyone)
        self._tell(found, everyone.rank, path)
        return found

    def scale_steps_by(self, scaler: torch.amp.GradScaler | None) -> None:
        """From now on `step` scales its loss by this scaler's scale, as `scaler.scale(loss).backward()` does."""
        self._autopar.scaler = scaler

    def _counts(self, name: str) -> bool:
        """A parameter that several stages hold counts on one of them."""
        return self._home(self._first_of(name)) == self._autopar.pipeline.stage

    def _over_stages(self, power: Tensor, largest: bool) -> Tensor:
        everyone = self._autopar.pipeline.everyone
        return (everyone.all_reduce_max if largest else everyone.all_reduce)(power, STAGE)

    def _first_of(self, name: str) -> str:
        """The captured name of a parameter of the module."""
        state = self._autopar
        return next(p.name for p in state.captured.parameters if state.weights.first[p.name] == name)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], records: bool) -> tuple[ReadyProgram, list[Tensor]]:
        state = self._autopar
        state.weights.require_loaded()
        state.require_whole()
        program, called = state.program_for(args, kwargs)
        loss = _loss(program.captured) if records else -1
        given = _tensors(program.captured, called, state.rt.device)
        tensors = state.weights.parameters.values()
        # The loss has a backward on every stage, also where all that is here is frozen.
        trains = torch.zeros((), device=state.rt.device, requires_grad=any(state.trains.values()))
        try:
            with torch.set_grad_enabled(records):
                return program, list(_Run.apply(state, program, given, loss, trains, *tensors))  # type: ignore[no-untyped-call]
        except Exception as error:
            state.failed = f"{type(error).__name__}: {error}"
            raise

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole model's state as plain tensors on every rank; loads strictly into the plain model. Collective."""
        state = self._autopar
        mine = state.weights.full_state_dict()
        metas = {n: p for p in state.captured.parameters for n in (p.name, *p.aliases)}
        whole: dict[str, Tensor] = {}
        for key in state.weights.keys:
            info = metas.get(key)
            if info is not None and info.name not in whole:
                held = mine[key] if self._home(info.name) == state.pipeline.stage else None
                whole[info.name] = _shared(state.pipeline, held, info.meta)
        return {key: whole[metas[key].name] if key in metas else mine[key] for key in state.weights.keys}

    def _home(self, name: str) -> int:
        """The stage whose value of a parameter is the one that counts: the first part's that reads it."""
        state = self._autopar
        parts = (p.index for p in state.pipeline.program.parts if name in p.main.parameters)
        return next(map(state.pipeline.home, parts), state.plan.parameters[name].stage)


def _firsts(model: nn.Module) -> dict[str, str]:
    """Each name of a parameter -> the first name of the same."""
    seen: dict[int, str] = {}
    return {name: seen.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}


def _shared(pipeline: Pipeline, held: Tensor | None, meta: TensorMeta) -> Tensor:
    """A tensor that one stage has, on all."""
    everyone = pipeline.everyone
    dtype = getattr(torch, meta.dtype)
    mine = torch.zeros(meta.shape, dtype=dtype, device=everyone.device) if held is None else held
    return everyone.all_reduce(mine, STAGE)


def _tensors(captured: CapturedGraph, given: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
    """A call's tensors by path, in the dtypes that were captured."""
    dtypes = {i.target: getattr(torch, i.value.meta.dtype) for i in captured.top.inputs}
    return {
        path: x.detach().to(device, dtypes.get(path, x.dtype)) for path, x in given.items() if isinstance(x, Tensor)
    }


def _loss(captured: CapturedGraph) -> int:
    """Position of the output that the backward starts from."""
    metas = _metas(captured)
    for position, yes in enumerate(captured.signature.differentiable):
        if yes and metas[position].shape == ():
            return position
    raise UserError(
        "a plan with stages or micro-batches runs forward and backward together, so the model must return its loss, "
        "a single number: compute it inside the model"
    )


def _metas(captured: CapturedGraph) -> list[TensorMeta]:
    values = captured.top.values()
    return [values[o.value].meta for o in captured.top.outputs if o.kind is OutputKind.OUTPUT and o.value]


class _Run(torch.autograd.Function):
    """The schedule as one step of autograd. `loss`: position of the output that backwards begin from, or -1."""

    @staticmethod
    def forward(
        ctx: Any,
        state: StagedState,
        program: ReadyProgram,
        given: dict[str, Tensor],
        loss: int,
        trains: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        captured, first = program.captured, state.weights.first
        names = list(state.weights.parameters)
        local = {n: unwrap(t.detach()) for n, t in zip(names, tensors, strict=True)}
        call = _Call(
            program, given, {p.name: local[first[p.name]] for p in captured.parameters if first[p.name] in local},
            {b.name: state.weights.buffers[first[b.name]] for b in captured.buffers}, loss, (state.seed, state.step),
        )  # fmt: skip
        state.step += program.pipeline.program.draws
        with _measured(state, program, loss) as clock:
            result = call.run(state.scale, clock)
        for name, value in result.updates.items():
            buffer = state.weights.buffers[first[name]]
            call.buffers[name] = buffer.clone()
            buffer.copy_(value)
        outputs = _outward(program, result, _metas(captured))
        if loss >= 0:
            ctx.held = (state, names, call, state.scale, result.gradients)
            ctx.loss = loss
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(o for p, o in enumerate(outputs) if p != loss))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        if ctx.held is None:
            raise InputError("backward a second time through the same call: its gradients are handed over. Call again")
        state, names, call, scale, made = ctx.held
        ctx.held = None
        factor = gradients[ctx.loss]
        if factor is not None and state.plan.precision == "fp16" and float(factor) != scale and factor.isfinite():
            scale = state.scale = float(factor)
            made = call.run(scale).gradients
        found = {state.weights.first[n]: g for n, g in made.items()}
        wrapped: list[Tensor | None] = []
        for name in names:
            gradient, parameter = found.pop(name, None), state.weights.parameters[name]
            if gradient is None or factor is None or not parameter.requires_grad:
                wrapped.append(None)
                continue
            whole = gradient if float(factor) == scale else gradient * (factor.to(gradient.dtype) / scale)
            wrapped.append(wrap(whole.contiguous(), tuple(parameter.shape), state.weights.layouts[name], state.rt))
        return (None, None, None, None, None, *wrapped)


def _measured(state: StagedState, program: ReadyProgram, loss: int) -> AbstractContextManager[StageClock | None]:
    """The clock of a step that is measured: of a call as the plan is for."""
    if state.measuring is None or loss < 0 or program.pipeline is not state.pipeline:
        return nullcontext()
    return state.measuring.step(state.rt.device)


@dataclass
class _Call:
    """One call, which can run again with the same numbers. `drawn`: where its random numbers begin."""

    program: ReadyProgram
    given: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    buffers: dict[str, Tensor]
    loss: int
    drawn: tuple[int, int]

    def run(self, scale: float, clock: StageClock | None = None) -> Result:
        """Forwards, and backwards that begin with `scale`, unless there is no loss."""
        pipeline, captured = self.program.pipeline, self.program.captured
        pipeline.begin(*self.drawn)
        tangents = _tangents(captured, self.loss, scale, pipeline.rt.device) if self.loss >= 0 else None
        return Step(pipeline, self.given, self.parameters, self.buffers, self.program.constants, tangents, clock).run()


def _tangents(captured: CapturedGraph, loss: int, scale: float, device: torch.device) -> dict[str, Tensor]:
    """`scale` for the loss, 0 for other outputs, by target."""
    found = {}
    metas = _metas(captured)
    outs = [o for o in captured.top.outputs if o.kind is OutputKind.OUTPUT]
    for position, (out, meta) in enumerate(zip(outs, metas, strict=True)):
        if captured.signature.differentiable[position]:
            value = scale if position == loss else 0.0
            found[out.target] = torch.full(meta.shape, value, dtype=getattr(torch, meta.dtype), device=device)
    return found


def _outward(program: ReadyProgram, result: Result, metas: list[TensorMeta]) -> list[Tensor]:
    """What the user gets: single numbers on every rank, other outputs on the last stage."""
    pipeline = program.pipeline
    layouts: list[Layout | None] = [None] * len(metas)
    if pipeline.last is not None:
        layouts = [parse_layout(text, pipeline.rt.mesh) for text in pipeline.last.outputs.values()]
    found = []
    for position, (meta, layout) in enumerate(zip(metas, layouts, strict=True)):
        mine = result.outputs[position] if result.outputs is not None else None
        if meta.shape == () and pipeline.program.stages > 1:
            found.append(_shared(pipeline, mine, meta))
        elif mine is None or layout is None:
            found.append(torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device="meta"))
        else:
            found.append(mine if layout.replicated else wrap(mine, meta.shape, layout, pipeline.rt))
    return found

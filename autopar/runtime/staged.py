"""The compiled model of a plan with pipeline stages or micro-batches: this rank holds what its stage runs.

The forward runs the whole schedule, backwards too, and the backward of the loss hands over the gradients that these
made. So the loss alone can be gone back through, and no gradient can come from outside but a factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import InputError, RankError, UserError
from autopar.ir.graph import CapturedGraph, OutputKind, TensorMeta
from autopar.ir.layout import Layout, parse_layout
from autopar.ir.plan import STAGE, Plan
from autopar.ir.staged import StagedProgram, StagedSource
from autopar.runtime.calls import Wanted, autocast_now, captured_leaves, leaves_of, modes_of, unfrozen
from autopar.runtime.comm import Communicator
from autopar.runtime.compiled import CompiledModule
from autopar.runtime.parameters import Weights, storage_layouts, unwrap, wrap
from autopar.runtime.pipeline import Pipeline, Result, Step


@dataclass
class _State:
    captured: CapturedGraph
    plan: Plan
    source: StagedSource
    pipeline: Pipeline
    rt: Communicator
    trains: Mapping[str, bool]
    constants: Mapping[str, Tensor]
    weights: Weights = field(init=False)
    wanted: Wanted = field(init=False)
    modules: tuple[nn.Module, ...] = ()
    seed: int = 0
    step: int = 0
    failed: str = ""

    def require_whole(self) -> None:
        """RankError once a step has failed here: other ranks are left in the middle of it."""
        if self.failed:
            everyone = self.pipeline.everyone
            raise RankError(
                f"rank {everyone.rank} of {everyone.mesh.size} failed in a step before ({self.failed}), in which the "
                "other ranks still wait for it: no further step can be run; end the ranks and start again"
            )

    def root(self, module: nn.Module) -> None:
        """The module is this one now."""
        self.weights.root = module
        self.modules = tuple(module.modules())


class StagedModule(CompiledModule):
    """A model compiled for one rank of a plan with stages or micro-batches.

    Parameters of other stages stand as None; `parameters()` gives this stage's, as DTensors where ranks are processes.

    Args:
        everyone: the communicator of all ranks, on the mesh `runtime.pipeline.all_ranks`.
        seed: of the random ops, the same on every rank.
    """

    _autopar: _State

    def __init__(
        self, captured: CapturedGraph, plan: Plan, program: StagedProgram, source: StagedSource, model: nn.Module,
        everyone: Communicator, *, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        stored = storage_layouts({name: p.layout for name, p in plan.parameters.items()}, program.mesh)
        pipeline = Pipeline(
            program, source, everyone,
            {p.name: (p.meta.shape, stored[p.name]) for p in captured.parameters if p.name in stored},
            {i.value.name: i.target for i in captured.top.inputs},
        )  # fmt: skip
        rt = pipeline.rt
        layouts = {n: stored[p.name] for p in captured.parameters for n in (p.name, *p.aliases) if p.name in stored}
        dtypes = {n: p.meta.dtype for p in captured.parameters for n in (p.name, *p.aliases)}
        dtypes |= {n: b.meta.dtype for b in captured.buffers for n in (b.name, *b.aliases)}
        self._autopar = state = _State(
            captured=captured, plan=plan, source=source, pipeline=pipeline, rt=rt,
            trains={p.name: p.requires_grad for p in captured.parameters},
            constants={name: value.to(rt.device) for name, value in captured.constants.items()}, seed=seed,
        )  # fmt: skip
        first = _firsts(model)
        here = {first[name] for name in _held(captured, plan, pipeline)}
        state.weights = Weights(self, model, layouts, dtypes, rt, here)
        self.training = captured.training
        state.modules = tuple(self.modules())
        state.wanted = Wanted(
            modes=modes_of(state.modules), leaves=captured_leaves(captured), autocast=autocast_now(rt.device)
        )

    @property
    def plan(self) -> Plan:
        """The plan that this module was compiled with."""
        return self._autopar.plan

    @property
    def source(self) -> str:
        """The emitted Python of all parts."""
        return self._autopar.source.text

    @property
    def stage(self) -> int:
        """The pipeline stage of this rank."""
        return self._autopar.pipeline.stage

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own return value; outputs that are no single number are there on the last stage, and tensors on
        the meta device elsewhere. Arguments: the global batch, plain and equal on all ranks.

        Where gradients are wanted the backwards of all micro-batches have run when it returns.
        """
        return self._autopar.captured.signature.rebuild(self._run(args, kwargs, torch.is_grad_enabled()))

    def step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward of a whole batch: gradients are added to `.grad`. Gives the loss, on every rank."""
        loss = self._run(args, kwargs, True)[_loss(self._autopar.captured)]
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

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

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], records: bool) -> list[Tensor]:
        state = self._autopar
        state.weights.require_loaded()
        state.require_whole()
        given = _read(state, args, kwargs)
        names = list(state.weights.parameters)
        # Where all of this stage is frozen, its loss can be gone back through all the same, as on the other stages.
        anchor = torch.zeros((), device=state.rt.device, requires_grad=any(state.trains.values()))
        try:
            with torch.set_grad_enabled(records):
                return list(_Run.apply(state, given, names, records, anchor, *state.weights.parameters.values()))  # type: ignore[no-untyped-call]
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


def _held(captured: CapturedGraph, plan: Plan, pipeline: Pipeline) -> set[str]:
    """Parameters of this stage: those that its parts read; of those that none reads, those that the plan puts here."""
    metas = {p.name for p in captured.parameters}
    read = {name for part in pipeline.program.parts for name in part.main.parameters}
    mine = {name for part in pipeline.parts for name in part.main.parameters if name in metas}
    return mine | {p.name for p in captured.parameters
                   if p.name not in read and plan.parameters[p.name].stage == pipeline.stage}  # fmt: skip


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


def _read(state: _State, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a call by path. InputError where it is called otherwise than it was compiled for."""
    signature = state.captured.signature
    if signature.read is None:
        leaves = signature.flatten(args, kwargs)
        given = {leaf.path: x for leaf, x in zip(signature.inputs, leaves, strict=True)}
    else:
        given = signature.read(args, kwargs)
    as_captured = signature.as_captured or (lambda dtype: dtype)
    wanted = Wanted(
        modes=modes_of(state.modules), leaves=leaves_of(given, as_captured),
        unfrozen=unfrozen(state.weights.parameters, state.trains), autocast=autocast_now(state.rt.device),
    )  # fmt: skip
    if wanted != state.wanted:
        signature.flatten(args, kwargs)
        raise InputError(
            f"the module is called as ({wanted}), its plan with stages is for ({state.wanted}): this version runs such "
            "a plan for the batch and mode that it was made for; search for the other one too"
        )
    dtypes = {i.target: getattr(torch, i.value.meta.dtype) for i in state.captured.top.inputs}
    return {
        path: x.detach().to(state.rt.device, dtypes.get(path, x.dtype))
        for path, x in given.items()
        if isinstance(x, Tensor)
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
    """The schedule as one step of autograd."""

    @staticmethod
    def forward(
        ctx: Any, state: _State, given: dict[str, Tensor], names: list[str], records: bool, anchor: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        captured, pipeline, first = state.captured, state.pipeline, state.weights.first
        loss = _loss(captured) if records else -1
        local = {n: unwrap(t.detach()) for n, t in zip(names, tensors, strict=True)}
        parameters = {p.name: local[first[p.name]] for p in captured.parameters if first[p.name] in local}
        buffers = {b.name: state.weights.buffers[first[b.name]] for b in captured.buffers}
        pipeline.begin(state.seed, state.step)
        state.step += pipeline.program.draws
        tangents = _tangents(captured, loss, state.rt.device) if records else None
        result = Step(pipeline, given, parameters, buffers, state.constants, tangents).run()
        for name, value in result.updates.items():
            state.weights.buffers[first[name]].copy_(value)
        outputs = _outward(state, result, _metas(captured))
        if records:
            ctx.held = (state, names, {first[n]: g for n, g in result.gradients.items()})
            ctx.loss = loss
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(o for p, o in enumerate(outputs) if p != loss))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        if ctx.held is None:
            raise InputError("backward a second time through the same call: its gradients are handed over. Call again")
        state, names, found = ctx.held
        ctx.held = None
        factor = gradients[ctx.loss]
        wrapped: list[Tensor | None] = []
        for name in names:
            gradient, parameter = found.pop(name, None), state.weights.parameters[name]
            if gradient is None or factor is None or not parameter.requires_grad:
                wrapped.append(None)
                continue
            whole = gradient if float(factor) == 1.0 else gradient * factor.to(gradient.dtype)
            wrapped.append(wrap(whole.contiguous(), tuple(parameter.shape), state.weights.layouts[name], state.rt))
        return (None, None, None, None, None, *wrapped)


def _tangents(captured: CapturedGraph, loss: int, device: torch.device) -> dict[str, Tensor]:
    """1 for the loss, 0 for other outputs, by target."""
    found = {}
    metas = _metas(captured)
    outs = [o for o in captured.top.outputs if o.kind is OutputKind.OUTPUT]
    for position, (out, meta) in enumerate(zip(outs, metas, strict=True)):
        if captured.signature.differentiable[position]:
            make = torch.ones if position == loss else torch.zeros
            found[out.target] = make(meta.shape, dtype=getattr(torch, meta.dtype), device=device)
    return found


def _outward(state: _State, result: Result, metas: list[TensorMeta]) -> list[Tensor]:
    """What the user gets: single numbers on every rank, other outputs on the last stage."""
    pipeline = state.pipeline
    layouts: list[Layout | None] = [None] * len(metas)
    if pipeline.last is not None:
        layouts = [parse_layout(text, state.rt.mesh) for text in pipeline.last.outputs.values()]
    found = []
    for position, (meta, layout) in enumerate(zip(metas, layouts, strict=True)):
        mine = result.outputs[position] if result.outputs is not None else None
        if meta.shape == () and pipeline.program.stages > 1:
            found.append(_shared(pipeline, mine, meta))
        elif mine is None or layout is None:
            found.append(torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device="meta"))
        else:
            found.append(mine if layout.replicated else wrap(mine, meta.shape, layout, state.rt))
    return found

"""The compiled model: an nn.Module with the model's own parameters' names, call and return type.

Its forward runs the emitted forward as one autograd function, whose backward runs the emitted backward. A module holds
one program for each kind of call that it has seen (`Wanted`); parameters are stored alike in all of them.
"""

from __future__ import annotations

import copy
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import InputError, PlanError, UserError
from autopar.ir.account import RunReport
from autopar.ir.graph import CapturedGraph, InputKind, OutputKind, TensorMeta
from autopar.ir.layout import Layout, parse_layout
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.profile import Fingerprint
from autopar.ir.program import Source
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
from autopar.runtime.certificate import Arguments, certified
from autopar.runtime.certificate.recorder import Notes, Recorder
from autopar.runtime.comm import Communicator
from autopar.runtime.compiled import CompiledModule
from autopar.runtime.loaded import Executable
from autopar.runtime.parameters import Weights, placements, storage_layouts, unwrap, wrap
from autopar.runtime.regions import Given, gradient_sources, region_metas
from autopar.runtime.timing import NOTHING, Measuring, ticking
from autopar.runtime.torch_private import keeps_graph

Compiled = tuple[CapturedGraph, Plan, Source]

MEASURE_VARIABLE = "AUTOPAR_MEASURE"
"""Environment: measure so many steps of every module, and print the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    """One captured graph ready to run, for calls of one kind."""

    planned: Planned
    captured: CapturedGraph
    executable: Executable
    inputs: dict[str, tuple[Layout, torch.dtype]]
    outputs: tuple[Layout, ...]
    output_shapes: tuple[tuple[int, ...], ...]
    tangents: tuple[tuple[int, Layout], ...]
    constants: list[Tensor]
    regions: dict[str, Any]
    sources: dict[str, frozenset[Given]]
    source: Source
    ticking: list[Executable]


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

    _autopar: _State

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
        stored = storage_layouts({name: p.layout for name, p in plan.parameters.items()}, rt.mesh)
        layouts = {n: stored[p.name] for p in captured.parameters for n in (p.name, *p.aliases) if p.name in stored}
        dtypes = {n: p.meta.dtype for p in captured.parameters for n in (p.name, *p.aliases)}
        dtypes |= {n: b.meta.dtype for b in captured.buffers for n in (b.name, *b.aliases)}
        self._autopar = _State(captured, plan, rt, recompile)
        self._autopar.seed = seed
        self._autopar.weights = Weights(self, model, layouts, dtypes, rt)
        self.training = model.training
        if self.training != captured.training:
            self.train(captured.training)
        self._autopar.modules = dict(self.named_modules())
        self._autopar.add_first(source)
        self._autopar.hardware = hardware
        steps = os.environ.get(MEASURE_VARIABLE, "")
        if steps:
            if not (steps.isascii() and steps.isdigit() and int(steps) > 0):
                raise UserError(f"{MEASURE_VARIABLE} is {steps!r}; wanted how many steps to measure, 1 or more")
            self.measure(steps=int(steps))
            self._autopar.tells = True

    @property
    def plan(self) -> Plan:
        """The plan that this module was compiled with; it fixes how parameters are stored."""
        return self._autopar.plan

    @property
    def plans(self) -> tuple[Planned, ...]:
        """Every program at hand: for which calls, its plan, and the time that planning again took."""
        return tuple(p.planned for p in self._autopar.programs.values())

    @property
    def replans(self) -> int:
        """How often a call made this module capture and plan again."""
        return self._autopar.replans

    @property
    def source(self) -> str:
        """The emitted Python of `plan`."""
        return self._autopar.source.text

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

    def _forward(self, program: _Program, given: dict[str, Any]) -> Any:
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
        if state.rt.rank == 0:
            print(found)
            if path is not None:
                found.save(path)
        return found


class _State:
    """What a ParallelModule knows besides its parameters, under one attribute so that no submodule's name is taken.

    Attributes:
        captured, plan, source: what the module was compiled with.
        modules: the tree's modules by path.
        programs: the programs at hand, the one called last at the end.
        replans: how many were made after the first.
        seed, step: where random ops draw from: the next call that draws takes this step.
    """

    weights: Weights
    modules: dict[str, nn.Module]
    source: Source
    measuring: Measuring | None = None
    hardware: Fingerprint | None = None
    tells: bool = False

    def __init__(
        self, captured: CapturedGraph, plan: Plan, rt: Communicator, recompile: Callable[[Request], Compiled] | None
    ) -> None:
        self.captured = captured
        self.plan = plan
        self.rt = rt
        self.seed = self.step = 0
        self.replans = 0
        self.programs: OrderedDict[Wanted, _Program] = OrderedDict()
        self._recompile = recompile
        self._trains = {p.name: p.requires_grad for p in captured.parameters}

    def copied(self, root: nn.Module) -> _State:
        """See `CompiledModule.__deepcopy__`."""
        new = copy.copy(self)
        new.weights = self.weights.of_copy(root)
        new.modules = dict(root.named_modules())
        new.programs = OrderedDict(self.programs)
        new.measuring, new.tells = None, False
        return new

    def root(self, module: nn.Module) -> None:
        """The module is this one now."""
        self.weights.root = self.modules[""] = module

    def begin_measured(self, program: _Program) -> None:
        """A call starts while steps are measured; once they all are, the report is printed if the environment asks."""
        assert self.measuring is not None
        if self.measuring.active:
            if self.measuring.times_next and not program.ticking:
                program.ticking.append(Executable(ticking(program.source), program.captured.model_name))
            self.measuring.begin(program.planned.plan, program.source)
            if not self.measuring.active and self.tells and self.rt.rank == 0:
                print(self.measuring.report(self.hardware), file=sys.stderr)

    def measured(self, part: str) -> AbstractContextManager[None]:
        """Around the forward or the backward of a step: on the clock if it is measured."""
        return nullcontext() if self.measuring is None else self.measuring.part(part)

    def running(self, program: _Program) -> Executable:
        """What runs a program now: as emitted or, in a step whose lines are timed, with a clock."""
        if self.measuring is None or not self.measuring.timing:
            return program.executable
        self.measuring.restart()
        return program.ticking[0]

    def tensors(self) -> list[Tensor]:
        """Parameters, their gradients, buffers and constants that are there; pieces of spread ones."""
        found = [unwrap(p) for p in self.weights.parameters.values()]
        found += [unwrap(p.grad) for p in self.weights.parameters.values() if p.grad is not None]
        return [*found, *self.weights.buffers.values(), *(c for p in self.programs.values() for c in p.constants)]

    def add_first(self, source: Source) -> None:
        """The program that the module was compiled with."""
        self.source = source
        wanted = Wanted(
            modes=modes_of(tuple(self.modules.values())),
            leaves=captured_leaves(self.captured),
            autocast=autocast_now(self.rt.device),
        )
        self.programs[wanted] = self._ready(self.captured, source, Planned(wanted=wanted, plan=self.plan, seconds=0.0))

    def _ready(self, captured: CapturedGraph, source: Source, planned: Planned) -> _Program:
        """Make a captured graph ready to run.

        Raises:
            PlanError: it is not for this mesh.
            CertificateError: ranks would not meet in the same collectives.
        """
        executable = Executable(source, captured.model_name)
        mesh = self.rt.mesh
        if executable.axes != tuple((a.name, a.size) for a in mesh.axes):
            raise PlanError(f"the source is for mesh {executable.axes}, the ranks form {mesh}")
        if mesh.size > 1:
            sources = {line: place.source for line, place in source.lines.items() if place.source}
            certified(source.text, mesh, lambda rank: _arguments(captured, executable, mesh, rank), sources)
        values = captured.top.values()
        outs = [o for o in captured.top.outputs if o.kind is OutputKind.OUTPUT]
        tangents = {i.target: i for i in captured.top.inputs if i.kind is InputKind.TANGENT}
        position = {o.target: p for p, o in enumerate(outs)}
        dtypes = {
            i.target: getattr(torch, i.value.meta.dtype) for i in captured.top.inputs if i.kind is InputKind.INPUT
        }
        copies: dict[str, Any] = {}
        return _Program(
            planned=planned,
            captured=captured,
            executable=executable,
            inputs={name: (parse_layout(text, mesh), dtypes[name]) for name, text in executable.inputs.items()},
            outputs=tuple(parse_layout(text, mesh) for text in executable.outputs.values()),
            output_shapes=tuple(values[o.value].meta.shape for o in outs if o.value is not None),
            tangents=tuple((position[t], parse_layout(executable.tangents[t], mesh)) for t in tangents),
            constants=[self._piece(captured.constants[name], text) for name, text in executable.constants.items()],
            regions={r.key: r.build(copies) for r in captured.regions},
            sources=gradient_sources(captured.top),
            source=source,
            ticking=[],
        )

    def _piece(self, whole: Tensor, text: str) -> Tensor:
        layout = parse_layout(text, self.rt.mesh)
        return cut_here(whole.to(self.rt.device), layout, self.rt)

    def program_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Program, dict[str, Any]]:
        """(what runs this call, made now if there is a way to; the call's arguments by path).

        Raises:
            InputError: the call differs from the captured one and there is no way to plan again; says how it differs.
        """
        signature = self.captured.signature
        given = read_call(signature, args, kwargs)
        as_captured = signature.as_captured or (lambda dtype: dtype)
        wanted = Wanted(
            modes=modes_of(tuple(self.modules.values())),
            leaves=leaves_of(given, as_captured),
            unfrozen=unfrozen(self.weights.parameters, self._trains),
            autocast=autocast_now(self.rt.device),
        )
        found = self.programs.get(wanted)
        if found is None:
            found = self._planned_again(wanted, args, kwargs)
        self.programs.move_to_end(wanted)
        return found, given

    def _planned_again(self, wanted: Wanted, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Program:
        if self._recompile is None:
            self._refuse(wanted, args, kwargs)
        start = time.perf_counter()
        modes = {path: m.training for path, m in self.modules.items()}
        with torch.inference_mode(False):
            captured, plan, source = self._recompile(Request(wanted=wanted, modes=modes, args=args, kwargs=kwargs))
            stored = {n: p.layout for n, p in plan.parameters.items()}
            if stored != {n: p.layout for n, p in self.plan.parameters.items()}:
                raise PlanError(f"the plan for {wanted} stores parameters otherwise than this module does")
            planned = Planned(wanted=wanted, plan=plan, seconds=time.perf_counter() - start)
            found = self._ready(captured, source, planned)
        self.replans += 1
        add_program(self.programs, wanted, found)
        return found

    def _refuse(self, wanted: Wanted, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
        """InputError that says what differs from the captured call."""
        known = next(reversed(self.programs))
        if wanted.modes != known.modes:
            raise InputError(
                f"the module is in {wanted.mode} mode, its plan was captured in {known.mode} mode: call "
                f".{'train' if known.modes[0] else 'eval'}(), or pass compile() the cluster, so that it can plan again"
            )
        self.captured.signature.flatten(args, kwargs)
        raise InputError(
            f"the module is called otherwise than it was captured: ({wanted}), captured ({known}): pass compile() "
            "the cluster, so that it can plan again"
        )

    def buffers(self, executable: Executable) -> list[Tensor]:
        """Local buffers for one call. Those that the call updates are copies: the backward may read the old values."""
        found = []
        for name, text in executable.buffers.items():
            whole = self.weights.buffers[self.weights.first[name]]
            layout = parse_layout(text, self.rt.mesh)
            whole = whole.clone() if name in executable.updates else whole
            found.append(cut_here(whole, layout, self.rt))
        return found

    def update(self, executable: Executable, values: Sequence[Tensor]) -> None:
        """Write new values into the model's buffers."""
        for name, value in zip(executable.updates, values, strict=True):
            self.weights.buffers[self.weights.first[name]].copy_(value)


def _arguments(captured: CapturedGraph, executable: Executable, mesh: Mesh, rank: int) -> Arguments:
    """Shapes of one rank's pieces of all that the emitted functions are given."""
    metas = {(i.kind, i.target): i.value.meta for i in captured.top.inputs}
    rt = Recorder(mesh, rank, Notes())

    def piece(meta: TensorMeta, text: str) -> tuple[str, tuple[int, ...]]:
        whole = torch.empty(meta.shape, device="meta")
        return meta.dtype, tuple(cut_here(whole, parse_layout(text, mesh), rt).shape)

    def pieces(kind: InputKind, layouts: Mapping[str, str]) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return tuple(piece(metas[kind, name], text) for name, text in layouts.items())

    return Arguments(
        parameters=pieces(InputKind.PARAMETER, executable.parameters),
        buffers=pieces(InputKind.BUFFER, executable.buffers),
        constants=pieces(InputKind.CONSTANT, executable.constants),
        inputs=pieces(InputKind.INPUT, executable.inputs),
        tangents=pieces(InputKind.TANGENT, executable.tangents),
        regions=tuple(
            (key, tuple((m.dtype, m.shape) for m in made), tuple((m.dtype, m.shape) for m in gradients))
            for key, made, gradients in region_metas(captured.top)
        ),
    )


class _Run(torch.autograd.Function):
    """The emitted forward and backward as one step of autograd. Saved tensors are freed as the backward goes.

    `tensors`: the parameters, then the inputs whose gradients the program gives. `records`: a backward may follow.
    """

    @staticmethod
    def forward(
        ctx: Any, state: _State, program: _Program, inputs: list[Tensor], records: bool, *tensors: Tensor
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
    tangents = [
        cut_here(_tangent(gradients[p], program, p, state.rt), layout, state.rt) for p, layout in program.tangents
    ]
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


def _refuse_detached(program: _Program, gradients: Sequence[Tensor | None]) -> None:
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


def _tangent(gradient: Tensor | None, program: _Program, output: int, rt: Communicator) -> Tensor:
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


def cut_here(whole: Tensor, layout: Layout, rt: Communicator) -> Tensor:
    """This rank's piece of a tensor that all ranks have."""
    for step in rt.mesh.names:
        place = layout.on(step)
        if place.dim >= 0:
            whole = rt.slice(whole, step, place.dim)
    return whole.contiguous()


def _place(given: Tensor, dtype: torch.dtype, layout: Layout, rt: Communicator) -> Tensor:
    """This rank's piece of an argument."""
    given = given.detach().to(dtype)
    if isinstance(given, DTensor):
        wanted = placements(layout)
        laid = given if tuple(given.placements) == wanted else given.redistribute(placements=wanted)
        return laid.to_local().contiguous()
    return cut_here(given.to(rt.device), layout, rt)


def _outward(out: Tensor, shape: tuple[int, ...], layout: Layout, rt: Communicator) -> Tensor:
    """As the user gets it: a plain tensor where it is whole on every rank, else a DTensor in its layout."""
    return out if layout.replicated else wrap(out, shape, layout, rt)

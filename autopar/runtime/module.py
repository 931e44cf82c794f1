"""The compiled model: an nn.Module with the model's own parameters' names, call and return type.

Its forward runs the emitted forward as one autograd function, whose backward runs the emitted backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import InputError, PlanError
from autopar.ir.graph import CapturedGraph, InputKind, OutputKind, TensorMeta
from autopar.ir.layout import Layout, parse_layout
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.program import Source
from autopar.runtime.certificate import Arguments, certified
from autopar.runtime.certificate.recorder import Notes, Recorder
from autopar.runtime.comm import Communicator
from autopar.runtime.loaded import Executable
from autopar.runtime.parameters import Weights, placements, storage_layouts, unwrap, wrap
from autopar.runtime.regions import Given, gradient_sources, region_metas
from autopar.runtime.torch_private import keeps_graph

Compiled = tuple[CapturedGraph, Plan, Source]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    """One captured mode (training or not) ready to run."""

    captured: CapturedGraph
    executable: Executable
    inputs: dict[str, Layout]
    outputs: tuple[Layout, ...]
    output_shapes: tuple[tuple[int, ...], ...]
    tangents: tuple[tuple[int, Layout], ...]
    constants: list[Tensor]
    regions: dict[str, Any]
    sources: dict[str, frozenset[Given]]


class ParallelModule(nn.Module):
    """A model compiled for one rank of a plan.

    Args:
        model: gives the weights (real tensors, or meta: then load them before the first call).
        rt: this rank's communicator. With process groups, parameters are DTensors; with one device, or threads, plain
            tensors.
        recompile: called with the mode (True: training) when the module is called in another mode than the captured
            one; gives what to run there, with parameters stored alike. Without it that is an InputError.
    """

    def __init__(
        self,
        captured: CapturedGraph,
        plan: Plan,
        source: Source,
        model: nn.Module,
        rt: Communicator,
        *,
        recompile: Callable[[bool], Compiled] | None = None,
    ) -> None:
        super().__init__()
        stored = storage_layouts({name: p.layout for name, p in plan.parameters.items()}, rt.mesh)
        layouts = {n: stored[p.name] for p in captured.parameters for n in (p.name, *p.aliases) if p.name in stored}
        dtypes = {n: p.meta.dtype for p in captured.parameters for n in (p.name, *p.aliases)}
        dtypes |= {n: b.meta.dtype for b in captured.buffers for n in (b.name, *b.aliases)}
        self._autopar = _State(captured, plan, rt, recompile)
        self._autopar.weights = Weights(self, model, layouts, dtypes, rt)
        self._autopar.add(captured, source)
        self.training = captured.training

    @property
    def plan(self) -> Plan:
        """The plan that this module follows."""
        return self._autopar.plan

    @property
    def source(self) -> str:
        """The emitted Python."""
        return self._autopar.program(self._autopar.captured.training).executable.source.text

    @property
    def communicator(self) -> Communicator:
        """This rank's `rt`."""
        return self._autopar.rt

    @property
    def storage_layouts(self) -> dict[str, Layout]:
        """How each parameter is stored, by its first name."""
        return dict(self._autopar.weights.layouts)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own return value. Arguments: the global batch, plain and equal on all ranks, or DTensors."""
        state = self._autopar
        state.weights.require_loaded()
        program = state.program(self.training)
        inputs = local_inputs(program.captured, program.inputs, args, kwargs, state.rt)
        names = list(program.executable.parameters)
        parameters = [state.weights.parameters[state.weights.first[n]] for n in names]
        outputs = _Run.apply(state, program, inputs, *parameters)  # type: ignore[no-untyped-call]
        losses = any(
            d and not s for d, s in zip(program.captured.signature.differentiable, program.output_shapes, strict=True)
        )
        found = [
            _outward(out, shape, layout, differentiable, losses, state.rt)
            for out, shape, layout, differentiable in zip(
                outputs, program.output_shapes, program.outputs, program.captured.signature.differentiable, strict=True
            )
        ]
        return program.captured.signature.rebuild(found)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole model's state as plain tensors on every rank; loads strictly into the plain model. Collective."""
        return self._autopar.weights.full_state_dict()

    def load_full_state_dict(self, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
        """Take this rank's pieces of a plain state dict."""
        self._autopar.weights.load_full_state_dict(state, strict=strict)

    def load_safetensors(self, paths: Path | str | list[Path | str], *, strict: bool = True) -> None:
        """Take this rank's pieces from safetensors files, reading only what it needs."""
        self._autopar.weights.load_safetensors(paths, strict=strict)


class _State:
    """What a ParallelModule knows besides its parameters, under one attribute so that no submodule's name is taken."""

    weights: Weights

    def __init__(
        self, captured: CapturedGraph, plan: Plan, rt: Communicator, recompile: Callable[[bool], Compiled] | None
    ) -> None:
        self.captured = captured
        self.plan = plan
        self.rt = rt
        self._recompile = recompile
        self._programs: dict[bool, _Program] = {}

    def add(self, captured: CapturedGraph, source: Source) -> None:
        """Make a captured mode ready to run.

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
        copies: dict[str, Any] = {}
        self._programs[captured.training] = _Program(
            captured=captured,
            executable=executable,
            inputs={name: parse_layout(text, mesh) for name, text in executable.inputs.items()},
            outputs=tuple(parse_layout(text, mesh) for text in executable.outputs.values()),
            output_shapes=tuple(values[o.value].meta.shape for o in outs if o.value is not None),
            tangents=tuple((position[t], parse_layout(executable.tangents[t], mesh)) for t in tangents),
            constants=[self._piece(captured.constants[name], text) for name, text in executable.constants.items()],
            regions={r.key: r.build(copies) for r in captured.regions},
            sources=gradient_sources(captured.top),
        )

    def _piece(self, whole: Tensor, text: str) -> Tensor:
        layout = parse_layout(text, self.rt.mesh)
        return cut_here(whole.to(self.rt.device), layout, self.rt)

    def program(self, training: bool) -> _Program:
        """What runs in this mode; compiled now if there is a way to."""
        found = self._programs.get(training)
        if found is None:
            modes = {True: "training", False: "evaluation"}
            if self._recompile is None:
                raise InputError(
                    f"the module is in {modes[training]} mode, its plan was captured in {modes[not training]} mode: "
                    f"call .{'eval' if training else 'train'}() or compile the model in {modes[training]} mode too"
                )
            captured, plan, source = self._recompile(training)
            if {n: p.layout for n, p in plan.parameters.items()} != {
                n: p.layout for n, p in self.plan.parameters.items()
            }:
                raise PlanError(
                    f"the plan for {modes[training]} mode stores parameters otherwise than this module does"
                )
            self.add(captured, source)
            found = self._programs[training]
        return found

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
    """The emitted forward and backward as one step of autograd. Saved tensors are freed as the backward goes."""

    @staticmethod
    def forward(
        ctx: Any, state: _State, program: _Program, inputs: list[Tensor], *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        local = [unwrap(p) for p in parameters]
        buffers = state.buffers(program.executable)
        state.rt.step += 1
        state.rt.regions = program.regions
        outputs, updates, saved = program.executable.forward(state.rt, local, buffers, program.constants, inputs)
        state.update(program.executable, updates)
        ctx.held = (state, program, local, buffers, parameters)
        ctx.saved = saved
        given = {id(x) for x in (*inputs, *local, *buffers, *program.constants)}
        outputs = [o.view_as(o) if id(o) in given else o for o in outputs]
        differentiable = {p for p, _ in program.tangents}
        ctx.mark_non_differentiable(*(o for p, o in enumerate(outputs) if p not in differentiable))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise InputError(
                "backward with create_graph=True: the compiled backward cannot be differentiated once more. Compute "
                "the gradient penalty inside the model's forward, with torch.autograd.grad(..., create_graph=True)"
            )
        state, program, local, buffers, parameters = ctx.held
        if ctx.saved is None:
            raise InputError(
                "backward a second time through the same call: its saved tensors are freed. Call the module again, or "
                "use retain_graph=True in the first backward"
            )
        saved = _copy(ctx.saved) if keeps_graph() else ctx.saved
        if saved is ctx.saved:
            ctx.saved = None
        tangents = [cut_here(gradients[p].contiguous(), layout, state.rt) for p, layout in program.tangents]
        state.rt.regions, state.rt.ungiven = program.regions, set()
        found = program.executable.backward(state.rt, local, buffers, program.constants, saved, tangents)
        none = {name for name, sources in program.sources.items() if sources <= state.rt.ungiven}
        layouts, first = state.weights.layouts, state.weights.first
        wrapped = [
            None if g is None or not p.requires_grad or name in none
            else wrap(g.contiguous(), tuple(p.shape), layouts[first[name]], state.rt)
            for name, p, g in zip(program.executable.parameters, parameters, found, strict=True)
        ]  # fmt: skip
        return (None, None, None, *wrapped)


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


def local_inputs(
    captured: CapturedGraph,
    layouts: Mapping[str, Layout],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rt: Communicator,
) -> list[Tensor]:
    """This rank's pieces of a call's arguments, in the order of the graph's inputs.

    Raises:
        InputError: an argument has another shape, dtype or value than the captured call; names it.
    """
    leaves = captured.signature.flatten(args, kwargs)
    by_path = {leaf.path: given for leaf, given in zip(captured.signature.inputs, leaves, strict=True)}
    return [_place(by_path[path], layout, rt) for path, layout in layouts.items()]


def _place(given: Tensor, layout: Layout, rt: Communicator) -> Tensor:
    if isinstance(given, DTensor):
        wanted = placements(layout)
        laid = given if tuple(given.placements) == wanted else given.redistribute(placements=wanted)
        return laid.to_local().detach().contiguous()
    return cut_here(given.detach().to(rt.device), layout, rt)


def _outward(
    out: Tensor, shape: tuple[int, ...], layout: Layout, differentiable: bool, losses: bool, rt: Communicator
) -> Tensor:
    """As the user gets it: a plain tensor where it is whole on every rank, else a DTensor in its layout."""
    if layout.replicated or (differentiable and not losses):
        return out
    return wrap(out, shape, layout, rt)

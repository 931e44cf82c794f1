"""What a module knows besides its parameters: for each kind of call a program, with what it is given and gives."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from autopar.errors import InputError, PlanError
from autopar.ir.graph import CapturedGraph, InputKind, OutputKind, TensorMeta
from autopar.ir.layout import Layout, parse_layout
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.profile import Fingerprint
from autopar.ir.program import Source
from autopar.runtime.calls import (
    Planned,
    Wanted,
)
from autopar.runtime.certificate import Arguments, certified
from autopar.runtime.certificate.recorder import Notes, Recorder
from autopar.runtime.loaded import Executable
from autopar.runtime.parameters import unwrap
from autopar.runtime.programs import Programs
from autopar.runtime.regions import Given, gradient_sources, region_metas
from autopar.runtime.timing import Measuring, ticking

Compiled = tuple[CapturedGraph, Plan, Source]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyFlat:
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


class FlatState(Programs[ReadyFlat, Compiled]):
    """What a ParallelModule knows besides its parameters. `tells`: the report is printed once steps are measured."""

    source: Source
    measuring: Measuring | None = None
    hardware: Fingerprint | None = None
    tells: bool = False

    def copied(self, root: nn.Module) -> Self:
        """Measured is the module that was asked."""
        new = super().copied(root)
        new.measuring, new.tells = None, False
        return new

    def begin_measured(self, program: ReadyFlat) -> None:
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

    def running(self, program: ReadyFlat) -> Executable:
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

    def made(self, captured: CapturedGraph, source: Source, planned: Planned) -> ReadyFlat:
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
        return ReadyFlat(
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
        return self.rt.cut(whole.to(self.rt.device), layout)

    def ready(self, compiled: Compiled, wanted: Wanted, seconds: float) -> ReadyFlat:
        """See `Programs`."""
        captured, plan, source = compiled
        if {n: p.layout for n, p in plan.parameters.items()} != {n: p.layout for n, p in self.plan.parameters.items()}:
            raise PlanError(f"the plan for {wanted} stores parameters otherwise than this module does")
        return self.made(captured, source, Planned(wanted=wanted, plan=plan, seconds=seconds))

    def refuse(self, wanted: Wanted, known: Wanted, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See `Programs`."""
        if self.recompile is not None:
            return
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
            found.append(self.rt.cut(whole, layout))
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
        return meta.dtype, tuple(rt.cut(whole, parse_layout(text, mesh)).shape)

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

"""One step of a plan with stages or micro-batches, on one rank: the parts of its stage in the order of the schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar.ir.graph import Phase
from autopar.ir.layout import Kind, Layout, local_piece, parse_layout
from autopar.ir.mesh import Mesh
from autopar.ir.schedule import Action, ActionKind
from autopar.ir.staged import JOINED, MICRO, RECEIVED, SUMMED, Passed, Piece
from autopar.runtime.loaded import Executable
from autopar.runtime.pipeline import Part, Pipeline
from autopar.runtime.stage_times import AFTER, BEFORE, StageClock


@dataclass(slots=True)
class Result:
    """What a step gives: outputs on the last stage (None elsewhere), and gradients by name of parameter."""

    outputs: list[Tensor] | None
    gradients: dict[str, Tensor]
    updates: dict[str, Tensor]


@dataclass
class Step:
    """One step under way.

    Args:
        given: the arguments of the call by path; parameters and buffers: local tensors by name.
        tangents: of the model's differentiable outputs by target; None: forward only.
        clock: of a step that is measured.
    """

    pipeline: Pipeline
    given: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    constants: Mapping[str, Tensor]
    tangents: Mapping[str, Tensor] | None
    clock: StageClock | None = None
    held: dict[int, list[Tensor]] = field(default_factory=dict)
    joined: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    local: dict[tuple[int, str, int], Tensor] = field(default_factory=dict)
    saved: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    waiting: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    sums: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    owned: set[tuple[int, str]] = field(default_factory=set)
    collected: list[list[Tensor]] = field(default_factory=list)
    updates: dict[str, Tensor] = field(default_factory=dict)

    def run(self) -> Result:
        """Everything in order."""
        pipeline = self.pipeline
        self.collected = [[] for _ in pipeline.program.collected]
        with self._timed(BEFORE):
            for part in pipeline.parts:
                self._join(part)
                self.held[part.index] = self._weights(part)
        for action in pipeline.order:
            if action.kind is ActionKind.FORWARD or self.tangents is not None:
                with self._timed(f"{action.kind.value}{action.chunk}"):
                    self._act(action)
        with self._timed(AFTER):
            gradients = self._gradients() if self.tangents is not None else {}
            outputs = self._outputs() if pipeline.last is not None else None
            with self._waiting():
                pipeline.everyone.sent()
        return Result(outputs=outputs, gradients=gradients, updates=self.updates)

    def _act(self, action: Action) -> None:
        match action.kind:
            case ActionKind.FORWARD:
                self._forward(action)
            case ActionKind.BACKWARD_WEIGHT:
                self._weights_half(action)
            case _:
                self._backward(action)

    def _waiting(self) -> AbstractContextManager[None]:
        return nullcontext() if self.clock is None else self.clock.waiting()

    def _timed(self, name: str) -> AbstractContextManager[None]:
        return nullcontext() if self.clock is None else self.clock.part(name)

    # Before and after the micro-batches -------------------------------------------------------------------------------

    def _join(self, part: Part) -> None:
        """What micro-batches read whole of what inputs alone decide, before any of the rest."""
        if part.first is None:
            return
        for joined, value in zip(part.program.joined, self._once(part.first, {}), strict=True):
            self.joined[part.index, joined.value] = value

    def _weights(self, part: Part) -> list[Tensor]:
        """Weights as a part's ops read them, for the whole step."""
        rt, program = self.pipeline.rt, part.program
        made: dict[str, Tensor] = {}
        for name, weights in program.weights.items():
            executable = part.weights[name]
            for parameters, targets in weights.calls.values():
                found, _, _ = executable.forward(rt, [self.parameters[p] for p in parameters], [], [], [])
                made.update(zip(targets, found, strict=True))
        held = []
        for name in part.main.parameters:
            if name in made:
                held.append(made[name])
            else:
                stored = self.parameters[name]
                shape, before = self.pipeline.stored[name]
                held.append(rt.convert(stored, before, program.held[name], shape))
        return held

    def _outputs(self) -> list[Tensor]:
        """The model's outputs, of what the last part's micro-batches gave."""
        last, program = self.pipeline.last, self.pipeline.program
        assert last is not None
        rows = zip(self.collected, program.collected, strict=True)
        return self._once(last, {piece.value: _together(row, piece) for row, piece in rows})

    def _once(self, executable: Executable, made: Mapping[str, Tensor]) -> list[Tensor]:
        """What runs once a step, of the call's arguments and of what is `made` by micro-batches."""
        rt = self.pipeline.rt
        inputs = [
            made[name.removeprefix(RECEIVED)]
            if name.startswith(RECEIVED)
            else rt.cut(self.given[name], parse_layout(text, rt.mesh), own=False)
            for name, text in executable.inputs.items()
        ]
        parameters, buffers = self._parameters(executable), self._buffers(executable)
        return executable.forward(rt, parameters, buffers, self._constants(executable), inputs)[0]

    def _gradients(self) -> dict[str, Tensor]:
        """Sums of all micro-batches, and of all parts that read a parameter, as they are stored."""
        found: dict[str, Tensor] = {}
        rt, shared = self.pipeline.rt, self.pipeline.program.shared
        for part in self.pipeline.parts:
            for name, layout in part.program.sums.items():
                total = self.sums.get((part.index, name))
                if total is not None:
                    shape, stored = self.pipeline.stored[name]
                    before = _of_devices(layout, rt.mesh)
                    self.sums[part.index, name] = rt.convert(total, before, stored, shape)
            self._after(part)
        for (_, name), total in self.sums.items():
            if name not in shared and not name.startswith(SUMMED):
                found[name] = total
        for number, (name, parts) in enumerate(shared.items()):
            if any(self.pipeline.home(p) == self.pipeline.stage for p in parts):
                found[name] = self._over_stages(name, parts, number)
        return found

    def _after(self, part: Part) -> None:
        """Gradients that are made of sums."""
        after = part.after
        if after is None:
            return
        sums = {key: total for (index, key), total in self.sums.items() if index == part.index}
        made = {key.removeprefix(SUMMED): total for key, total in sums.items() if key.startswith(SUMMED)}
        for value, gradient in zip(after.outputs, self._once(after, made), strict=True):
            self.sums[part.index, self.pipeline.names[value]] = gradient

    def _over_stages(self, name: str, parts: Sequence[int], number: int) -> Tensor:
        """The sum of the gradients of a parameter that parts on several stages hold, in the order of parts."""
        pipeline = self.pipeline
        rows: dict[int, Tensor] = {p: self.sums[p, name] for p in parts if (p, name) in self.sums}
        like = next(iter(rows.values()))
        homes = sorted({pipeline.home(p) for p in parts} - {pipeline.stage})
        program = pipeline.program
        base = 1 + (len(program.passed) * program.micro_batches + number) * len(program.parts)
        for home in homes:
            for p, row in rows.items():
                if pipeline.home(p) == pipeline.stage:
                    pipeline.everyone.send_to(row, pipeline.neighbour(home), base + p)
        for home in homes:
            for p in parts:
                if pipeline.home(p) == home:
                    rows[p] = self._receive(tuple(like.shape), like.dtype, pipeline.neighbour(home), base + p)
        total = rows[parts[0]]
        for p in parts[1:]:
            total = total + rows[p]
        return total

    # One micro-batch --------------------------------------------------------------------------------------------------

    def _at(self, micro_batch: int) -> None:
        self.pipeline.micro.place({MICRO: micro_batch})

    def _forward(self, action: Action) -> None:
        part, j = self.pipeline.parts[action.chunk], action.micro_batch
        self._at(j)
        main = part.main
        outputs, updates, saved = main.forward(
            self.pipeline.micro, self.held[part.index], self._buffers(main), self._constants(main),
            self._inputs(main, part, j),
        )  # fmt: skip
        if self.tangents is not None:
            self.saved[part.index, j] = saved
        self.updates.update(zip(main.updates, updates, strict=True))
        sent = [p for p in self.pipeline.program.passed if p.source == part.index and p.phase is Phase.FORWARD]
        for passed, out in zip(sent, outputs, strict=False):
            self._pass(passed, out, j)
        if part.index == len(self.pipeline.program.parts) - 1:
            at = {p.value: out for p, out in zip(sent, outputs, strict=False)}
            rest = iter(outputs[len(sent) :])
            for row, piece in zip(self.collected, self.pipeline.program.collected, strict=True):
                row.append(at[piece.value] if piece.value in at else next(rest))

    def _backward(self, action: Action) -> None:
        part, j = self.pipeline.parts[action.chunk], action.micro_batch
        self._at(j)
        main = part.main
        assert self.tangents is not None
        tangents = []
        for target, text in main.tangents.items():
            if target.startswith(RECEIVED):
                tangents.append(self._arrived(target.removeprefix(RECEIVED), part.index, Phase.BACKWARD, j))
            else:
                tangents.append(self._piece(self.tangents[target], text))
        found = main.backward(
            self.pipeline.micro, self.held[part.index], self._buffers(main), self._constants(main),
            self.saved.pop((part.index, j)), tangents,
        )  # fmt: skip
        if action.kind is ActionKind.BACKWARD_INPUT:
            others, self.waiting[part.index, j] = found
            self._leave(part, j, [None] * len(main.parameters), others)
        else:
            count = len(main.parameters)
            self._leave(part, j, found[:count], found[count:])

    def _weights_half(self, action: Action) -> None:
        """The second half of a backward."""
        part, j = self.pipeline.parts[action.chunk], action.micro_batch
        self._at(j)
        main = part.main
        found = main.weights(
            self.pipeline.micro, self.held[part.index], self._buffers(main), self._constants(main),
            self.waiting.pop((part.index, j)),
        )  # fmt: skip
        count = len(main.parameters)
        self._leave(part, j, found[:count], found[count:])

    def _leave(
        self, part: Part, micro_batch: int, gradients: Sequence[Tensor | None], others: Sequence[Tensor | None]
    ) -> None:
        """Gradients of parameters to their sums; others to the parts that they are of, and to what is summed."""
        for name, gradient in zip(part.main.parameters, gradients, strict=True):
            if gradient is not None:
                self._add((part.index, name), gradient, _is_summand(part.program.sums[name]))
        sent = [p for p in self.pipeline.program.passed if p.source == part.index and p.phase is Phase.BACKWARD]
        for passed, out in zip(sent, others, strict=False):
            if out is not None:
                self._pass(passed, out, micro_batch)
        for piece, out in zip(part.program.summed, others[len(sent) :], strict=True):
            if out is not None:
                self._add((part.index, SUMMED + piece.value), out, _is_summand(piece.layout))

    def _add(self, key: tuple[int, str], gradient: Tensor, summed: bool) -> None:
        """To the sum of a parameter's gradients; where every micro-batch makes the same, it is that."""
        known = self.sums.get(key)
        if known is None or not summed:
            self.sums[key] = gradient
        elif key in self.owned:
            known.add_(gradient)
        else:  # what the backward gave may be a view of something else
            self.sums[key] = known + gradient
            self.owned.add(key)

    def _pass(self, passed: Passed, value: Tensor, micro_batch: int) -> None:
        pipeline = self.pipeline
        for target in passed.targets:
            if pipeline.home(target) == pipeline.stage:
                self.local[target, passed.value, micro_batch] = value
            elif value.numel():
                tag = self._tag(passed, target, micro_batch)
                pipeline.everyone.send_to(value, pipeline.neighbour(pipeline.home(target)), tag)

    def _tag(self, passed: Passed, target: int, micro_batch: int) -> int:
        """One number for each value, part that it goes to (a stage has several) and micro-batch."""
        program = self.pipeline.program
        at = program.passed.index(passed) * len(program.parts) + target
        return 1 + at * program.micro_batches + micro_batch

    def _arrived(self, value: str, part: int, phase: Phase, micro_batch: int) -> Tensor:
        """What another part sent to this one."""
        here = self.local.pop((part, value, micro_batch), None)
        if here is not None:
            return here
        pipeline = self.pipeline
        passed = next(p for p in pipeline.program.passed if p.value == value and p.phase is phase and part in p.targets)
        piece = pipeline.program.pieces[value]
        _, shape = local_piece(
            piece.meta.shape, piece.layout, pipeline.micro.mesh, pipeline.micro.rank, piece.meta.units
        )
        dtype = getattr(torch, piece.meta.dtype)
        if 0 in shape:  # of a micro-batch without a row of this rank's: not sent
            return torch.empty(shape, dtype=dtype, device=pipeline.rt.device)
        source = pipeline.neighbour(pipeline.home(passed.source))
        return self._receive(shape, dtype, source, self._tag(passed, part, micro_batch))

    def _receive(self, shape: tuple[int, ...], dtype: torch.dtype, source: int, tag: int) -> Tensor:
        with self._waiting():
            return self.pipeline.everyone.receive_from(shape, dtype, source, tag)

    def _inputs(self, executable: Executable, part: Part, micro_batch: int) -> list[Tensor]:
        found = []
        for name, text in executable.inputs.items():
            if name.startswith(RECEIVED):
                found.append(self._arrived(name.removeprefix(RECEIVED), part.index, Phase.FORWARD, micro_batch))
            elif name.startswith(JOINED):
                found.append(self.joined[part.index, name.removeprefix(JOINED)])
            else:
                found.append(self._piece(self.given[name], text))
        return found

    def _piece(self, whole: Tensor, text: str) -> Tensor:
        """Of the micro-batch that is under way."""
        micro = self.pipeline.micro
        return micro.cut(whole, parse_layout(text, micro.mesh), own=False)

    def _parameters(self, executable: Executable) -> list[Tensor]:
        return [self.parameters[name] for name in executable.parameters]

    def _buffers(self, executable: Executable) -> list[Tensor]:
        return [self._cut(self.buffers[name], text, name in executable.updates) for name, text in
                executable.buffers.items()]  # fmt: skip

    def _constants(self, executable: Executable) -> list[Tensor]:
        return [self._cut(self.constants[name], text, False) for name, text in executable.constants.items()]

    def _cut(self, whole: Tensor, text: str, copy: bool) -> Tensor:
        rt = self.pipeline.micro if f"{MICRO}:" in text else self.pipeline.rt
        return rt.cut(whole.clone() if copy else whole, parse_layout(text, rt.mesh), own=False)


def _is_summand(layout: Layout) -> bool:
    """True where micro-batches make summands; else all make the same."""
    return MICRO not in layout.axes or layout.on(MICRO).kind is Kind.PARTIAL


def _of_devices(layout: Layout, mesh: Mesh) -> Layout:
    return Layout(mesh.names, tuple(layout.on(name) for name in mesh.names))


def _together(row: Sequence[Tensor], piece: Piece) -> Tensor:
    """What all micro-batches made: summands added, pieces joined, or what all made alike."""
    if len(row) == 1 or MICRO not in piece.layout.axes:
        return row[-1]
    at = piece.layout.on(MICRO)
    if at.kind is Kind.PARTIAL:
        total = row[0]
        for other in row[1:]:
            total = total + other
        return total
    return torch.cat(list(row), at.dim) if at.kind is Kind.SHARD else row[-1]

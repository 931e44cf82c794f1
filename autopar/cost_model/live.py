"""What one rank holds while it runs a lowered program: storages from the step that makes them to their last holder.

A storage lives as long as a name for it is held: names are let go by `Free` steps and at the end of a function, what
the forward saves is held until the backward frees it. Views and conversions that give back the same piece share the
storage of what they are made from. Throughout: parameters, buffers, constants, inputs, and the optimizer's state; a
gradient from when it is made to the end of the step (a fused optimizer needs nothing beside: `op_cost.optimizer_us`).
Every storage takes whole units of `rounding` bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from autopar import ops
from autopar.cost_model.collectives import is_view_slice
from autopar.ir.graph import CapturedGraph, Phase, TensorMeta
from autopar.ir.layout import local_shape
from autopar.ir.program import CallBlock, Compute, Convert, Free, Function, Local, Program
from autopar.ir.reshard import Collective
from autopar.ir.timeline import StageMemory

ROUND = 512
"""Bytes of one unit of torch's CUDA caching allocator."""
ROUND_CPU = 64
"""Bytes to which torch aligns what it allocates on a CPU."""
STATE = "optimizer state"


def program_memory(
    captured: CapturedGraph, program: Program, state_bytes: int, *, rounding: int = ROUND
) -> StageMemory:
    """The most that a rank holds during a step, and what holds it. `state_bytes` of optimizer state a parameter."""
    live = _Live(captured, program, rounding)
    live.run()
    state = live.state(state_bytes)
    peak, at, contributors = live.peak
    contributors = contributors + Counter({STATE: state})
    listed = sorted(contributors.items(), key=lambda x: (-x[1], x[0]))
    return StageMemory(stage=0, peak_bytes=peak + state, at=at, contributors=tuple(listed))


@dataclass
class _Storage:
    """Bytes, who made them, and how many names hold them."""

    nbytes: int
    owner: str
    holders: int = 0


@dataclass
class _Live:
    """Runs a program on sizes alone."""

    captured: CapturedGraph
    program: Program
    rounding: int
    now: int = 0
    by_owner: Counter[str] = field(default_factory=Counter)
    peak: tuple[int, str, Counter[str]] = (0, "", Counter())
    pending: list[tuple[str, dict[str, _Storage]]] = field(default_factory=list)
    saved: dict[tuple[str, int], dict[str, _Storage]] = field(default_factory=dict)

    def run(self) -> None:
        """Forward, then backward."""
        top = self.captured.top.name
        forward, backward = (self.program.function(top, phase) for phase in (Phase.FORWARD, Phase.BACKWARD))
        given: dict[str, _Storage] = {}
        for what in ("parameters", "buffers", "constants", "inputs"):
            for local in getattr(forward, what):
                given[local.name] = self._hold(self._new(local.meta, what))
        self._note("begin")
        self._function(forward, 0, dict(given))  # what it returns stays with the caller
        for local in backward.tangents:
            given[local.name] = self._hold(self._new(local.meta, "gradients of the outputs"))
        self._function(backward, 0, given)
        self._note("end of step")

    def state(self, state_bytes: int) -> int:
        """Bytes of the optimizer's state."""
        total = 0
        for parameter in self.captured.parameters:
            layout = self.program.parameters.get(parameter.name)
            if layout is not None and parameter.requires_grad:
                numel = TensorMeta(
                    local_shape(parameter.meta.shape, layout, self.program.mesh), parameter.meta.dtype
                ).numel
                total += self.rounded(numel * state_bytes)
        return total

    def rounded(self, nbytes: int) -> int:
        """In whole units."""
        return -(-nbytes // self.rounding) * self.rounding

    def _new(self, meta: TensorMeta, owner: str) -> _Storage:
        found = _Storage(self.rounded(meta.nbytes), owner)
        return found

    def _hold(self, storage: _Storage) -> _Storage:
        if storage.holders == 0:
            self.now += storage.nbytes
            self.by_owner[storage.owner] += storage.nbytes
        storage.holders += 1
        return storage

    def _release(self, storage: _Storage) -> None:
        storage.holders -= 1
        if storage.holders == 0:
            self.now -= storage.nbytes
            self.by_owner[storage.owner] -= storage.nbytes

    def _note(self, at: str) -> None:
        if self.now > self.peak[0]:
            self.peak = (self.now, at, Counter({k: v for k, v in self.by_owner.items() if v}))

    def _function(
        self, function: Function, index: int, given: dict[str, _Storage], path: str = ""
    ) -> dict[str, _Storage]:
        """Run one function; `given`: storages of its arguments, held by the caller. What it returns is held."""
        held: dict[str, _Storage] = {}
        if function.phase is Phase.BACKWARD:
            held |= self.saved.pop((function.block, index), {})
        for step in function.steps:
            match step:
                case Free():
                    for name in step.names:
                        if name in held:
                            self._release(held.pop(name))
                case Compute():
                    self._compute(step, held, given, path)
                case Convert():
                    self._convert(step, function.graph, held, given, path)
                case CallBlock():
                    self._call(step, held, given)
        kept = {x.name for x in (*function.outputs, *function.updates, *function.gradients) if x is not None}
        if function.phase is Phase.FORWARD:
            everything = held | {n: s for n, s in given.items() if n not in held}
            self.saved[function.block, index] = {x.name: self._hold(everything[x.name]) for x in function.saved}
        result = {n: self._hold(held.get(n) or given[n]) for n in kept}
        for storage in held.values():
            self._release(storage)
        return result

    def _where(self, path: str, module: str, op: str) -> str:
        return f"{'.'.join(p for p in (path, module) if p) or 'the model itself'} ({op})"

    def _compute(self, step: Compute, held: dict[str, _Storage], given: dict[str, _Storage], path: str) -> None:
        op = step.place.key.split("/")[-2] if step.place.key.count("/") >= 2 else step.function
        owner = self._where(path, step.place.module_path, op)
        first = step.inputs[0].name if step.inputs else ""
        source = (held.get(first) or given.get(first)) if ops.is_view(step.function) else None
        for out in step.outputs:
            if out is not None:
                self._set(held, out.name, source or self._new(out.meta, owner))
        self._note(owner)

    def _convert(
        self, step: Convert, graph: str, held: dict[str, _Storage], given: dict[str, _Storage], path: str
    ) -> None:
        whole = self.program.metas[graph][step.before.value]
        at = held.get(step.before.name) or given[step.before.name]
        owner = self._where(path, step.place.module_path, f"{step.before.value} converted")
        for part in step.steps:
            view = part.step.collective is Collective.SLICE and is_view_slice(whole, part.step, self.program.mesh)
            at = at if view else self._new(part.after.meta, owner)
            self._set(held, step.after.name, at)
            self._note(owner)

    def _set(self, held: dict[str, _Storage], name: str, storage: _Storage) -> None:
        self._hold(storage)
        if name in held:
            self._release(held.pop(name))
        held[name] = storage

    def _call(self, step: CallBlock, held: dict[str, _Storage], given: dict[str, _Storage]) -> None:
        inner = self.program.function(step.block, step.phase)
        outer = self.program.function(self.captured.top.name, Phase.FORWARD).parameters
        arguments = inner.inputs if step.phase is Phase.FORWARD else inner.tangents
        mine = {a.name: held.get(x.name) or given[x.name] for a, x in zip(arguments, step.inputs, strict=True)}
        for own, position in zip(inner.parameters, step.parameters, strict=True):
            mine[own.name] = given[outer[position].name]
        made = self._function(inner, step.index, mine, step.place.module_path)
        self._take(step.outputs, inner.outputs, made, held)
        self._take(step.gradients, inner.gradients, made, held)
        for storage in made.values():
            self._release(storage)

    def _take(
        self, names: Iterable[Local | None], inner: Iterable[Local | None], made: dict[str, _Storage],
        held: dict[str, _Storage],
    ) -> None:  # fmt: skip
        for name, own in zip(names, inner, strict=True):
            if name is not None and own is not None:
                self._set(held, name.name, made[own.name])


def save_memory(captured: CapturedGraph, program: Program, state_bytes: int, *, rounding: int = ROUND) -> StageMemory:
    """What a rank holds while `full_state_dict` gathers the model between two steps: every tensor whole beside its own.

    Gradients are taken to be gone (`zero_grad`); weights tied under several names are gathered once.
    """
    live = _Live(captured, program, rounding)
    own = {
        "parameters": sum(
            live.rounded(TensorMeta(local_shape(p.meta.shape, layout, program.mesh), p.meta.dtype).nbytes)
            for p in captured.parameters
            if (layout := program.parameters.get(p.name)) is not None
        ),
        "buffers": sum(live.rounded(b.meta.nbytes) for b in captured.buffers),
        STATE: live.state(state_bytes),
    }
    metas = [p.meta for p in captured.parameters] + [b.meta for b in captured.buffers if b.persistent]
    own["whole model, gathered"] = sum(live.rounded(meta.nbytes) for meta in metas)
    listed = sorted(((what, size) for what, size in own.items() if size), key=lambda x: (-x[1], x[0]))
    return StageMemory(stage=0, peak_bytes=sum(own.values()), at="checkpoint save", contributors=tuple(listed))

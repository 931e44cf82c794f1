"""What one rank holds while it runs a lowered program: storages from the step that makes them to their last holder.

A storage lives as long as a name for it is held: names are let go by `Free` steps and at the end of a function, what
the forward saves is held until the backward frees it. Views, and slices that the program takes as views, share the
storage of what they are made from; what it keeps apart has one of its own. Throughout: parameters, buffers, constants,
inputs, and the optimizer's state; a gradient from when it is made to the end of the step. A collective that needs its
input cut or its result joined in another dim than the first holds copies for that (`staging_bytes`). The step ends with
the optimizer's update and what it holds beside (`update_bytes`). Every storage takes whole units of `rounding` bytes;
what that adds is a line of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from autopar import ops
from autopar.ir.graph import CapturedGraph, Phase, TensorMeta
from autopar.ir.layout import local_shape
from autopar.ir.program import CallBlock, Compute, Convert, Free, Function, Keep, Local, Program, Step
from autopar.ir.reshard import Collective, ReshardStep
from autopar.ir.timeline import StageMemory

ROUND = 512
"""Bytes of one unit of torch's CUDA caching allocator."""
ROUND_CPU = 64
"""Bytes to which torch aligns what it allocates on a CPU."""
STATE, UPDATE, STAGING, ROUNDING = "optimizer state", "optimizer's update", "copies for collectives", "rounding"
"""Owners that are no module."""
PARAMETERS, BUFFERS, CONSTANTS, INPUTS = "parameters", "buffers", "constants", "inputs"
GRADIENTS, OPTIMIZER, ACTIVATIONS, WORKING = "gradients", "optimizer", "activations", "working set"
KINDS = (
    PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, WORKING, BUFFERS, CONSTANTS, INPUTS, STAGING, UPDATE, ROUNDING
)  # fmt: skip

LOOP_COPIES = 2
"""Copies of a parameter that AdamW holds while it updates one after the other: the root of its moment, and that root
divided. An update of all at once holds one of each."""


def program_memory(
    captured: CapturedGraph, program: Program, state_bytes: int, *, rounding: int = ROUND, gpus: bool = True
) -> StageMemory:
    """The most that a rank holds during a step, and what holds it.

    Args:
        state_bytes: of optimizer state for each element of a parameter.
        gpus: the optimizer updates all parameters at once, as torch's does there, and NCCL scatters sums; elsewhere one
            parameter after the other, and gloo sums all before it scatters.
    """
    live = _Live(captured, program, rounding, whole_sums=not gpus)
    live.run(gpus)
    exact, state = live.state(state_bytes)
    peak, at, owners, kinds = live.peak
    owners += Counter({STATE: exact, ROUNDING: state - exact})
    kinds += Counter({OPTIMIZER: exact, ROUNDING: state - exact})
    listed = sorted(owners.items(), key=lambda x: (-x[1], x[0]))
    in_order = {kind: kinds[kind] for kind in KINDS if kinds[kind]}
    return StageMemory(stage=0, peak_bytes=peak + state, at=at, contributors=tuple(listed), kinds=in_order)


def staging_bytes(step: ReshardStep, ndim: int, before: int, after: int, *, whole_sums: bool = False) -> int:
    """Bytes that a collective holds beside its input and its result, of so many bytes (`runtime.comm`).

    Pieces travel as rows: a dim other than the first is cut into rows before, and joined from rows afterwards.
    `whole_sums`: the sum of a reduce-scatter is made in a copy of all of the input (`runtime.groups`).
    """
    match step.collective:
        case Collective.ALL_GATHER:
            return after if step.dim % ndim else 0
        case Collective.REDUCE_SCATTER:
            return before if whole_sums or step.dim % ndim else 0
        case Collective.ALL_TO_ALL:
            cut = before if step.to_dim % ndim else 0
            return max(cut, before if step.dim % ndim else 0)
        case _:
            return 0


@dataclass
class _Storage:
    """Bytes exactly and in whole units, who made them, of which kind they are, and how many names hold them."""

    exact: int
    nbytes: int
    owner: str
    kind: str
    holders: int = 0


@dataclass
class _Live:
    """Runs a program on sizes alone."""

    captured: CapturedGraph
    program: Program
    rounding: int
    whole_sums: bool = False
    now: int = 0
    by_owner: Counter[str] = field(default_factory=Counter)
    by_kind: Counter[str] = field(default_factory=Counter)
    peak: tuple[int, str, Counter[str], Counter[str]] = (0, "", Counter(), Counter())
    pending: list[tuple[str, dict[str, _Storage]]] = field(default_factory=list)
    saved: dict[tuple[str, int], dict[str, _Storage]] = field(default_factory=dict)
    kept_as: dict[str, str] = field(default_factory=dict)

    def run(self, together: bool) -> None:
        """Forward, backward, then the optimizer's update."""
        top = self.captured.top.name
        forward, backward = (self.program.function(top, phase) for phase in (Phase.FORWARD, Phase.BACKWARD))
        given: dict[str, _Storage] = {}
        for what in (PARAMETERS, BUFFERS, CONSTANTS, INPUTS):
            for local in getattr(forward, what):
                given[local.name] = self._hold(self._new(local.meta, what, what))
        self._note("begin")
        self._function(forward, 0, dict(given))  # what it returns stays with the caller
        for local in backward.tangents:
            given[local.name] = self._hold(self._new(local.meta, "gradients of the outputs", WORKING))
        self._function(backward, 0, given)
        self._note("end of backward")
        self._beside(self.update_bytes(together), UPDATE, "optimizer")

    def trained(self) -> list[TensorMeta]:
        """This rank's pieces of the parameters that train."""
        return [
            TensorMeta(local_shape(p.meta.shape, layout, self.program.mesh), p.meta.dtype)
            for p in self.captured.parameters
            if p.requires_grad and (layout := self.program.parameters.get(p.name)) is not None
        ]

    def state(self, state_bytes: int) -> tuple[int, int]:
        """Bytes of the optimizer's state, exactly and in whole units."""
        sizes = [meta.numel * state_bytes for meta in self.trained()]
        return sum(sizes), sum(map(self.rounded, sizes))

    def update_bytes(self, together: bool) -> int:
        """Bytes that AdamW's update holds beside parameters, gradients and state, in whole units."""
        sizes = [self.rounded(meta.nbytes) for meta in self.trained()]
        return sum(sizes) if together else LOOP_COPIES * max(sizes, default=0)

    def rounded(self, nbytes: int) -> int:
        """In whole units."""
        return -(-nbytes // self.rounding) * self.rounding

    def _new(self, meta: TensorMeta, owner: str, kind: str = WORKING) -> _Storage:
        return _Storage(meta.nbytes, self.rounded(meta.nbytes), owner, kind)

    def _hold(self, storage: _Storage) -> _Storage:
        if storage.holders == 0:
            self._count(storage, 1)
        storage.holders += 1
        return storage

    def _release(self, storage: _Storage) -> None:
        storage.holders -= 1
        if storage.holders == 0:
            self._count(storage, -1)

    def _count(self, storage: _Storage, sign: int) -> None:
        self.now += sign * storage.nbytes
        for sums, what in ((self.by_owner, storage.owner), (self.by_kind, storage.kind)):
            sums[what] += sign * storage.exact
            sums[ROUNDING] += sign * (storage.nbytes - storage.exact)

    def _is(self, storage: _Storage, kind: str) -> None:
        """What was made for the moment turns out to be kept."""
        if storage.kind == WORKING and kind != WORKING:
            if storage.holders:
                self.by_kind[WORKING] -= storage.exact
                self.by_kind[kind] += storage.exact
            storage.kind = kind

    def _beside(self, nbytes: int, what: str, at: str) -> None:
        """Bytes that are held for a moment."""
        held = _Storage(nbytes, nbytes, what, what)
        self._hold(held)
        self._note(at)
        self._release(held)

    def _note(self, at: str) -> None:
        if self.now > self.peak[0]:
            owners, kinds = (Counter({k: v for k, v in x.items() if v}) for x in (self.by_owner, self.by_kind))
            self.peak = (self.now, at, owners, kinds)

    def _function(
        self, function: Function, index: int, given: dict[str, _Storage], path: str = ""
    ) -> dict[str, _Storage]:
        """Run one function; `given`: storages of its arguments, held by the caller. What it returns is held."""
        held: dict[str, _Storage] = {}
        kept_as = dict.fromkeys((x.name for x in function.saved), ACTIVATIONS)
        kept_as |= dict.fromkeys((x.name for x in function.gradients if x is not None), GRADIENTS)
        outer, self.kept_as = self.kept_as, kept_as
        if function.phase is Phase.BACKWARD:
            held |= self.saved.pop((function.block, index), {})
        for step in function.steps:
            self._step(step, held, given, path)
        kept = {x.name for x in (*function.outputs, *function.updates, *function.gradients) if x is not None}
        if function.phase is Phase.FORWARD:
            everything = held | {n: s for n, s in given.items() if n not in held}
            self.saved[function.block, index] = {x.name: self._hold(everything[x.name]) for x in function.saved}
            for x in function.saved:  # what a block was given and keeps, too
                self._is(everything[x.name], ACTIVATIONS)
        result = {n: self._hold(held.get(n) or given[n]) for n in kept}
        for storage in held.values():
            self._release(storage)
        self.kept_as = outer
        return result

    def _step(self, step: Step, held: dict[str, _Storage], given: dict[str, _Storage], path: str) -> None:
        match step:
            case Free():
                for name in step.names:
                    if name in held:
                        self._release(held.pop(name))
            case Compute():
                self._compute(step, held, given, path)
            case Convert():
                self._convert(step, held, given, path)
            case Keep():
                self._keep(step, held, path)
            case CallBlock():
                self._call(step, held, given)

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
        inputs = tuple(x.meta for x in step.inputs)
        beside = ops.held_bytes(step.function, step.args, inputs, self.program.mesh)
        self._beside(self.rounded(beside), WORKING, owner)

    def _convert(self, step: Convert, held: dict[str, _Storage], given: dict[str, _Storage], path: str) -> None:
        at = held.get(step.before.name) or given[step.before.name]
        owner = self._where(path, step.place.module_path, f"{step.before.value} converted")
        for part in step.steps:
            before = at.exact
            at = self._hold(at if part.view else self._new(part.after.meta, owner))
            ndim, after = len(part.after.meta.shape), part.after.meta.nbytes
            staged = staging_bytes(part.step, ndim, before, after, whole_sums=self.whole_sums)
            self._beside(self.rounded(staged), STAGING, owner)
            self._set(held, step.after.name, at)
            self._release(at)

    def _keep(self, step: Keep, held: dict[str, _Storage], path: str) -> None:
        owner = self._where(path, step.place.module_path, f"{step.local.value} kept")
        copy = self._hold(self._new(step.local.meta, owner))
        self._note(owner)
        self._set(held, step.local.name, copy)
        self._release(copy)

    def _set(self, held: dict[str, _Storage], name: str, storage: _Storage) -> None:
        self._is(storage, self.kept_as.get(name, WORKING))
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
        STATE: live.state(state_bytes)[1],
    }
    metas = [p.meta for p in captured.parameters] + [b.meta for b in captured.buffers if b.persistent]
    own["whole model, gathered"] = sum(live.rounded(meta.nbytes) for meta in metas)
    listed = sorted(((what, size) for what, size in own.items() if size), key=lambda x: (-x[1], x[0]))
    return StageMemory(stage=0, peak_bytes=sum(own.values()), at="checkpoint save", contributors=tuple(listed))

"""Which tensors of a function share a storage, and which get one of their own: the one place that decides it.

A storage goes when the last name for it goes, so a small view that waits for the backward holds all of what it is a
view of. What waits is copied out (`Keep`) unless that saves nothing: because the storage waits whole anyway, or is
there throughout, or because what waits of it is as large as it is. A conversion that cuts a contiguous piece out of a
tensor (a slice of the first dim of more than one row) is a view where that tensor is there as long as the piece;
everywhere else a slice copies. Prices follow what is decided here (`cost_model.emitted`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from autopar import ops
from autopar.codegen.scope import reads
from autopar.ir.program import CallBlock, Compute, Convert, Free, Keep, Local, Place, Step
from autopar.ir.reshard import Collective

NOWHERE = Place(key="", module_path="", source="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """Who else holds a function's tensors.

    Attributes:
        always: arguments that are there throughout: parameters, buffers, the model's inputs.
        caller: arguments that the caller holds until the function has ended.
        loose: arguments that go with their last reader: what a backward takes over from its forward.
        waiting: names that stay after the function: what the backward reads, gradients of parameters.
        leaving: other names that the function gives back; `leaving_stay`: the caller keeps them as long.
    """

    always: tuple[Local, ...] = ()
    caller: tuple[Local, ...] = ()
    loose: tuple[Local, ...] = ()
    waiting: Collection[str] = ()
    leaving: Collection[str] = ()
    leaving_stay: bool = False


def in_own_storage(steps: Sequence[Step], holders: Holders) -> list[Step]:
    """The steps (no `Free` among them yet) with slices told apart and `Keep`s for what waits."""
    found = _Storages(holders, len(steps))
    for i, step in enumerate(steps):
        found.run(i, step)
    views = found.views()
    kept = found.kept()
    changed: list[Step] = []
    for i, step in enumerate(steps):
        changed.append(_as_view(step) if i in views and isinstance(step, Convert) else step)
        changed += kept.get(i, ())
    return changed


def cuts_out(step: Convert) -> bool:
    """True if the conversion begins with a contiguous piece of what it reads: all dims before the cut one are 1."""
    first = step.steps[0].step
    return first.collective is Collective.SLICE and all(n == 1 for n in step.before.meta.shape[: first.dim])


def _as_view(step: Convert) -> Convert:
    return replace(step, steps=(replace(step.steps[0], view=True), *step.steps[1:]))


@dataclass
class _Storage:
    """`nbytes`: of what made it, in function `maker`; `until`: the step after which no name for it is read."""

    nbytes: int
    maker: str
    until: float
    names: list[str] = field(default_factory=list)
    always: bool = False


@dataclass
class _Storages:
    holders: Holders
    end: int
    of: dict[str, _Storage] = field(default_factory=dict)
    locals: dict[str, Local] = field(default_factory=dict)
    parent: dict[str, str] = field(default_factory=dict)
    made: dict[str, tuple[int, Place]] = field(default_factory=dict)
    slices: list[tuple[int, Convert]] = field(default_factory=list)
    passing: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        for given, until in ((self.holders.always, math.inf), (self.holders.caller, self.end), (self.holders.loose, 0)):
            for local in given:
                self._new(local, until).always = until == math.inf

    def run(self, i: int, step: Step) -> None:
        """What step number `i` makes, and whose life it prolongs."""
        for name in reads(step):
            self.of[name].until = max(self.of[name].until, i)
        match step:
            case Compute():
                source = step.inputs[0].name if step.inputs and ops.is_view(step.function) else None
                self._make(i, step.outputs, step.place, source)
            case CallBlock():
                self._make(i, (*step.outputs, *step.gradients), step.place)
            case Convert():
                if cuts_out(step):
                    (self.passing.add(i) if len(step.steps) > 1 else self.slices.append((i, step)))
                self._make(i, (step.after,), step.place)
            case Free() | Keep():
                raise AssertionError(f"{step}: decided here")

    def _make(self, i: int, outputs: Iterable[Local | None], place: Place, source: str | None = None) -> None:
        for out in outputs:
            if out is None:
                continue
            self.made[out.name] = (i, place)
            if source is None:
                self._new(out, i)
            else:
                self.locals[out.name] = out
                self._join(out.name, source)

    def _new(self, local: Local, until: float) -> _Storage:
        self.locals[local.name] = local
        found = self.of[local.name] = _Storage(local.meta.nbytes, local.name, until, [local.name])
        return found

    def _join(self, name: str, source: str) -> None:
        """`name`, and what is already a view of it, is a view of `source`."""
        mine, other = self.of.get(name), self.of[source]
        self.parent[name] = source
        for each in mine.names if mine is not None else [name]:
            self.of[each] = other
            other.names.append(each)
        if mine is not None:
            other.until = max(other.until, mine.until)

    def _waiting(self, storage: _Storage) -> list[str]:
        """Names of a storage that wait and are views of no other one that does."""
        return [n for n in storage.names if n in self.holders.waiting and not self._under_waiting(n)]

    def _under_waiting(self, name: str) -> bool:
        while name in self.parent:
            name = self.parent[name]
            if name in self.holders.waiting:
                return True
        return False

    def _stays(self, storage: _Storage) -> bool:
        """True if it is there, whole, when the function has ended."""
        if storage.always or (self.holders.leaving_stay and any(n in self.holders.leaving for n in storage.names)):
            return True
        return sum(self.locals[n].meta.nbytes for n in self._waiting(storage)) >= storage.nbytes

    def _until(self, storage: _Storage) -> float:
        if self._stays(storage):
            return math.inf
        return self.end if any(n in self.holders.leaving for n in storage.names) else storage.until

    def views(self) -> set[int]:
        """Conversions whose slice is a view."""
        found = set(self.passing)
        for i, step in self.slices:
            before, after = self.of[step.before.name], self.of[step.after.name]
            if any(n in self.holders.leaving for n in after.names):
                continue  # nobody else's memory leaves
            wanted = math.inf if any(n in self.holders.waiting for n in after.names) else after.until
            if self._until(before) >= wanted:
                found.add(i)
                self._join(step.after.name, step.before.name)
        return found

    def kept(self) -> dict[int, list[Keep]]:
        """What is copied out, by the step that makes it."""
        found: dict[int, list[Keep]] = {}
        for storage in {id(s): s for s in self.of.values()}.values():
            if not self._stays(storage):
                for name in self._waiting(storage):
                    i, place = self.made[name]
                    found.setdefault(i, []).append(Keep(local=self.locals[name], whole=storage.maker, place=place))
        return found

"""Which module calls are repeated blocks: those that dispatch the same ops on the same shapes, whatever their class.

Two calls are equal if their ops, plain arguments, data flow, literals, shapes, dtypes, parameters' relative names and
requires_grad flags are. Only calls that are functions of their tensor arguments, their own parameters
and buffers and of literals are taken: nothing else read, nothing written outside, nothing kept but the result.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from autopar.tracer.record import Call, Record, literal_digest
from autopar.tracer.rig import Rig
from autopar.tracer.torch_private import storage_key
from autopar.tracer.tree import PLAIN

MIN_HEAVY_OPS = 2
"""A block has at least this many matrix products or the like: a lone Linear or norm is no block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What a call is as a function.

    Attributes:
        digest: equal for equal calls.
        slots: of its used parameters, then of its used buffers; `slot_names` relative to the module.
        inputs: for each tensor input: position of the leaf in (args, kwargs), and its number in the record.
        results: for each leaf of the result: ("out", k), ("leaf", position in the arguments) or ("constant", None).
        outputs: numbers of the output tensors in the record, and whether each needs a gradient.
    """

    digest: str
    slots: tuple[int, ...]
    slot_names: tuple[str, ...]
    inputs: tuple[tuple[int, int], ...]
    results: tuple[tuple[str, int], ...]
    outputs: tuple[tuple[int, bool], ...]


@dataclass(frozen=True, slots=True)
class Chosen:
    """Equal calls, in order of execution.

    Attributes:
        fed: for each call the position among its tensor inputs of the one output of the call before it, if that is all
            that happens between the two (layers in a row); None if not.
    """

    calls: tuple[tuple[Call, Footprint], ...]
    fed: tuple[int | None, ...]


def choose_blocks(record: Record, rig: Rig) -> tuple[Chosen, ...]:
    """Groups of at least two equal calls, outermost first: a call inside a chosen one is not looked at."""
    heavy = [0]
    for op in record.ops:
        heavy.append(heavy[-1] + op.heavy)
    last_use = _last_uses(record)
    ranked = _Ranked()
    if record.root is not None:
        ranked.push(record.root.children)
    chosen = []
    while batch := ranked.pop_largest():
        batch = [c for c in batch if heavy[c.stop] - heavy[c.start] >= MIN_HEAVY_OPS]
        groups: dict[str, list[tuple[Call, Footprint]]] = {}
        for call in batch:
            footprint = _footprint(record, rig, call, last_use)
            if footprint is None:
                ranked.push(call.children)
            else:
                groups.setdefault(footprint.digest, []).append((call, footprint))
        for group in groups.values():
            if len(group) > 1:
                fed = (None, *(_fed(a, b, last_use) for a, b in pairwise(group)))
                chosen.append(Chosen(tuple(group), fed))
            else:
                ranked.push(group[0][0].children)
    return tuple(chosen)


def _fed(before: tuple[Call, Footprint], after: tuple[Call, Footprint], last_use: list[int]) -> int | None:
    """Which tensor input of `after` is the output of `before`, if nothing else reads that output, no op runs between
    them, and their other inputs are the same tensors, which get no gradient."""
    (call, footprint), (following, feeding) = before, after
    if following.start != call.stop or len(footprint.outputs) != 1:
        return None
    made = footprint.outputs[0][0]
    at = [p for p, (_, number) in enumerate(feeding.inputs) if number == made]
    if len(at) != 1 or last_use[made] >= following.stop:
        return None
    others = [
        (x, y) for p, ((_, x), (_, y)) in enumerate(zip(footprint.inputs, feeding.inputs, strict=True)) if p != at[0]
    ]
    return at[0] if all(x == y and not following.grads[y] for x, y in others) else None


def used_outside(record: Record, chosen: Sequence[Chosen]) -> set[int]:
    """Slots that ops outside the chosen calls read, that the forward replaces or that the model returns."""
    inside = sorted((call.start, call.stop) for group in chosen for call, _ in group.calls)
    used = set(record.replaced)
    at = 0
    for start, stop in [*inside, (len(record.ops), 0)]:
        for op in record.ops[at:start]:
            used |= {record.slot_of[n] for n in op.ins if n in record.slot_of}
        at = stop
    returned = [record.number(x) for _, x in record.outputs]
    return used | {record.slot_of[n] for n in returned if n in record.slot_of}


class _Ranked:
    """Calls by number of ops, largest first."""

    def __init__(self) -> None:
        self.heap: list[tuple[int, int, Call]] = []
        self.serial = 0

    def push(self, calls: Sequence[Call]) -> None:
        for call in calls:
            self.serial += 1
            heapq.heappush(self.heap, (call.start - call.stop, self.serial, call))

    def pop_largest(self) -> list[Call]:
        """All calls with the largest number of ops, in order of execution."""
        found: list[Call] = []
        while self.heap and (not found or self.heap[0][0] == found[0].start - found[0].stop):
            found.append(heapq.heappop(self.heap)[2])
        return sorted(found, key=lambda c: c.start)


def _last_uses(record: Record) -> list[int]:
    """Per tensor number: index of the last op that reads it; beyond all ops if the model returns it."""
    last = [-1] * len(record.tensors)
    for index, op in enumerate(record.ops):
        for n in op.ins:
            last[n] = index
    for _, tensor in record.outputs:
        last[record.number(tensor)] = len(record.ops)
    return last


def _footprint(record: Record, rig: Rig, call: Call, last_use: list[int]) -> Footprint | None:
    """None if the call is not a function of its arguments, parameters and buffers."""
    own = _own_slots(rig, call)
    position_of = {record.number(x): i for i, x in reversed(list(enumerate(call.leaves))) if isinstance(x, Tensor)}
    reader = _Reader(record, rig, call, own, position_of)
    for index in range(call.start, call.stop):
        if not reader.read(index):
            return None
    results = reader.results()
    if results is None or not call.grad_mode:
        return None
    kept = {n for n, _ in reader.outputs}
    if any(last_use[n] >= call.stop for n in reader.local if n not in kept and n not in reader.outside):
        return None
    updated = reader.updated()
    if not any(grad for _, grad in reader.outputs) or updated is None or not updated.isdisjoint(record.replaced):
        return None
    parameters = [s for s in reader.slots if rig.slots[s].is_parameter]
    slots = parameters + [s for s in reader.slots if not rig.slots[s].is_parameter]
    text = "\n".join([*reader.lines, f"{results} {call.autocast} {[rig.slots[s].is_parameter for s in slots]}"])
    return Footprint(
        digest=hashlib.sha256(text.encode()).hexdigest(),
        slots=tuple(slots),
        slot_names=tuple(own[s] for s in slots),
        inputs=tuple((position_of[n], n) for n in reader.inputs),
        results=results,
        outputs=tuple(reader.outputs),
    )


def _own_slots(rig: Rig, call: Call) -> dict[int, str]:
    """Slot -> its first name relative to the called module."""
    own: dict[int, str] = {}
    for path, sub in call.module.named_modules():
        for d in (sub._parameters, sub._buffers):
            for key in d:
                slot = rig.slot_of.get((id(d), key))
                if slot is not None:
                    own.setdefault(slot, f"{path}.{key}" if path else key)
    return own


class _Reader:
    """Walks the ops of one call, numbering tensors in order of appearance."""

    def __init__(self, record: Record, rig: Rig, call: Call, own: dict[int, str], position_of: dict[int, int]) -> None:
        self.record, self.rig, self.call, self.own, self.position_of = record, rig, call, own, position_of
        self.local: dict[int, int] = {}
        self.outside: set[int] = set()
        self.slots: list[int] = []
        self.inputs: list[int] = []
        self.outputs: list[tuple[int, bool]] = []
        self.lines: list[str] = []
        self.writes: set[int] = set()

    def read(self, index: int) -> bool:
        """False if the op reads something that is not the call's."""
        op = self.record.ops[index]
        for n in op.ins:
            if n not in self.local and not self._enter(n):
                return False
        for n in op.outs:
            self.local.setdefault(n, len(self.local))
        self.writes.update(op.writes)
        self.lines.append(f"{op.text}|{[self.local[n] for n in op.ins]}|{[self.local[n] for n in op.outs]}")
        return True

    def _enter(self, n: int) -> bool:
        """Take in a tensor from outside: own parameter or buffer, argument, or literal."""
        tensor = self.record.tensors[n]
        slot = self.record.slot_of.get(n)
        shape = f"{tuple(tensor.shape)} {tensor.dtype}"
        if slot is not None and slot in self.own:
            own = self.rig.slots[slot]
            text = f"own {self.own[slot]} {own.is_parameter} {own.tensor.dtype} {own.tensor.requires_grad} {shape}"
            if slot not in self.slots:
                self.slots.append(slot)
        elif n in self.position_of:
            text = f"input {self.call.grads[n]} {shape}"
            self.inputs.append(n)
        else:
            value = literal_digest(self.record.literals.get(n, tensor))
            if value is None:
                return False
            text = f"literal {value}"
        self.local[n] = len(self.local)
        self.outside.add(n)
        self.lines.append(f"{self.local[n]} = {text}")
        return True

    def results(self) -> tuple[tuple[str, int], ...] | None:
        """How each leaf of the result is made; None if one cannot be given back."""
        found: list[tuple[str, int]] = []
        place: dict[int, int] = {}
        outer = {storage_key(self.record.tensors[n]) for n in (*self.outside, *self.position_of)}
        for leaf in self.call.result:
            if not isinstance(leaf, Tensor):
                if not isinstance(leaf, PLAIN):
                    return None
                found.append(("constant", 0))
                continue
            n = self.record.number(leaf)
            if n in self.position_of:
                found.append(("leaf", self.position_of[n]))
            elif n in self.local and n not in self.outside and storage_key(leaf) not in outer:
                if n not in place:
                    place[n] = len(self.outputs)
                    self.outputs.append((n, leaf.requires_grad))
                    self.lines.append(f"result {self.local[n]} {leaf.requires_grad}")
                found.append(("out", place[n]))
            else:
                return None
        return tuple(found)

    def updated(self) -> set[int] | None:
        """Own buffers that the call writes into; None if it writes into other memory from outside, or if an op of
        another call reads or writes one of these buffers, so that the order of the two would count."""
        outer = {storage_key(self.record.tensors[n]) for n in (*self.outside, *self.position_of)}
        written = self.writes & outer
        if not written:
            return set()
        found = {slot for key in written if (slot := self.record.memory_of_slot.get(key)) is not None}
        if len(found) < len(written) or not found <= self.own.keys() or not found <= set(self.slots):
            return None
        inside = range(self.call.start, self.call.stop)
        for slot in found:
            if any(index not in inside for index in self.record.users_of_slot(slot)):
                return None
        return found

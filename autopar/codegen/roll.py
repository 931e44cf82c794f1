"""Turns equal calls of a block that follow each other into one loop.

A run rolls if the steps between its calls are the same, and each name that they read is made inside the same turn, or
is the same for all turns, or is what the turn before made at the same place (carried). A carried name takes the first
turn's name, is set before the loop, and is read in a turn before it is set again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.codegen.scope import reads, writes
from autopar.ir.graph import Ref
from autopar.ir.program import CallBlock, Compute, Convert, Free, Keep, Step

LEAST = 3
"""Turns below which a loop is no easier to read."""


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name for a tensor: what a carried variable starts from."""

    name: str
    start: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """`body` for each call index in `indices`. `renamed`: the last turn's names -> the variables that hold them."""

    indices: range
    body: tuple[Step, ...]
    carried: tuple[Alias, ...]
    renamed: tuple[tuple[str, str], ...]


Item = Compute | Convert | Keep | CallBlock | Free | Alias | Loop


def roll(steps: Sequence[Step], keep: set[str], held: Sequence[str] = ()) -> tuple[list[Item], dict[str, str]]:
    """The steps with loops and fresh Frees, and the names that now go by another. `keep`: what leaves the function;
    `held`: what is at hand from the start and may be freed."""
    plain: list[Step] = [s for s in steps if not isinstance(s, Free)]
    calls = [i for i, s in enumerate(plain) if isinstance(s, CallBlock)]
    found: list[Item] = []
    renamed: dict[str, str] = {}
    at = 0
    while at < len(plain):
        loop, size = _longest(plain, at, calls[bisect_left(calls, at) :][:2], keep)
        if loop is None:
            found.append(rename_step(plain[at], renamed))
            at += 1
            continue
        body = tuple(rename_step(s, renamed) for s in loop.body)
        carried = tuple(Alias(a.name, renamed.get(a.start, a.start)) for a in loop.carried)
        found += [*carried, replace(loop, body=body, carried=carried)]
        renamed.update(loop.renamed)
        at += size
    return _freed(found, {renamed.get(n, n) for n in keep}, held), renamed


def _freed(items: list[Item], keep: set[str], given: Sequence[str]) -> list[Item]:
    """Each name freed after its last read, in loops too."""
    last: dict[str, int] = {}
    mine = set(given)
    for i, item in enumerate(items):
        last.update(dict.fromkeys(_reads(item), i))
        mine.update(_writes(item))
    found: list[Item] = []
    for i, item in enumerate(items):
        if isinstance(item, Loop):
            after = keep | {n for n, at in last.items() if at > i}
            item = replace(item, body=_freed_body(item, after))
        found.append(item)
        done = tuple(n for n in dict.fromkeys(_reads(item)) if last[n] == i and n in mine and n not in keep)
        held = {a.name for a in item.carried} if isinstance(item, Loop) else set()
        done = tuple(n for n in done if n not in held)
        if done:
            found.append(Free(done))
    return found


def _freed_body(loop: Loop, after: set[str]) -> tuple[Step, ...]:
    """Names made in a turn freed in it, and a carried variable freed once read, where it isn't set by the same step."""
    carried = {a.name for a in loop.carried}
    made = {n: i for i, s in enumerate(loop.body) for n in _slots(s)}
    last = {n: i for i, s in enumerate(loop.body) for n in reads(s)}
    found: list[Step] = []
    for i, step in enumerate(loop.body):
        found.append(step)
        done = [n for n in dict.fromkeys(reads(step)) if last[n] == i and n in made]
        names = tuple(n for n in done if (n in carried and i < made[n]) or (n not in carried and n not in after))
        if names:
            found.append(Free(names))
    return tuple(found)


def _reads(item: Item) -> tuple[str, ...]:
    match item:
        case Alias():
            return (item.start,)
        case Loop():
            inside = {n for s in item.body for n in _slots(s)} - {a.name for a in item.carried}
            return tuple(dict.fromkeys(n for s in item.body for n in reads(s) if n not in inside))
        case _:
            return reads(item)


def _writes(item: Item) -> tuple[str, ...]:
    match item:
        case Alias():
            return (item.name,)
        case Loop():
            return tuple(n for s in item.body for n in _slots(s))
        case _:
            return writes(item)


def _longest(steps: list[Step], start: int, calls: list[int], keep: set[str]) -> tuple[Loop | None, int]:
    """The loop that begins at `start`, if there is one, and how many steps it takes in. `calls`: the next two."""
    if len(calls) < 2:
        return None, 0
    size = calls[1] - calls[0]
    if calls[0] - start >= size:
        return None, 0
    turns = [steps[start : start + size]]
    while _alike(turns[0], steps[start + len(turns) * size : start + (len(turns) + 1) * size], len(turns)):
        turns.append(steps[start + len(turns) * size : start + (len(turns) + 1) * size])
    if len(turns) < LEAST:
        return None, 0
    read = {n for s in steps for n in reads(s)}
    if any(g is not None and g.name in read for t in turns for s in t if isinstance(s, CallBlock) for g in s.gradients):
        return None, 0
    while len(turns) >= LEAST:
        loop = _loop(turns, steps[start + len(turns) * size :], keep)
        if loop is not None:
            return loop, size * len(turns)
        turns.pop()
    return None, 0


def _alike(first: list[Step], other: list[Step], distance: int) -> bool:
    """True if the steps differ only in names, and block calls in their index, by +distance or -distance."""
    if len(first) != len(other):
        return False
    return all(_shape(a) == _shape(b) for a, b in zip(first, other, strict=True)) and all(
        abs(b.index - a.index) == distance
        for a, b in zip(first, other, strict=True)
        if isinstance(a, CallBlock) and isinstance(b, CallBlock)
    )


def _shape(step: Step) -> object:
    """All of a step but names, index and place."""
    ins, outs = tuple(map(_kind, _in(step))), tuple(map(_kind, _out(step)))
    match step:
        case Compute():
            return (step.function, _nameless(step.args), _nameless(step.kwargs), ins, outs)
        case CallBlock():
            return (step.function, ins, outs)
        case Convert():
            return (tuple((s.step, s.view) for s in step.steps), ins, outs)
        case Keep():
            return (Keep, ins)
        case Free():
            return ()


def _in(step: Step) -> tuple[object, ...]:
    match step:
        case Compute() | CallBlock():
            return step.inputs
        case Convert():
            return (step.before,)
        case Keep():
            return (step.local,)
        case Free():
            return ()


def _out(step: Step) -> tuple[object, ...]:
    match step:
        case Compute():
            return step.outputs
        case CallBlock():
            return step.outputs
        case Convert():
            return (step.after,)
        case Keep():
            return (step.local,)
        case Free():
            return ()


def _kind(local: object) -> object:
    return None if local is None else (local.layout, local.meta)  # type: ignore[attr-defined]


def _nameless(tree: object) -> object:
    if isinstance(tree, Ref):
        return Ref("")
    if isinstance(tree, tuple):
        return tuple(map(_nameless, tree))
    return (type(tree), tree)


def _loop(turns: list[list[Step]], later: Sequence[Step], keep: set[str]) -> Loop | None:
    """The loop over these turns, or None if their names are not uniform."""
    made = [[n for s in turn for n in _slots(s)] for turn in turns]
    if any(len(m) != len(made[0]) for m in made):
        return None
    where = [{n: w for w, n in enumerate(m)} for m in made]
    carried: dict[int, str] = {}
    position = 0
    for at, step in enumerate(turns[0]):
        for slot in range(len(reads(step))):
            names = [reads(turn[at])[slot] for turn in turns]
            if not _place_read(names, where, position, carried):
                return None
        position += len(_slots(step))
    if not _closed(made, carried, later, keep):
        return None
    first, second = (next(s.index for s in t if isinstance(s, CallBlock)) for t in turns[:2])
    step_ = second - first
    body = _with_variables(turns[0], {start: made[0][w] for w, start in carried.items()})
    return Loop(
        indices=range(first, first + step_ * len(turns), step_),
        body=body,
        carried=tuple(Alias(made[0][w], start) for w, start in carried.items()),
        renamed=tuple((last, name) for last, name in zip(made[-1], made[0], strict=True) if last != name),
    )


def _slots(step: Step) -> tuple[str, ...]:
    """Names that a step makes, parameters' gradients of a block call aside."""
    if isinstance(step, CallBlock):
        return tuple(o.name for o in step.outputs if o is not None)
    return writes(step)


def _place_read(names: list[str], where: list[dict[str, int]], position: int, carried: dict[int, str]) -> bool:
    """True if a read is internal, constant or carried; notes what is carried."""
    slot = where[0].get(names[0])
    if slot is not None:
        return slot < position and all(w.get(n) == slot for n, w in zip(names, where, strict=True))
    if len(set(names)) == 1:
        return not any(names[0] in w for w in where)
    before = where[0].get(names[1])
    if before is None or before < position:
        return False
    if any(w.get(n) != before for n, w in zip(names[1:], where, strict=False)):
        return False
    return carried.setdefault(before, names[0]) == names[0]


def _closed(made: list[list[str]], carried: dict[int, str], later: Sequence[Step], keep: set[str]) -> bool:
    """True if nothing but the last turn's names is read after the loop, and what starts a carried name isn't either."""
    wanted = {n for s in later for n in reads(s)} | keep
    if any(n in wanted for turn in made[:-1] for n in turn):
        return False
    starts = set(carried.values())
    return len(starts) == len(carried)


def _with_variables(turn: Sequence[Step], names: dict[str, str]) -> tuple[Step, ...]:
    """The turn with the names that carried variables start from replaced by the variables."""
    return tuple(rename_step(s, names) for s in turn)


def rename_step(step: Step, names: dict[str, str]) -> Step:
    """A step that reads other names."""

    def new(local: object) -> object:
        return replace(local, name=names.get(local.name, local.name))  # type: ignore[type-var, attr-defined]

    def tree(arg: object) -> object:
        if isinstance(arg, Ref):
            return Ref(names.get(arg.name, arg.name))
        return tuple(map(tree, arg)) if isinstance(arg, tuple) else arg

    match step:
        case Compute():
            return replace(step, inputs=tuple(map(new, step.inputs)), args=tree(step.args), kwargs=tree(step.kwargs))  # type: ignore[arg-type]
        case CallBlock():
            return replace(step, inputs=tuple(map(new, step.inputs)))  # type: ignore[arg-type]
        case Convert():
            first = replace(step.steps[0], before=names.get(step.before.name, step.before.name))
            return replace(step, before=new(step.before), steps=(first, *step.steps[1:]))  # type: ignore[arg-type]
        case Keep():
            whole = names.get(step.whole, step.whole)
            return replace(step, local=new(step.local), whole=whole)  # type: ignore[arg-type]
        case Free():
            return step

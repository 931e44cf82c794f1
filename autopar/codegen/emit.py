"""Program -> Python that a person can read: one function for each distinct block and phase, then the whole step.

The text depends on the program alone. `Source.lines` says of each line which op of the model it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.codegen import tables
from autopar.codegen.render import call, collective, gives_list, own_key, own_name, own_piece, shape, short
from autopar.codegen.roll import Alias, Item, Loop, roll
from autopar.codegen.scope import reads, writes
from autopar.ir.cuts import Own, piece
from autopar.ir.graph import Phase
from autopar.ir.mesh import Mesh
from autopar.ir.program import (
    CallBlock,
    Compute,
    Convert,
    Free,
    Function,
    Keep,
    Local,
    Made,
    Place,
    Program,
    Source,
    Step,
    Turn,
)

INDENT = "    "
OWN = frozenset({"aten", "prims", "local_ops"})


@dataclass
class _Text:
    """Lines so far, and where they come from."""

    lines: list[str] = field(default_factory=list)
    places: dict[int, Place] = field(default_factory=dict)
    made: dict[int, Made] = field(default_factory=dict)

    def add(self, line: str = "", place: Place | None = None) -> None:
        self.lines.append(line)
        if place is not None and place.key:
            self.places[len(self.lines)] = place


def emit(program: Program) -> Source:
    """The module's text and its line table."""
    text = _Text()
    for line in _head(program):
        text.add(line)
    for function in program.functions:
        text.add()
        text.add()
        _Writer(text, program, function).write()
    text.add()
    text.add()
    for line in tables.parameter_rows(program):
        text.add(line)
    return Source(text="\n".join(text.lines) + "\n", lines=text.places, made=text.made)


def _head(program: Program) -> Iterable[str]:
    yield f'"""{program.model_name} on {program.mesh}. Written by autopar; the same on every rank.'
    yield ""
    yield "Each line is one local op or one collective; its comment has the local shape and layout of what it makes."
    for key, instances in program.calls.items():
        yield f"{tables.stem(key)}: {len(instances)} × {tables.pattern(instances)}"
    yield '"""'
    yield ""
    yield "import torch"
    used = {s.function.split(".")[0] for f in program.functions for s in f.steps if isinstance(s, Compute)}
    if "autopar" in used:
        yield ""
        yield "import autopar.ops.custom  # defines torch.ops.autopar"
    if "local_ops" in used:
        yield "" if "autopar" not in used else "from autopar.runtime import local_ops"
        if "autopar" not in used:
            yield "from autopar.runtime import local_ops"
    yield ""
    for name in sorted((used | {"aten"}) - {"local_ops", "autopar", "torch", "rt"}):
        yield f"{name} = torch.ops.{name}"
    yield from tables.head_rows(program)


class _Writer:
    """Writes one function."""

    def __init__(self, text: _Text, program: Program, function: Function) -> None:
        self.text = text
        self.program = program
        self.function = function
        self.group: tuple[str, str] = ("", "")
        leaving = (*function.outputs, *function.updates, *function.gradients)
        self.keep = {x.name for x in leaving if x is not None}
        self.keep |= {x.name for x in function.left}
        self.items: Sequence[Item] = function.steps
        self.renamed: Mapping[str, str] = {}
        if not function.block:
            held = [x.name for x in function.saved] if function.phase is Phase.BACKWARD else []
            self.items, self.renamed = roll(function.steps, self.keep, held)
        self.stored: set[int] = set()
        self.steps: list[Step] = [s for s in function.steps if not isinstance(s, Free)]
        self.turns: list[Step] = []
        self.owns = _owns(function)
        self.renamed = {**self.renamed, **self._own_names()}

    @property
    def first_half(self) -> bool:
        """True of what leaves the gradients of parameters to another function."""
        return self.program.halves and self.function.phase is Phase.BACKWARD and not self.function.weights

    def _own_names(self) -> dict[str, str]:
        """A name for each number that depends on the rank, unlike the names of tensors."""
        fn = self.function
        taken = {n for s in fn.steps for n in (*reads(s), *writes(s))}
        for locals_ in (fn.parameters, fn.buffers, fn.constants, fn.inputs, fn.tangents, fn.saved):
            taken |= {x.name for x in locals_}
        found: dict[str, str] = {}
        for key, own in self.owns.items():
            name = own_name(own)
            while name in taken:
                name += "_"
            taken.add(name)
            found[key] = name
        return found

    def write(self) -> None:
        fn = self.function
        self._signature()
        if fn.phase is Phase.FORWARD and not fn.block:
            for key, instances in self.program.calls.items():
                self._line(1, f"{tables.saved_name(key)} = [None] * {len(instances)}")
        if fn.phase is Phase.BACKWARD:
            self._unpack_saved()
            if not fn.block and self.first_half:
                for key, instances in self.program.calls.items():
                    self._line(1, f"{tables.waiting_name(key)} = [None] * {len(instances)}")
            elif not fn.block:
                self._line(1, f"gradients = [None] * {len(fn.parameters)}")
        for key, own in self.owns.items():
            self._line(1, f"{self.renamed[key]} = {own_piece(own)}", note=_pieces(own, self.program.mesh))
        drawing = tables.draws(fn)
        if drawing:
            path = f"{tables.instances_name(fn.block)}[i]" if fn.block else '""'
            self._line(1, f"rt.instance = {path}", note="names the random draws")
        for item in self.items:
            if isinstance(item, (Compute, Convert, Keep, CallBlock)):
                self.turns = [self.steps.pop(0)]
            self._item(item, 1)
        if drawing and fn.block:
            self._line(1, 'rt.instance = ""')
        self._return()

    def _line(self, depth: int, line: str, place: Place | None = None, note: str = "") -> None:
        self.text.add(INDENT * depth + line + (f"  # {note}" if note else ""), place)

    def _name(self, local: Local | None) -> str:
        return "_" if local is None else self.renamed.get(local.name, local.name)

    def _signature(self) -> None:
        fn = self.function
        if not fn.block:
            rest = "inputs" if fn.phase is Phase.FORWARD else "saved" if fn.weights else "saved, tangents"
            self._line(0, f"def {fn.name}(rt, parameters, buffers, constants, {rest}):")
            self._line(1, f'"""{_FIRST_HALF if self.first_half else _DOCS[fn.phase]}"""')
            for kind in ("parameters", "buffers", "constants", "inputs", "tangents"):
                self._unpack(kind, getattr(fn, kind))
            return
        own = [x.name for x in (fn.inputs if fn.phase is Phase.FORWARD else fn.tangents)]
        first = ["rt", "i", "parameters"] + (["saved"] if fn.phase is Phase.BACKWARD else [])
        self._line(0, f"def {fn.name}({', '.join([*first, *own])}):")
        instances = self.program.calls[fn.block]
        what = "Gradients of parameters" if fn.weights else fn.phase.value.capitalize()
        self._line(1, f'"""{what} of {tables.pattern(instances)}, instance i."""')
        for local in fn.inputs if fn.phase is Phase.FORWARD else fn.tangents:
            self._line(1, f"# {local.name}: {shape(local)}")
        self._unpack("parameters", fn.parameters)

    def _unpack(self, kind: str, locals_: Sequence[Local]) -> None:
        """One line for each of the tensors that the function's own steps read."""
        own = _read_by(self.items) | self.keep
        for position, local in enumerate(locals_):
            if local.name in own:
                self._line(1, f"{local.name} = {kind}[{position}]", note=shape(local))

    def _unpack_saved(self) -> None:
        fn = self.function
        names = [x.name for x in fn.saved]
        if not fn.block:
            kept = tables.waiting_name if fn.weights else tables.saved_name
            names += [kept(k) for k in self.program.calls]
        if names:
            self._listed(1, "", names, " = saved")
            self._line(1, "saved.clear()")

    def _listed(self, depth: int, before: str, names: Sequence[str], after: str) -> None:
        """A bracketed list on one line, or on as many as it takes."""
        whole = f"{before}[{', '.join(names)}]{after}"
        if len(whole) + len(INDENT) * depth <= 120:
            self._line(depth, whole)
            return
        self._line(depth, f"{before}[")
        row = ""
        for name in names:
            if row and len(row) + len(name) + len(INDENT) * (depth + 1) + 2 > 118:
                self._line(depth + 1, row.rstrip())
                row = ""
            row += f"{name}, "
        self._line(depth + 1, row.rstrip())
        self._line(depth, f"]{after}")

    def _item(self, item: Item, depth: int) -> None:
        match item:
            case Compute():
                self._heading(item.place, depth)
                outs = ", ".join(self._name(o) for o in item.outputs)
                if len(item.outputs) == 1 and gives_list(item.function):
                    outs = f"[{outs}]"
                note = "; ".join(shape(o) for o in item.outputs if o is not None)
                made = f"{outs} = " if item.outputs else ""
                self._line(depth, f"{made}{call(item, self.renamed)}", item.place, note)
                if item.outputs:
                    self._note(item, item.function)
            case Convert():
                self._heading(item.place, depth)
                for at, part in enumerate(item.steps):
                    right = collective(part, self.renamed)
                    self._line(depth, f"{self._name(part.after)} = {right}", item.place, shape(part.after))
                    self._note(item, str(part.step), at)
            case Keep():
                name, whole = self._name(item.local), self.renamed.get(item.whole, item.whole)
                self._line(depth, f"{name} = {name}.clone()", item.place, f"keep: apart from {whole}, which goes")
            case Free():
                self._line(depth, f"del {', '.join(self.renamed.get(n, n) for n in item.names)}")
            case Alias():
                self._line(depth, f"{item.name} = {self.renamed.get(item.start, item.start)}")
            case Loop():
                self._loop(item, depth)
            case CallBlock():
                self._call(item, depth, str(item.index))

    def _note(self, item: Step, op: str, part: int = 0) -> None:
        """What the line just written makes, in each turn of its loop."""
        reads, names = (tuple(map(self._name, side)) for side in _sides(item, part))
        turns = []
        for step in self.turns:
            assert not isinstance(step, Free)
            inputs, outputs = _sides(step, part)
            turns.append(Turn(key=step.place.key, inputs=inputs, outputs=outputs))
        self.text.made[len(self.text.lines)] = Made(
            function=self.function.name, op=op, reads=reads, names=names, turns=tuple(turns), graph=self.function.graph,
            called=isinstance(item, CallBlock), part=part,
            converts=tuple(
                (s.before.value, str(s.before.layout), str(s.after.layout))
                for s in self.turns
                if isinstance(s, Convert)
            ),
        )  # fmt: skip

    def _heading(self, place: Place, depth: int) -> None:
        group = (place.module_path, place.source)
        if group != self.group and any(group):
            self._line(depth, f"# {place.module_path}  {short(place.source)}".rstrip())
        self.group = group

    def _loop(self, loop: Loop, depth: int) -> None:
        first, last, step = loop.indices[0], loop.indices[-1], loop.indices.step
        counted = f"range({first}, {last + 1})" if step > 0 else f"reversed(range({last}, {first + 1}))"
        self.group = ("", "")
        self._line(depth, f"for i in {counted.replace('range(0, ', 'range(')}:")
        body = sum(not isinstance(item, Free) for item in loop.body)
        mine, self.steps = self.steps[: body * len(loop.indices)], self.steps[body * len(loop.indices) :]
        at = 0
        for item in loop.body:
            if not isinstance(item, Free):
                self.turns = mine[at::body]
                at += 1
            if isinstance(item, CallBlock):
                self._call(item, depth + 1, "i")
                rows = self.program.block_parameters[item.block]
                self.stored.update(p for k in loop.indices for p in rows[k])
            else:
                self._item(_for_all(item, self.program.calls), depth + 1)
        self.group = ("", "")

    def _call(self, step: CallBlock, depth: int, index: str) -> None:
        saved = f"{tables.saved_name(step.block)}[{index}]"
        rows = f"{tables.rows_name(step.block)}[{index}]"
        given = f"[parameters[k] for k in {rows}]" if step.parameters else "[]"
        names = [self._name(x) for x in step.inputs]
        outs = [self._name(o) for o in step.outputs]
        note = "; ".join(shape(o) for o in step.outputs if o is not None)
        self._heading(Place(key="", module_path=step.place.module_path if index != "i" else "", source=""), depth)
        if step.phase is Phase.FORWARD:
            args = ", ".join(["rt", index, given, *names])
            self._line(depth, f"{', '.join([*outs, saved])} = {step.function}({args})", step.place, note)
            self._note(step, step.function)
            return
        waiting = f"{tables.waiting_name(step.block)}[{index}]"
        args = ", ".join(["rt", index, given, waiting if step.weights else saved, *names])
        if self.first_half:
            self._line(depth, f"{', '.join([*outs, waiting])} = {step.function}({args})", step.place, note)
            self._note(step, step.function)
            return
        outs = [] if step.weights else outs
        direct = self._direct(step)
        left = "weights" if direct else "[" + ", ".join(self._name(g) for g in step.gradients) + "]"
        self._line(depth, f"{', '.join([*outs, left])} = {step.function}({args})", step.place, note)
        self._note(step, step.function)
        if direct and step.parameters:
            self._line(depth, f"for k, gradient in zip({rows}, weights, strict=True):")
            self._line(depth + 1, "gradients[k] = gradient")
            self.stored.update(step.parameters)

    def _direct(self, step: CallBlock) -> bool:
        """True if what the block gives for its parameters is what the function gives for them."""
        mine = self.function.gradients
        return all(
            (g.name if g else None) == (m.name if (m := mine[p]) else None)
            for g, p in zip(step.gradients, step.parameters, strict=True)
        )

    def _return(self) -> None:
        fn = self.function
        outputs = [self._name(o) if o is not None else "None" for o in fn.outputs]
        saved = [self._name(s) for s in fn.saved]
        if self.first_half:
            saved = [self._name(s) for s in fn.waits]
        if fn.block:
            last = [self._name(g) if g else "None" for g in fn.gradients]
            outputs = [] if fn.weights else outputs
            leaves = fn.phase is Phase.FORWARD or self.first_half
            self._listed(1, "return " + "".join(f"{o}, " for o in outputs), saved if leaves else last, "")
        elif self.first_half:
            saved += [tables.waiting_name(k) for k in self.program.calls]
            self._listed(1, f"return [{', '.join(outputs)}], ", saved, "")
        elif fn.phase is Phase.FORWARD:
            saved += [tables.saved_name(k) for k in self.program.calls]
            before = f"return [{', '.join(outputs)}], [{', '.join(map(self._name, fn.updates))}], "
            self._listed(1, before, saved, "")
        else:
            for position, gradient in enumerate(fn.gradients):
                if gradient is not None and position not in self.stored:
                    self._line(1, f"gradients[{position}] = {self._name(gradient)}")
            self._line(1, "return gradients" + (f" + [{', '.join(outputs)}]" if outputs else ""))


def _sides(step: Step, part: int) -> tuple[tuple[Local | None, ...], tuple[Local | None, ...]]:
    """(what a step reads, what it makes); of a conversion, its step number `part`."""
    match step:
        case Convert():
            before = step.before if part == 0 else step.steps[part - 1].after
            return (before,), (step.steps[part].after,)
        case Compute() | CallBlock():
            return step.inputs, step.outputs
        case Keep():
            return (step.local,), (step.local,)
        case Free():
            return (), ()


def _owns(function: Function) -> dict[str, Own]:
    """Pieces of dims, by `own_key`, that a function's steps speak of."""
    found: dict[str, Own] = {}

    def look(tree: object) -> None:
        if isinstance(tree, Own):
            found.setdefault(own_key(tree), replace(tree, part="length"))
        elif isinstance(tree, (tuple, list)):
            for item in tree:
                look(item)

    for step in function.steps:
        if isinstance(step, Compute):
            look((step.args, step.kwargs))
        elif isinstance(step, Convert):
            look(tuple(part.sizes for part in step.steps))
    return found


def _pieces(own: Own, mesh: Mesh) -> str:
    """The largest and the last piece, for people."""
    sizes = [mesh.axis(a).size for a in own.axes]
    first = piece(own.whole, [(n, 0) for n in sizes], own.unit).length
    last = piece(own.whole, [(n, n - 1) for n in sizes], own.unit).length
    return f"{first} rows, {last} on the last rank"


_DOCS = {
    Phase.FORWARD: "Local tensors in; (outputs, new values of buffers, what the backward needs) out.",
    Phase.BACKWARD: "Gradients of the local parameters, in storage layout, None where there is none. Empties `saved`.",
}
_FIRST_HALF = "Gradients of inputs; (these, what the other half needs) out. Empties `saved`."


def _for_all(item: Item, calls: Mapping[str, Sequence[str]]) -> Item:
    """An item of a loop, said to come from all instances where it comes from a call of one."""
    if isinstance(item, (Compute, Convert, Keep)):
        for instances in calls.values():
            if item.place.module_path in instances:
                return replace(item, place=replace(item.place, module_path=tables.pattern(instances)))
    return item


def _read_by(items: Iterable[Item]) -> set[str]:
    """Names that steps read, in loops too."""
    found: set[str] = set()
    for item in items:
        match item:
            case Loop():
                found |= _read_by(item.body)
            case Alias():
                found.add(item.start)
            case Compute() | CallBlock():
                found |= {x.name for x in item.inputs}
            case Convert():
                found.add(item.before.name)
            case Keep():
                found.add(item.local.name)
    return found

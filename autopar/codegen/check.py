"""What lowering promises, checked after it: what is priced is emitted, and every name is what its reader wants."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from autopar.errors import CompilerError
from autopar.ir.graph import Phase, Ref
from autopar.ir.layout import fits, local_shape
from autopar.ir.plan import Plan
from autopar.ir.program import CallBlock, Compute, Convert, Free, Function, Keep, Local, Program, Step


def check_program(program: Program, plan: Plan) -> None:
    """Raises CompilerError naming the first promise that is broken."""
    check_conversions(program, plan)
    check_names(program)


def check_names(program: Program) -> None:
    """Every name is there when it is read, in the layout that its reader wants."""
    for function in program.functions:
        _Walk(function, program).run()


def check_conversions(program: Program, plan: Plan) -> None:
    """Each conversion of the plan is emitted as often as it is priced, with the same steps, and no other is."""
    calls = {key: len(names) for key, names in program.calls.items()}
    emitted: Counter[tuple[str, str, str, str]] = Counter()
    steps: dict[tuple[str, str, str, str], list[str]] = {}
    for function in program.functions:
        for convert in function.converts():
            key = (function.graph, convert.before.value, str(convert.before.layout), str(convert.after.layout))
            emitted[key] += calls.get(function.block, 1)
            steps[key] = [str(s.step) for s in convert.steps]
    priced: Counter[tuple[str, str, str, str]] = Counter()
    for entry in plan.conversions:
        key = (entry.graph, entry.value, entry.before, entry.after)
        priced[key] += entry.count
        if key in steps and entry.steps != steps[key]:
            raise CompilerError(f"{_told(key)}: priced as {entry.steps}, emitted as {steps[key]}")
    wrong = [(k, priced[k], emitted[k]) for k in sorted(priced.keys() | emitted.keys()) if priced[k] != emitted[k]]
    if wrong:
        lines = [f"  {_told(key)}: priced {p} times, emitted {e} times" for key, p, e in wrong[:20]]
        more = [f"  and {len(wrong) - 20} more"] if len(wrong) > 20 else []
        raise CompilerError("\n".join(["what is priced is not what is emitted:", *lines, *more]))


def _told(key: tuple[str, str, str, str]) -> str:
    graph, value, before, after = key
    return f"{graph}: {value} from {before} to {after}"


@dataclass
class _Walk:
    """Runs a function's steps on names alone."""

    function: Function
    program: Program
    at_hand: dict[str, Local] = field(default_factory=dict)

    def run(self) -> None:
        fn = self.function
        for local in (*fn.parameters, *fn.buffers, *fn.constants, *fn.inputs, *fn.tangents):
            self._arrive(local)
        if fn.phase is Phase.BACKWARD:
            before = self.program.function(fn.graph, Phase.BACKWARD if fn.weights else Phase.FORWARD)
            self._same(before, fn.saved)
            for local in fn.saved:
                self._arrive(local)
        for step in fn.steps:
            self._step(step)
        leaving = (*fn.outputs, *fn.updates, *fn.gradients, *fn.left)
        for out in leaving:
            if out is not None:
                self._read(out, "the end")
        for stored, gradient in zip(fn.parameters, fn.gradients, strict=bool(fn.gradients)):
            sides = (gradient.layout, gradient.meta.shape) if gradient is not None else None
            if sides is not None and not self.program.sums and sides != (stored.layout, stored.meta.shape):
                self._fail(f"gradient {gradient} of parameter {stored} is not as stored")

    def _same(self, before: Function, read: tuple[Local, ...]) -> None:
        if before.left != read:
            self._fail(
                f"the {before.phase.value} saves {[s.name for s in before.left]}, what follows it reads "
                f"{[s.name for s in read]}"
            )

    def _step(self, step: Step) -> None:
        match step:
            case Compute():
                named = _names((step.args, step.kwargs))
                for local, want in zip(step.inputs, step.wants, strict=True):
                    self._read(local, step.place.key)
                    if local.layout != want:
                        self._fail(f"{step.place.key}: {local} where the strategy wants {want}")
                extra = named - {i.name for i in step.inputs}
                if extra:
                    self._fail(f"{step.place.key}: the local call reads {sorted(extra)}, which are no inputs of the op")
                self._arrive(*step.outputs)
            case Convert():
                self._read(step.before, step.place.key)
                self._steps(step)
                self._arrive(step.after)
            case CallBlock():
                self._call(step)
            case Keep():
                self._read(step.local, step.place.key)
                fn = self.function
                if step.local not in (*fn.saved, *fn.waits, *fn.gradients):
                    self._fail(f"{step.local} is kept, but nothing waits for it")
            case Free():
                for name in step.names:
                    if self.at_hand.pop(name, None) is None:
                        self._fail(f"{name} is freed but not there")

    def _steps(self, convert: Convert) -> None:
        layout, name = convert.before.layout, convert.before.name
        for part in convert.steps:
            if part.step.before != layout or part.before != name or part.step.after != part.after.layout:
                self._fail(f"{convert.before.value}: step {part} does not go on from {layout}")
            self._shape(part.after)
            layout, name = part.step.after, part.after.name
        if (layout, name) != (convert.after.layout, convert.after.name):
            self._fail(f"{convert.before.value}: the steps end in {layout}, wanted {convert.after.layout}")

    def _call(self, step: CallBlock) -> None:
        callee = self.program.function(step.block, step.phase, step.weights)
        asked = callee.inputs if step.phase is Phase.FORWARD else callee.tangents
        for local, want, inner in zip(step.inputs, step.wants, asked, strict=True):
            self._read(local, step.place.key)
            if not local.layout == want == inner.layout or local.meta != inner.meta:
                self._fail(f"{step.place.key}: passes {local}, the block takes {inner}")
        for position, inner in zip(step.parameters, callee.parameters, strict=True):
            given = self.function.parameters[position]
            if (given.layout, given.meta) != (inner.layout, inner.meta):
                self._fail(f"{step.place.key}: passes parameter {given}, the block takes {inner}")
        for out, made in (
            *zip(step.outputs, callee.outputs, strict=True),
            *zip(step.gradients, callee.gradients, strict=bool(step.gradients)),
        ):
            if out is not None and (made is None or (out.layout, out.meta) != (made.layout, made.meta)):
                self._fail(f"{step.place.key}: takes {out}, the block gives {made}")
            self._arrive(out)

    def _arrive(self, *locals_: Local | None) -> None:
        for local in locals_:
            if local is not None:
                self._shape(local)
                self.at_hand[local.name] = local

    def _read(self, local: Local, where: str) -> None:
        if self.at_hand.get(local.name) != local:
            self._fail(f"{where}: reads {local}, at hand is {self.at_hand.get(local.name)}")

    def _shape(self, local: Local) -> None:
        whole = self.program.metas[self.function.graph][local.value]
        mesh = self.program.mesh
        if not fits(local.layout, whole.shape) or local.meta.dtype != whole.dtype:
            self._fail(f"{local}: {whole} cannot be cut so on mesh {mesh}")
        if local_shape(whole.shape, local.layout, mesh, whole.units) != local.meta.shape:
            self._fail(f"{local}: wrong piece of {whole} on mesh {mesh}")

    def _fail(self, message: str) -> None:
        raise CompilerError(f"{self.function.name}: {message}")


def _names(tree: object) -> set[str]:
    if isinstance(tree, Ref):
        return {tree.name}
    if isinstance(tree, (tuple, list)):
        return set().union(*map(_names, tree)) if tree else set()
    return set()

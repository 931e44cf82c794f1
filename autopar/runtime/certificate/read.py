"""Reads a program's text as one rank would run it, and notes what it says to others.

The text is read as it stands, with a person's edits. A function that hangs on nothing but the shapes of its arguments
is read once: 80 instances of a block cost as much as one.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.errors import CertificateError
from autopar.ir.mesh import Mesh
from autopar.runtime.certificate.calls import Call, Trace, Where
from autopar.runtime.certificate.expressions import OPERATORS, Expressions, Names
from autopar.runtime.certificate.recorder import Notes, Recorder, SilentRegion
from autopar.runtime.certificate.values import (
    ARGUMENT,
    RANK,
    UNKNOWN,
    Value,
    as_argument,
    copied,
    marks_of,
    meta,
    metas_in,
    pattern,
    plain,
)

Metas = Sequence[tuple[str, tuple[int, ...]]]
DEPTH = 40
"""Calls inside calls beyond which a program is taken to call itself without end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """(dtype, local shape) of what the runtime hands to `forward` and `backward`, in order.

    `regions`: (key, what its forward gives but for the last, what its backward gives).
    """

    parameters: tuple[tuple[str, tuple[int, ...]], ...] = ()
    buffers: tuple[tuple[str, tuple[int, ...]], ...] = ()
    constants: tuple[tuple[str, tuple[int, ...]], ...] = ()
    inputs: tuple[tuple[str, tuple[int, ...]], ...] = ()
    tangents: tuple[tuple[str, tuple[int, ...]], ...] = ()
    regions: tuple[
        tuple[str, tuple[tuple[str, tuple[int, ...]], ...], tuple[tuple[str, tuple[int, ...]], ...]], ...
    ] = ()


@dataclass(frozen=True, slots=True)
class Reading:
    """One rank's calls. `alike`: no decision hung on which rank it was, so they are every rank's."""

    trace: Trace
    alike: bool


@dataclass(frozen=True, slots=True)
class _Known:
    """What a function did with arguments of one pattern."""

    calls: tuple[Call, ...]
    result: Value
    decided: int


class _Returned(Exception):  # noqa: N818  (a way out of a function, no error)
    """`return` on the way."""

    def __init__(self, value: Value) -> None:
        self.value = value


class _Left(Exception):  # noqa: N818
    """`break` or `continue`."""

    def __init__(self, again: bool) -> None:
        self.again = again


@dataclass
class Text:
    """A program parsed once, and what is known of its functions. `lines`: line -> the user's line it comes from."""

    text: str
    name: str = ""
    sources: Mapping[int, str] = field(default_factory=dict)
    known: dict[Any, _Known] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            self.tree = ast.parse(self.text)
        except SyntaxError as error:
            raise CertificateError(f"line {error.lineno}: the program is no Python: {error.msg}") from None
        self.rows = self.text.splitlines()
        self.functions = {n.name: n for n in self.tree.body if isinstance(n, ast.FunctionDef)}

    def where(self, line: int, function: str) -> Where:
        """A line as messages name it."""
        text = self.rows[line - 1].split("  # ")[0].strip() if 0 < line <= len(self.rows) else ""
        return Where(
            line=line, function=function, text=text, source=self.sources.get(line, ""), program=self.name
        )  # fmt: skip

    def comment(self, line: int) -> str:
        """What stands after `#` on a line."""
        return self.rows[line - 1].partition("  # ")[2]


def read(text: Text, mesh: Mesh, rank: int, arguments: Arguments | None) -> Reading:
    """All that this rank says in one forward and backward.

    Args:
        arguments: shapes of what comes from outside; None: as the text's comments say.

    Raises:
        CertificateError: a collective hangs on what can't be known before the run.
    """
    with torch.no_grad():
        return _Reader(text, mesh, rank).run(arguments)


class _Reader(Expressions):
    def __init__(self, text: Text, mesh: Mesh, rank: int) -> None:
        self.text = text
        self.rt = Recorder(mesh, rank, Notes())
        self.function = ""
        self.depth = 0
        self.globals: Names = {}
        self.rt.notes.where = text.where(0, "")

    def run(self, arguments: Arguments | None) -> Reading:
        """Module, forward, backward."""
        self._block(self.text.tree.body, self.globals)
        rank = Value(self.rt)
        self.rt.regions = {key: SilentRegion(*shapes) for key, *shapes in arguments.regions} if arguments else {}

        def given(kind: str) -> Value:
            if arguments is None:
                return Value(UNKNOWN)
            return Value([Value(meta(getattr(torch, d), s)) for d, s in getattr(arguments, kind)])

        held = [given(kind) for kind in ("parameters", "buffers", "constants")]
        made = self._call_named("forward", [rank, *held, given("inputs")])
        saved = made.data[2] if isinstance(made.data, tuple) and len(made.data) == 3 else Value(UNKNOWN)
        self._call_named("backward", [rank, *held, saved, given("tangents")])
        return Reading(tuple(self.rt.notes.calls), not self.decided & RANK)

    def refuse(self, message: str, line: int | None = None) -> CertificateError:
        where = self.text.where(self.line if line is None else line, self.function)
        return CertificateError(f"{where}: {message}")

    # Functions -------------------------------------------------------------------------------------------------------

    def _call_named(self, name: str, args: list[Value]) -> Value:
        if name not in self.text.functions:
            return Value(UNKNOWN)
        self.decided &= ~ARGUMENT
        return self._run_function(self.text.functions[name], args, {})

    def call_function(self, name: str, args: list[Value], kwargs: dict[str, Value]) -> Value | None:
        """Read a function of the module, or say again what it did with such arguments before."""
        node = self.text.functions.get(name)
        if node is None:
            return None
        key = (name, tuple(map(pattern, args)), tuple((k, pattern(v)) for k, v in kwargs.items()))
        known = self.text.known.get(key)
        notes = self.rt.notes
        if known is not None and not notes.branches:
            notes.calls += known.calls
            self.decided |= known.decided
            return copied(known.result)
        before, decided = len(notes.calls), self.decided
        self.decided = 0
        line = self.line
        result = self._run_function(node, list(map(as_argument, args)), {k: as_argument(v) for k, v in kwargs.items()})
        self.line = line
        hangs = self.decided | marks_of(result)
        if not hangs & (RANK | ARGUMENT) and not notes.branches:
            self.text.known[key] = _Known(tuple(notes.calls[before:]), copied(result), self.decided)
        self.decided |= decided
        return result

    def _run_function(self, node: ast.FunctionDef, args: list[Value], kwargs: dict[str, Value]) -> Value:
        if self.depth > DEPTH:
            raise self.refuse(f"{node.name} calls itself without end")
        names = dict(self.globals)
        names |= dict(zip((a.arg for a in node.args.args), args, strict=False)) | kwargs
        for parameter, default in zip(reversed(node.args.args), reversed(node.args.defaults), strict=False):
            if parameter.arg not in {a.arg for a in node.args.args[: len(args)]} | kwargs.keys():
                names[parameter.arg] = self.evaluate(default, self.globals)
        outer = self.function
        self.function = node.name
        self.depth += 1
        try:
            self._block(node.body, names)
        except _Returned as returned:
            return returned.value
        finally:
            self.function = outer
            self.depth -= 1
        return Value(None)

    # Statements ------------------------------------------------------------------------------------------------------

    def _block(self, body: Sequence[ast.stmt], names: Names) -> None:
        for statement in body:
            self.line = statement.lineno
            self.rt.notes.where = self.text.where(statement.lineno, self.function)
            run = getattr(self, f"_do_{type(statement).__name__.lower()}", None)
            if run is not None:
                run(statement, names)

    def _do_expr(self, node: ast.Expr, names: Names) -> None:
        self.evaluate(node.value, names)

    def _do_return(self, node: ast.Return, names: Names) -> None:
        raise _Returned(Value(None) if node.value is None else self.evaluate(node.value, names))

    def _do_break(self, node: ast.Break, names: Names) -> None:
        raise _Left(again=False)

    def _do_continue(self, node: ast.Continue, names: Names) -> None:
        raise _Left(again=True)

    def _do_assign(self, node: ast.Assign, names: Names) -> None:
        value = self.evaluate(node.value, names)
        value = self._as_said(node, value)
        for target in node.targets:
            self.assign(target, value, names)

    def _as_said(self, node: ast.Assign, value: Value) -> Value:
        """What nothing is known of, as the line's comment tells it."""
        if value.data is not UNKNOWN:
            return value
        target = node.targets[0]
        targets = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
        told = metas_in(self.text.comment(node.end_lineno or node.lineno))
        wanted = [t for t in targets if isinstance(t, ast.Name) and t.id != "_"]
        if len(told) != len(wanted):
            return value
        tensors = iter(told)
        found = [Value(next(tensors), value.marks) if t in wanted else Value(UNKNOWN, 0, self.line) for t in targets]
        return Value(tuple(found)) if isinstance(target, (ast.Tuple, ast.List)) else found[0]

    def _do_annassign(self, node: ast.AnnAssign, names: Names) -> None:
        if node.value is not None:
            self.assign(node.target, self.evaluate(node.value, names), names)

    def _do_augassign(self, node: ast.AugAssign, names: Names) -> None:
        before = self.evaluate(node.target, names)
        value = self.apply(OPERATORS[type(node.op)], before, self.evaluate(node.value, names))
        self.assign(node.target, value, names)

    def _do_delete(self, node: ast.Delete, names: Names) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                names.pop(target.id, None)

    def _do_import(self, node: ast.Import, names: Names) -> None:
        for alias in node.names:
            bound = alias.asname or alias.name.split(".")[0]
            names[bound] = Value(self._module(alias.name if alias.asname else bound, alias.name))

    def _do_importfrom(self, node: ast.ImportFrom, names: Names) -> None:
        for alias in node.names:
            name = f"{node.module}.{alias.name}"
            found = self._module(name, name)
            if found is UNKNOWN:
                found = getattr(self._module(node.module or "", node.module or ""), alias.name, UNKNOWN)
            names[alias.asname or alias.name] = Value(found, 0, self.line)

    def _module(self, name: str, loaded: str) -> Any:
        """A module that emitted code may import; UNKNOWN for others, which are not loaded for reading."""
        if loaded.split(".")[0] not in ("torch", "autopar", "math"):
            return UNKNOWN
        try:
            importlib.import_module(loaded)
            return importlib.import_module(name)
        except ImportError:
            return UNKNOWN

    def _do_if(self, node: ast.If, names: Names) -> None:
        test = self.evaluate(node.test, names)
        if test.known:
            self.decided |= marks_of(test)
            body = node.body if plain(test) else node.orelse
            if not test.marks & RANK:
                self._block(body, names)
                return
            self.rt.notes.branches.append(f"line {node.lineno}: if {ast.unparse(node.test)}")
            try:
                self._block(body, names)
            finally:
                self.rt.notes.branches.pop()
            return
        self._either(node, [node.body, node.orelse], names, "the condition")

    def _do_while(self, node: ast.While, names: Names) -> None:
        self._either(node, [node.body], names, "how often this runs")

    def _do_for(self, node: ast.For, names: Names) -> None:
        items = self.run_over(self.evaluate(node.iter, names))
        if items is None:
            self.assign(node.target, Value(UNKNOWN, 0, node.lineno), names)
            self._either(node, [node.body], names, "how often this runs")
            return
        for item in items:
            self.assign(node.target, item, names)
            try:
                self._block(node.body, names)
            except _Left as left:
                if not left.again:
                    return
        self._block(node.orelse, names)

    def _either(self, node: ast.stmt, bodies: list[list[ast.stmt]], names: Names, what: str) -> None:
        """Code that may or may not run, or run any number of times: no collective may be in it, and no way out."""
        before = len(self.rt.notes.calls)
        ends: list[Names] = [dict(names)]
        for body in bodies:
            own = dict(names)
            try:
                self._block(body, own)
            except _Returned:
                self.no_calls_since(before, node.lineno, what)
                raise self.refuse(
                    f"{what} cannot be known before the run, and the function may end here; "
                    f"ranks may skip what follows: {self.text.where(self.line, self.function)}",
                    node.lineno,
                ) from None
            except _Left:
                pass
            self.no_calls_since(before, node.lineno, what)
            ends.append(own)
        for name in set().union(*ends):
            found = {pattern(end[name]) if name in end else None for end in ends}
            if len(found) > 1:
                names[name] = Value(UNKNOWN, 0, node.lineno)
        self.line = node.lineno

    def _do_with(self, node: ast.With, names: Names) -> None:
        for item in node.items:
            entered = self.evaluate(item.context_expr, names)
            if item.optional_vars is not None:
                self.assign(item.optional_vars, self.unknown(entered), names)
        self._block(node.body, names)

    def _do_try(self, node: ast.Try, names: Names) -> None:
        self._block(node.body, names)
        for handler in node.handlers:
            self._either(node, [handler.body], dict(names), "whether an error comes")
        self._block(node.orelse, names)
        self._block(node.finalbody, names)

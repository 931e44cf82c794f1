"""Expressions of a program's text, read without tensors' data.

Known ops run on "meta" tensors, so shapes and dtypes are torch's own. Whatever else a person may have written gives
UNKNOWN, and is refused where a collective hangs on it.
"""

from __future__ import annotations

import ast
import builtins
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from autopar.errors import CertificateError
from autopar.runtime.certificate.recorder import Recorder
from autopar.runtime.certificate.values import RANK, UNKNOWN, Value, marked, marks_of, plain, unknown_in

SAFE = {
    name: getattr(builtins, name)
    for name in (
        "abs", "all", "any", "bool", "dict", "divmod", "enumerate", "float", "int", "isinstance", "len", "list", "max",
        "min", "range", "reversed", "round", "sorted", "str", "sum", "tuple", "zip",
    )
}  # fmt: skip
"""Builtins that are called while reading."""
NO_DATA = {"item", "tolist", "numpy", "backward", "register_hook", "data_ptr", "cpu", "cuda"}
"""A tensor's methods that need its data, or leave the device on which nothing has data."""
OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.MatMult: operator.matmul,
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor, ast.LShift: operator.lshift,
    ast.RShift: operator.rshift, ast.UAdd: operator.pos, ast.USub: operator.neg, ast.Invert: operator.invert,
    ast.Not: operator.not_, ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
_LISTS = {"append", "clear", "extend", "insert", "pop", "reverse", "copy", "index", "count"}

Names = dict[str, Value]


class Expressions:
    """Evaluates one expression at a time. Subclassed by what reads statements, which knows the module's functions."""

    rt: Recorder
    line: int = 0
    decided: int = 0
    failure: str = ""

    def refuse(self, message: str, line: int | None = None) -> CertificateError:
        """The error for what cannot be certified, at the line that is read."""
        raise NotImplementedError

    def call_function(self, name: str, args: list[Value], kwargs: dict[str, Value]) -> Value | None:
        """Run a function of the module; None if there is none of this name."""
        raise NotImplementedError

    def evaluate(self, node: ast.expr, names: Names) -> Value:
        """The value of any expression."""
        found = getattr(self, f"_{type(node).__name__.lower()}", None)
        if found is None:
            return self.unknown(
                *(self.evaluate(c, names) for c in ast.iter_child_nodes(node) if isinstance(c, ast.expr))
            )
        value: Value = found(node, names)
        return value

    def unknown(self, *of: Value) -> Value:
        """UNKNOWN, made at this line."""
        marks = 0
        for value in of:
            marks |= marks_of(value)
        return Value(UNKNOWN, marks, self.line)

    def apply(self, function: Callable[..., Any], *of: Value, **named: Value) -> Value:
        """`function` of plain values; UNKNOWN where one is, or where it fails.

        It may ask `rt` for a piece of a length of its own (a slice, a draw), or talk (a local form): both are marked.
        """
        every = (*of, *named.values())
        if any(unknown_in(v) is not None for v in every):
            return self.unknown(*every)
        marks = 0
        for value in every:
            marks |= marks_of(value)
        notes = self.rt.notes
        before, notes.own, notes.told = len(notes.calls), False, False
        try:
            result = function(*map(plain, of), **{k: plain(v) for k, v in named.items()})
        except Exception as error:
            self.failure = " ".join(str(error).split())[:200]
            return self.unknown(*every)
        finally:
            if len(notes.calls) > before:
                self.decided |= marks | (RANK if notes.told else 0)
        marks |= RANK if notes.own else 0
        if isinstance(result, Tensor) and result.device.type != "meta":
            return self.unknown(*every)
        if isinstance(result, (Iterator, range)):
            result = list(result)
        return marked(result, marks)

    # Kinds of expressions --------------------------------------------------------------------------------------------

    def _constant(self, node: ast.Constant, names: Names) -> Value:
        return Value(node.value)

    def _name(self, node: ast.Name, names: Names) -> Value:
        if node.id in names:
            return names[node.id]
        if node.id in SAFE:
            return Value(SAFE[node.id])
        return self.unknown()

    def _tuple(self, node: ast.Tuple, names: Names) -> Value:
        return Value(tuple(self._items(node.elts, names)))

    def _list(self, node: ast.List, names: Names) -> Value:
        return Value(self._items(node.elts, names))

    def _items(self, nodes: Iterable[ast.expr], names: Names) -> list[Value]:
        found: list[Value] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                inner = self.evaluate(node.value, names)
                found += inner.data if isinstance(inner.data, (list, tuple)) else [self.unknown(inner)]
            else:
                found.append(self.evaluate(node, names))
        return found

    def _dict(self, node: ast.Dict, names: Names) -> Value:
        keys = [Value(None) if k is None else self.evaluate(k, names) for k in node.keys]
        values = [self.evaluate(v, names) for v in node.values]
        if any(unknown_in(v) is not None for v in (*keys, *values)):
            return self.unknown(*keys, *values)
        return Value(dict(zip(map(plain, keys), map(plain, values), strict=True)), marks_of(Value([*keys, *values])))

    def _binop(self, node: ast.BinOp, names: Names) -> Value:
        left, right = self.evaluate(node.left, names), self.evaluate(node.right, names)
        if isinstance(node.op, ast.Mult) and isinstance(left.data, list) and right.known:
            # `[None] * 4`: a list that will hold values.
            return Value(left.data * int(right.data), left.marks | right.marks)
        return self.apply(OPERATORS[type(node.op)], left, right)

    def _unaryop(self, node: ast.UnaryOp, names: Names) -> Value:
        return self.apply(OPERATORS[type(node.op)], self.evaluate(node.operand, names))

    def _compare(self, node: ast.Compare, names: Names) -> Value:
        values = [self.evaluate(n, names) for n in (node.left, *node.comparators)]
        parts = [self.apply(OPERATORS[type(op)], a, b) for op, a, b in zip(node.ops, values, values[1:], strict=False)]
        return parts[0] if len(parts) == 1 else self.apply(lambda *p: all(p), *parts)

    def _boolop(self, node: ast.BoolOp, names: Names) -> Value:
        parts = [self.evaluate(n, names) for n in node.values]
        function = all if isinstance(node.op, ast.And) else any
        return self.apply(lambda *p: function(p), *parts)

    def _ifexp(self, node: ast.IfExp, names: Names) -> Value:
        test = self.evaluate(node.test, names)
        before = len(self.rt.notes.calls)
        if test.known:
            self.decided |= test.marks
            found = self.evaluate(node.body if plain(test) else node.orelse, names)
            return marked(plain(found), marks_of(found) | test.marks) if found.known else found
        both = self.unknown(test, self.evaluate(node.body, names), self.evaluate(node.orelse, names))
        self.no_calls_since(before, node.lineno, "the condition")
        return both

    def no_calls_since(self, before: int, line: int, what: str) -> None:
        """Refuse collectives made on the way through code that may or may not run."""
        calls = self.rt.notes.calls
        if len(calls) > before:
            first = calls[before].where
            raise self.refuse(
                f"{what} cannot be known before the run, so ranks may go different ways, and there is a collective in "
                f"it: {first}",
                line,
            )

    def _joinedstr(self, node: ast.JoinedStr, names: Names) -> Value:
        parts = [
            self.evaluate(p.value if isinstance(p, ast.FormattedValue) else p, names) for p in node.values
        ]  # fmt: skip
        return self.apply(lambda *p: "".join(map(str, p)), *parts)

    def _subscript(self, node: ast.Subscript, names: Names) -> Value:
        base = self.evaluate(node.value, names)
        index = self.evaluate(node.slice, names)
        if isinstance(base.data, (list, tuple)) and index.known:
            try:
                found = base.data[plain(index)]
            except (IndexError, TypeError):
                return self.unknown(base, index)
            marks = base.marks | index.marks
            if isinstance(found, Value):
                return _with(found, marks)
            return Value(found, marks)
        return self.apply(operator.getitem, base, index)

    def _slice(self, node: ast.Slice, names: Names) -> Value:
        parts = [Value(None) if p is None else self.evaluate(p, names) for p in (node.lower, node.upper, node.step)]
        return self.apply(slice, *parts)

    def _listcomp(self, node: ast.ListComp | ast.GeneratorExp, names: Names) -> Value:
        found: list[Value] = []
        if not self._comprehend(node.generators, node.elt, dict(names), found):
            return self.unknown()
        return Value(found)

    _generatorexp = _listcomp

    def _comprehend(self, loops: list[ast.comprehension], element: ast.expr, names: Names, found: list[Value]) -> bool:
        """Append every element; False where what is run over cannot be known."""
        if not loops:
            found.append(self.evaluate(element, names))
            return True
        items = self.run_over(self.evaluate(loops[0].iter, names))
        if items is None:
            return False
        for item in items:
            self.assign(loops[0].target, item, names)
            tests = [self.evaluate(t, names) for t in loops[0].ifs]
            if not all(t.known for t in tests):
                return False
            if all(plain(t) for t in tests) and not self._comprehend(loops[1:], element, names, found):
                return False
        return True

    def run_over(self, value: Value) -> list[Value] | None:
        """The items of something to loop over, or None."""
        if isinstance(value.data, (list, tuple)):
            self.decided |= value.marks
            return [_with(item, value.marks) for item in value.data]
        return None

    def assign(self, target: ast.expr, value: Value, names: Names) -> None:
        """Give `value` to a name, to several, or to a place in a list."""
        match target:
            case ast.Name():
                names[target.id] = value
            case ast.Tuple() | ast.List():
                for one, item in zip(target.elts, self._unpacked(value, len(target.elts)), strict=True):
                    self.assign(one, item, names)
            case ast.Starred():
                self.assign(target.value, self.unknown(value), names)
            case ast.Subscript():
                base, index = self.evaluate(target.value, names), self.evaluate(target.slice, names)
                if isinstance(base.data, list) and index.known:
                    base.data[plain(index)] = _with(value, index.marks)
            case _:
                pass  # An attribute, `rt.instance`: nothing is read from it here.

    def _unpacked(self, value: Value, count: int) -> list[Value]:
        if isinstance(value.data, (list, tuple)) and len(value.data) == count:
            return [_with(item, value.marks) for item in value.data]
        return [self.unknown(value) for _ in range(count)]

    # Attributes and calls --------------------------------------------------------------------------------------------

    def _attribute(self, node: ast.Attribute, names: Names) -> Value:
        base = self.evaluate(node.value, names)
        if base.data is UNKNOWN:
            return self.unknown(base)
        if base.data is self.rt:
            marks = RANK if node.attr == "rank" else 0
            return Value(getattr(self.rt, node.attr, UNKNOWN), marks, self.line)
        return self.apply(lambda x: getattr(x, node.attr), base)

    def _call(self, node: ast.Call, names: Names) -> Value:
        args = self._items(node.args, names)
        kwargs = {k.arg: self.evaluate(k.value, names) for k in node.keywords if k.arg is not None}
        match node.func:
            case ast.Name(id=name) if name not in names:
                found = self.call_function(name, args, kwargs)
                if found is not None:
                    return found
            case ast.Attribute(value=base, attr=attr):
                holder = self.evaluate(base, names)
                if holder.data is self.rt:
                    return self._call_rank(attr, args, kwargs)
                if isinstance(holder.data, list) and attr in _LISTS:
                    return self._call_list(holder, attr, args)
                if isinstance(holder.data, Tensor) and attr in NO_DATA:
                    return self.unknown(holder, *args)
            case _:
                pass
        function = self.evaluate(node.func, names)
        if function.data is UNKNOWN or not _harmless(function.data):
            return self._call_unknown(node, function, args, kwargs)
        return self.apply(function.data, *args, **kwargs)

    def _call_rank(self, name: str, args: list[Value], kwargs: dict[str, Value]) -> Value:
        """A method of `rt`. One that talks notes its call; its arguments must be known."""
        method = getattr(self.rt, name, None)
        if method is None:
            raise self.refuse(f"rt has no {name}")
        before = len(self.rt.notes.calls)
        hidden = [u for v in (*args, *kwargs.values()) if (u := unknown_in(v)) is not None]
        if hidden and name in TALK:
            raise self.refuse(
                f"the shape of what rt.{name} is given cannot be known before the run; it comes from line "
                f"{hidden[0].line}"
            )
        found = self.apply(method, *args, **kwargs)
        if len(self.rt.notes.calls) == before and name in TALK and found.data is UNKNOWN:
            raise self.refuse(f"rt.{name} does not take this ({self.failure})")
        return Value(found.data, found.marks | RANK, found.line) if name in OWN else found

    def _call_list(self, holder: Value, name: str, args: list[Value]) -> Value:
        """A list of values changes in place."""
        if name in ("append", "insert"):
            getattr(holder.data, name)(*(plain(a) for a in args[:-1]), args[-1])
            return Value(None)
        if name == "extend" and isinstance(args[0].data, (list, tuple)):
            holder.data.extend(args[0].data)
            return Value(None)
        if name == "pop" and holder.data:
            found: Value = holder.data.pop(*map(plain, args))
            return found
        if name in ("clear", "reverse"):
            getattr(holder.data, name)()
            return Value(None)
        return self.apply(getattr(list, name), holder, *args)

    def _call_unknown(self, node: ast.Call, function: Value, args: list[Value], kwargs: dict[str, Value]) -> Value:
        """What cannot be read: refused if it may talk to other ranks."""
        given = (*args, *kwargs.values())
        module = str(getattr(function.data, "__module__", ""))
        if module.startswith("torch.distributed") or "distributed" in ast.unparse(node.func):
            raise self.refuse("a collective that does not go through rt cannot be certified")
        if any(v.data is self.rt for v in given):
            raise self.refuse("a function that cannot be read is given rt: it may issue any collective")
        return self.unknown(function, *given)


OWN = frozenset({"index", "piece"})
"""Methods of `rt` that say which rank it is."""
TALK = frozenset({"all_reduce", "all_reduce_max", "all_gather", "reduce_scatter", "all_to_all", "convert", "barrier",
                  "exchange_counts", "exchange_rows", "pass_on", "send", "receive"})  # fmt: skip
"""Methods of `rt` that other ranks take part in."""


def _with(value: Value, marks: int) -> Value:
    """With more marks; lists stay the same list."""
    return value if not marks & ~value.marks else Value(value.data, value.marks | marks, value.line)


def _harmless(function: Any) -> bool:
    """True for what may run while reading: ops of torch, our local ops, builtins and methods of tensors and strings."""
    if isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch.dtype)):
        return True
    if function in SAFE.values():
        return True
    owner = getattr(function, "__self__", None)
    if isinstance(owner, (Tensor, str, dict, torch.Size)):
        return True
    module = str(getattr(function, "__module__", "") or "")
    if module in ("autopar.runtime.local_ops", "autopar.runtime.expert_ops", "autopar.runtime.ring"):
        return True
    name = getattr(function, "__name__", "")
    return getattr(torch, name, None) is function and hasattr(torch._C._VariableFunctions, name)

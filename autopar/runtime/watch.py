"""An emitted program that tells of each value that it makes: what `verify --bisect` runs.

`rt.watch(line, instance, {name: tensor}, before)` is called before a line (with what it reads) and after it (with what
it makes). `instance` is the block's call, -1 outside blocks.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher

from torch import Tensor

from autopar.ir.program import Made, Source
from autopar.runtime.comm import Communicator


@dataclass(frozen=True, slots=True)
class Seen:
    """One run of one line: the pieces that it read and made, by variable. `turn` counts a line's runs in a loop."""

    line: int
    instance: int
    turn: int
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]


@dataclass
class Watcher:
    """Takes notes of one rank."""

    seen: list[Seen] = field(default_factory=list)
    _runs: Counter[int] = field(default_factory=Counter)
    _inputs: list[dict[str, Tensor]] = field(default_factory=list)

    def attach(self, rt: Communicator) -> None:
        """From now on the rank's watched program tells this."""
        rt.watch = self

    def __call__(self, line: int, instance: int, values: Mapping[str, object], before: bool) -> None:
        kept = {name: x.detach().clone() for name, x in values.items() if isinstance(x, Tensor)}
        if before:
            self._inputs.append(kept)
            return
        turn = 0
        if instance < 0:
            turn = self._runs[line]
            self._runs[line] += 1
        self.seen.append(Seen(line, instance, turn, self._inputs.pop(), kept))


def aligned(original: Source, text: str) -> dict[int, Made]:
    """What the lines of an edited text make, by the lines of the original that they stand for."""
    pairs = _stand_for(original.text, text)
    return {there: original.made[here] for there, here in pairs.items() if here in original.made}


def edited(original: Source, text: str) -> Source:
    """A program that somebody changed, with what is known of the lines that are still there."""
    pairs = _stand_for(original.text, text)
    lines = {there: original.lines[here] for there, here in pairs.items() if here in original.lines}
    return Source(text=text, lines=lines, made=aligned(original, text))


def _stand_for(original: str, text: str) -> dict[int, int]:
    """Line of an edited text -> line of the original that it stands for."""
    mine, theirs = original.splitlines(), text.splitlines()
    if mine == theirs:
        return {n: n for n in range(1, len(mine) + 1)}
    found: dict[int, int] = {}
    for tag, a, b, x, y in SequenceMatcher(None, mine, theirs, autojunk=False).get_opcodes():
        if tag == "equal" or (tag == "replace" and b - a == y - x):
            found |= {there + 1: here + 1 for here, there in zip(range(a, b), range(x, y), strict=True)}
        elif tag == "replace":
            found |= _by_target(mine, theirs, range(a, b), range(x, y))
    return found


def missing(original: Source, text: str) -> tuple[str, ...]:
    """Lines of the original that make something and that an edited text has none for, as "line 12: ..."."""
    kept = {id(made) for made in aligned(original, text).values()}
    rows = original.text.splitlines()
    return tuple(
        f"  line {line}: {rows[line - 1].split('  # ')[0].strip()}"
        for line, made in original.made.items()
        if id(made) not in kept
    )


def _by_target(mine: list[str], theirs: list[str], here: range, there: range) -> dict[int, int]:
    """Lines that set the same names."""
    left = {mine[i].partition(" = ")[0].strip(): i for i in here if " = " in mine[i]}
    return {j + 1: left[t] + 1 for j in there if (t := theirs[j].partition(" = ")[0].strip()) in left}


def watched(source: Source, made: Mapping[int, Made]) -> Source:
    """The program with a word to `rt.watch` around every line that makes something."""
    tree = _Around(made).visit(ast.parse(source.text))
    return replace(source, text=ast.unparse(ast.fix_missing_locations(tree)) + "\n", lines={}, made={})


class _Around(ast.NodeTransformer):
    def __init__(self, made: Mapping[int, Made]) -> None:
        self.made = made
        self.instance: ast.expr = ast.Constant(-1)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        inside = any(a.arg == "i" for a in node.args.args)
        self.instance = ast.Name("i", ast.Load()) if inside else ast.Constant(-1)
        self.generic_visit(node)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.Assign | list[ast.stmt]:
        made = self.made.get(node.lineno)
        if made is None:
            return node
        read = {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
        set_ = {n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name) and _stored(n)}
        return [
            self._told(node.lineno, [n for n in made.reads if n in read], True),
            node,
            self._told(node.lineno, [n for n in made.names if n in set_ and n != "_"], False),
        ]

    def _told(self, line: int, names: list[str], before: bool) -> ast.stmt:
        values = ast.Dict([ast.Constant(n) for n in names], [ast.Name(n, ast.Load()) for n in names])
        args = [ast.Constant(line), self.instance, values, ast.Constant(before)]
        return ast.Expr(ast.Call(ast.Attribute(ast.Name("rt", ast.Load()), "watch", ast.Load()), args, []))


def _stored(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)

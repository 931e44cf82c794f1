"""Which op is the first whose result differs from one device's?

Every value that every line of the program makes is compared, in the order in which ranks make them: joined through its
planned layout (summands added, pieces joined, each replica for itself) against the same captured graph run on one
device. Where a result differs, one device runs that op on what the ranks gave it: if it gives the same, to what such an
op makes of its inputs' last bits, the line only hands an error on. The first line that does not is the culprit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Protocol

import torch
from torch import Tensor

from autopar.ir.graph import CapturedGraph, Node, Phase
from autopar.ir.layout import Kind, Layout
from autopar.ir.mesh import Mesh
from autopar.ir.program import CallBlock, Made, Program, Source, Turn
from autopar.tracer.interpret import run_op

Key = tuple[str, int, str]
"""(graph's block, "" of the top; number of the call, -1 at the top; value)."""


class Seen(Protocol):
    """One run of one line on one rank; `runtime.watch` has it."""

    @property
    def line(self) -> int:
        """Of the program."""

    @property
    def instance(self) -> int:
        """Call of the block, -1 at the top."""

    @property
    def turn(self) -> int:
        """Of the loop around the line."""

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Variables read."""

    @property
    def outputs(self) -> dict[str, Tensor]:
        """Variables set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A line whose result is not one device's.

    Attributes:
        op, module_path, source: the op of the model (or step of a conversion), its module with its instance's path, and
            the user's line.
        line, text, function: of the emitted program.
        value, layout: what is wrong, and how it is held. `ranks`: who holds it wrong.
        error, tolerance: largest difference over the largest entry.
        inputs: (name, error) of the inputs that were wrong already.
        right_for_inputs: whether one device's op gives the same for what this one was given; None: it can't be run.
    """

    phase: Phase
    op: str
    module_path: str
    source: str
    line: int
    text: str
    function: str
    value: str
    layout: str
    ranks: tuple[int, ...]
    error: float
    tolerance: float
    inputs: tuple[tuple[str, float], ...]
    right_for_inputs: bool | None

    @property
    def wrong_itself(self) -> bool:
        """True if the op is wrong whatever its inputs are."""
        return self.right_for_inputs is False or (self.right_for_inputs is None and not self.inputs)

    @property
    def cause(self) -> str:
        """In words."""
        wrong = ", ".join(f"{name} (error {error:.1e})" for name, error in self.inputs)
        if not self.inputs:
            return "its inputs are right: this op is wrong"
        if self.wrong_itself:
            return f"this op is wrong for its inputs, of which some were wrong already: {wrong}"
        return f"this op is right for its inputs, but they are not what was made before: {wrong}"

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        return "\n".join(
            [
                f"first wrong op: {self.op} in the {self.phase.value} of {self.module_path or '(top)'}",
                f"  model line    {self.source or 'unknown'}",
                f"  emitted line  {self.line} ({self.function}): {self.text}",
                f"  result        {self.value} {self.layout}: error {self.error:.1e} "
                f"(tolerance {self.tolerance:.0e}) on ranks {ranks}",
                f"  {self.cause}",
            ]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bisection:
    """`compared` values; `drawn` were taken from the ranks, since one device's say nothing: random draws, empty memory.

    `rounded`: differ by no more than an op makes of rounding in its inputs, as where the exact result is zero.
    `missing`: lines emitted for the plan that the program lacks. `elsewhere`: where to look if nothing was found.
    """

    first: Difference | None
    compared: int
    drawn: int
    rounded: int = 0
    missing: tuple[str, ...] = ()
    elsewhere: str = ""

    def __str__(self) -> str:
        head = f"{self.compared} values of forward and backward compared"
        head += (
            f", {self.drawn} more taken from the ranks (random, or memory before it is filled)" if self.drawn else ""
        )
        head += f", {self.rounded} of them apart by rounding" if self.rounded else ""
        lines = [head if self.first is not None else f"{head}: all as on one device"]
        lines += ["lines of the plan's program that this one lacks:", *self.missing] if self.missing else []
        lines += [str(self.first)] if self.first is not None else [self.elsewhere] if self.elsewhere else []
        return "\n".join(lines)


def bisect(
    captured: CapturedGraph,
    program: Program,
    source: Source,
    made: Mapping[int, Made],
    seen: Sequence[Sequence[Seen]],
    reference: Callable[[Any], object],
    tolerance: Mapping[torch.dtype, float],
    is_random: Callable[[str], bool],
) -> Bisection:
    """Compare what each rank's watched program told.

    Args:
        source: the text that ran; `made` says what its lines make.
        seen: by rank, in order.
        reference: runs the captured graph on one device, with the hook for `interpret`.
        is_random: whether an op draws random numbers.
    """
    work = _Work(captured, program, source, made, seen, tolerance)
    work.run_reference(reference, is_random)
    first: Difference | None = None
    for at in range(len(seen[0])):
        for found in work.differences(at):
            # What a call of a block gives is wrong by itself only if nothing in the block was.
            if found.wrong_itself and (first is None or not found.op.startswith("autopar.block")):
                return work.report(found)
            first = first or (found if found.inputs else None)
    return work.report(first)


@dataclass
class _Work:
    captured: CapturedGraph
    program: Program
    source: Source
    made: Mapping[int, Made]
    seen: Sequence[Sequence[Seen]]
    tolerance: Mapping[torch.dtype, float]
    expected: dict[Key, Any] = field(default_factory=dict)
    compared: int = 0
    drawn: int = 0
    rounded: int = 0
    floor: float = 0.0

    def report(self, first: Difference | None) -> Bisection:
        """What was found."""
        return Bisection(first=first, compared=self.compared, drawn=self.drawn, rounded=self.rounded)

    def __post_init__(self) -> None:
        self.functions = {f.name: f for f in self.program.functions}
        self.nodes = {(g.name, n.key): n for g in self.captured.graphs for n in g.nodes}
        top = (f for f in self.program.functions if not f.block)
        calls = [s for f in top for s in f.steps if isinstance(s, CallBlock)]
        self.calls = {s.place.key: (s.block, s.index) for s in calls}
        self.draws: dict[Key, tuple[Layout, list[Tensor]]] = {}
        self.taken: set[Key] = set()

    # One device ------------------------------------------------------------------------------------------------------

    def run_reference(self, reference: Callable[[Any], object], is_random: Callable[[str], bool]) -> None:
        """Every value as one device makes it. Random draws are the ranks' own."""
        drawing = {n.key for g in self.captured.graphs for n in g.nodes if is_random(n.op) or _without_content(n.op)}
        for at in range(len(self.seen[0])):
            turn, block = self._turn(at)
            if turn is not None and turn.key in drawing:
                for local, pieces in self._sides(at, turn.outputs, outputs=True):
                    self.draws.setdefault((block, self.seen[0][at].instance, local.value), (local.layout, pieces))

        def watch(call: Node | None, name: str, node: Node | None, value: Any) -> Any:
            block, index = self.calls[call.key] if call is not None else ("", -1)
            key = block, index, name
            if node is not None and key in self.draws and key not in self.taken:
                self.taken.add(key)
                self.drawn += 1
            if node is not None and key in self.draws:
                value = next(iter(assembled(*self.draws[key], self.program.mesh)))[1]
            self.expected[key] = value
            return value

        reference(watch)

    # Ranks -----------------------------------------------------------------------------------------------------------

    def _turn(self, at: int) -> tuple[Turn | None, str]:
        """What the event number `at` works on, and the block that it is in."""
        event = self.seen[0][at]
        made = self.made[event.line]
        turn = made.turns[event.turn] if event.turn < len(made.turns) else None
        return turn, self.functions[made.function].block

    def _sides(self, at: int, locals_: Sequence[Any], outputs: bool) -> Iterator[tuple[Any, list[Tensor]]]:
        """(version of a value, pieces by rank) of what an event read or made."""
        made = self.made[self.seen[0][at].line]
        for name, local in zip(made.names if outputs else made.reads, locals_, strict=True):
            events = [rank[at] for rank in self.seen]
            pieces = [(e.outputs if outputs else e.inputs).get(name) for e in events]
            if local is not None and all(p is not None for p in pieces):
                yield local, [p for p in pieces if p is not None]

    def differences(self, at: int) -> Iterator[Difference]:
        """The results of one event that are not one device's."""
        turn, block = self._turn(at)
        if turn is None:
            return
        index = self.seen[0][at].instance
        for local, pieces in self._sides(at, turn.outputs, outputs=True):
            expected = self.expected.get((block, index, local.value))
            if not isinstance(expected, Tensor) or (block, index, local.value) in self.taken:
                continue
            if self._in_no_order(at, local):
                continue
            self.compared += 1
            error, ranks = self._error(local.layout, pieces, expected)
            limit = self._limit(expected)
            if not error <= limit:
                found = self._difference(at, turn, block, local, error, limit, ranks)
                if found.right_for_inputs and not found.inputs:
                    self.rounded += 1
                    self.floor = max(self.floor, error * _largest(expected))
                else:
                    yield found

    def _in_no_order(self, at: int, local: Any) -> bool:
        """True of rows of experts on ranks that cut something: whose they are, and where, is a rank's own."""
        graph = self.functions[self.made[self.seen[0][at].line].function].graph
        return bool(self.program.metas[graph][local.value].unordered) and self.program.mesh.size > 1

    def _limit(self, expected: Tensor) -> float:
        return self.tolerance.get(expected.dtype, 1e-5) if expected.is_floating_point() else 0.0

    def _error(
        self, layout: Layout, pieces: Sequence[Tensor], expected: Tensor, noise: float = 0.0
    ) -> tuple[float, tuple[int, ...]]:
        """(largest error, ranks that hold it). `noise`: what rounding may do to an entry."""
        worst = 0.0
        where: tuple[int, ...] = ()
        scale = noise / self.tolerance.get(expected.dtype, 1e-5)
        for ranks, whole in assembled(layout, pieces, self.program.mesh):
            error = difference(expected, whole, scale)
            if not error <= worst:
                worst, where = error, ranks
        return worst, where

    def _difference(
        self, at: int, turn: Turn, block: str, local: Any, error: float, limit: float, ranks: tuple[int, ...]
    ) -> Difference:
        event = self.seen[0][at]
        made = self.made[event.line]
        function = self.functions[made.function]
        node = self.nodes.get((function.graph, turn.key))
        instance = self.program.calls[block][event.instance] if block else ""
        inner = node.module_path if node is not None and not (node.block and block) else ""
        wrong, right = self._judged(at, turn, block, node if made.op == _called(node, made) else None)
        return Difference(
            phase=function.phase, op=_named(made.op, node), line=event.line,
            module_path=".".join(p for p in (instance, inner) if p), source=node.source if node is not None else "",
            text=self.source.text.splitlines()[event.line - 1].split("  # ")[0].strip(), function=made.function,
            value=local.value, layout=str(local.layout), ranks=ranks, error=error, tolerance=limit,
            inputs=wrong, right_for_inputs=right,
        )  # fmt: skip

    def _judged(
        self, at: int, turn: Turn, block: str, node: Node | None
    ) -> tuple[tuple[tuple[str, float], ...], bool | None]:
        """(inputs that were wrong already, whether the op is right for what it was given)."""
        index = self.seen[0][at].instance
        env: dict[str, Tensor] = {}
        wrong = []
        summand = 0.0
        for local, pieces in self._sides(at, turn.inputs, outputs=False):
            expected = self.expected.get((block, index, local.value))
            env.setdefault(local.value, next(iter(assembled(local.layout, pieces, self.program.mesh)))[1])
            summand = max([summand, *map(_largest, pieces)])
            if isinstance(expected, Tensor) and not self._in_no_order(at, local):
                error, _ = self._error(local.layout, pieces, expected, 10 * self.floor)
                wrong += [(local.value, error)] if not error <= self._limit(expected) else []
        # An edited line may read something else instead.
        unread = {i.value for i in turn.inputs if i is not None} - env.keys()
        wrong += [(f"{name}, which the line does not read", float("inf")) for name in sorted(unread)]
        return tuple(wrong), self._right_for(at, turn, env, node, summand)

    def _right_for(
        self, at: int, turn: Turn, env: Mapping[str, Tensor], node: Node | None, summand: float
    ) -> bool | None:
        """Whether one device's op gives what the ranks have, from what the ranks gave it; None if it can't be run."""
        if not env or any(i is not None and (i.value not in env or self._in_no_order(at, i)) for i in turn.inputs):
            return None
        values = _run(node, env, len(turn.outputs))
        shaken = _run(node, {k: _shaken(v) for k, v in env.items()}, len(turn.outputs))
        if values is None or shaken is None:
            return None
        by_value = {o.value: pair for o, *pair in zip(turn.outputs, values, shaken, strict=False) if o is not None}
        for local, pieces in self._sides(at, turn.outputs, outputs=True):
            own, moved = by_value.get(local.value, (None, None))
            if not isinstance(own, Tensor) or not isinstance(moved, Tensor):
                return None
            noise = 0.0
            if own.is_floating_point():
                eps = torch.finfo(own.dtype).eps
                parts = max([summand if node is None else 0.0, *map(_largest, pieces if local.layout.partial else ())])
                noise = LAST_BITS * (_largest(own.double() - moved.double()) + eps * max(parts, _largest(own)))
            error, _ = self._error(local.layout, pieces, own, noise)
            if not error <= self._limit(own):
                return False
        return True


LAST_BITS = 64
"""How far two runs of one op may be apart, in what it makes of a change of its inputs' last bits."""


def _run(node: Node | None, env: Mapping[str, Tensor], outputs: int) -> list[Any] | None:
    """One op on one device, or a conversion, which changes nothing; None if the op can't be run so."""
    if node is None:
        return [next(iter(env.values()))] * outputs
    try:
        with torch.no_grad():
            return list(run_op(node, env))
    except Exception:
        return None


def _shaken(x: Tensor) -> Tensor:
    """With other last bits."""
    if not x.is_floating_point():
        return x
    draw = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (x.double() * (1 + torch.finfo(x.dtype).eps * draw)).to(x.dtype)


def _without_content(op: str) -> bool:
    """True for ops that give memory as it is, for others to fill."""
    parts = op.split(".")
    return len(parts) > 1 and "empty" in parts[1].split("_")


def _called(node: Node | None, made: Made) -> str:
    """The op of a line that computes; a conversion's line has the key of the op that it is for."""
    computes = node is not None and "(" not in made.op
    return made.op if computes else ""


def _named(op: str, node: Node | None) -> str:
    """An op by its name in the model; a step of a conversion by what it is for."""
    if node is None:
        return op
    return node.op if "(" not in op else f"{op} for {node.op}"


def assembled(layout: Layout, pieces: Sequence[Tensor], mesh: Mesh) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """(ranks, the whole tensor that they hold between them) of each set of replicas."""
    free = [range(a.size) if p.kind is Kind.REPLICATE else (None,)
            for a, p in zip(mesh.axes, layout.placements, strict=True)]  # fmt: skip
    for fixed in product(*free):
        ranks = [
            r
            for r in range(mesh.size)
            if all(f is None or f == c for f, c in zip(fixed, mesh.coordinate(r), strict=True))
        ]
        yield tuple(ranks), _joined(layout, mesh, [pieces[r] for r in ranks])


def _joined(layout: Layout, mesh: Mesh, pieces: list[Tensor]) -> Tensor:
    """Pieces in rank order, undone from the fastest axis to the slowest."""
    for axis, placement in reversed(list(zip(mesh.axes, layout.placements, strict=True))):
        if placement.kind is Kind.REPLICATE:
            continue
        rows = [pieces[k : k + axis.size] for k in range(0, len(pieces), axis.size)]
        pieces = [_one(placement.kind, placement.dim, row) for row in rows]
    return pieces[0]


def _one(kind: Kind, dim: int, row: list[Tensor]) -> Tensor:
    try:
        return torch.cat(row, dim) if kind is Kind.SHARD else torch.stack(row).sum(0, dtype=row[0].dtype)
    except (RuntimeError, IndexError):
        return row[0].new_full((), float("nan")) if row[0].is_floating_point() else row[0].new_zeros(())


def _largest(x: Any) -> float:
    if not isinstance(x, Tensor) or x.numel() == 0 or not (x.is_floating_point() or x.is_complex()):
        return 0.0
    return float(x.detach().abs().nan_to_num(0.0, 0.0, 0.0).max())


def difference(expected: Tensor, found: Tensor, noise: float) -> float:
    """Largest difference over the largest entry; inf where shapes differ or whole numbers do."""
    if expected.shape != found.shape:
        return float("inf")
    if expected.numel() == 0:
        return 0.0
    if not (expected.is_floating_point() or expected.is_complex()):
        return 0.0 if torch.equal(expected, found) else float("inf")
    a, b = (x.to(torch.complex128 if x.is_complex() else torch.float64) for x in (expected, found))
    apart = torch.where((a == b) | (a.isnan() & b.isnan()), torch.zeros_like(a.abs()), (a - b).abs())
    return float(apart.max()) / max(_largest(expected), noise, 1e-30)

"""The native search (native/pairwise), through ctypes. The library is found by `autopar.native`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from autopar.errors import CompilerError
from autopar.native import kernels as built_kernels
from autopar.solver.linear import Ints
from autopar.solver.pairwise.model import PairwiseModel
from autopar.solver.pairwise.problem import PairwiseProblem

_POINTER, _I32, _I64, _F64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_double
_TOLD = ctypes.CFUNCTYPE(_I32, _F64, _F64, _F64)
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "reduce": (_POINTER, (_I64, _I64, _I64, *[_POINTER] * 6)),
    "counts": (None, (_POINTER, _POINTER)),
    "copy": (None, (_POINTER, *[_POINTER] * 8)),
    "lift": (None, (_POINTER, _POINTER, _POINTER)),
    "search": (_I32, (_POINTER, _F64, _I64, _I32, _TOLD, _POINTER, _POINTER)),
    "free": (None, (_POINTER,)),
}
_COUNTS = 9
Told = Callable[[float, float, float], bool]
"""Called about once a second with seconds, cost of the best choice so far (inf: none) and bound; True stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """What the search came to: `choice` is None where none that fits was found; costs with the constant in them."""

    choice: Ints | None
    cost: float
    bound: float
    ended: bool


@dataclass(frozen=True, slots=True)
class Reduced:
    """A problem after its exact reductions, held by the library; use it inside `reduced` only."""

    problem: PairwiseProblem
    library: Any
    handle: int
    counts: tuple[int, ...]

    @property
    def impossible(self) -> bool:
        """No choice without a forbidden cost fits."""
        return self.counts[0] != 0

    @property
    def constant(self) -> int:
        """What every choice costs at least, and is not in the search's own numbers."""
        return self.counts[1]

    @property
    def entries(self) -> int:
        """Costs in the tables of pairs."""
        return self.counts[5]

    def __str__(self) -> str:
        _, _, nodes, strategies, edges, entries, _, _, rows = self.counts
        return f"{nodes} nodes, {strategies} strategies, {edges} edges, {entries} edge costs, {rows} times"

    def model(self) -> PairwiseModel:
        """What is left, as arrays."""
        _, constant, nodes, strategies, edges, entries, loads, amounts, rows = self.counts
        model = PairwiseModel(
            start=np.zeros(nodes + 1, dtype=np.int64), cost=np.zeros(strategies),
            ends=np.zeros((edges, 2), dtype=np.int64), tables=np.zeros(entries),
            load_node=np.zeros(loads, dtype=np.int64), load_rows=np.zeros((loads, 2), dtype=np.int64),
            amounts=np.zeros(amounts), room=np.zeros(rows), constant=constant,
        )  # fmt: skip
        arrays = (
            model.start, model.cost, model.ends, model.tables,
            model.load_node, model.load_rows, model.amounts, model.room,
        )  # fmt: skip
        self.library.autopar_pairwise_copy(self.handle, *(a.ctypes.data for a in arrays))
        return model

    def lift(self, picked: Ints) -> Ints:
        """The problem's choice behind one of the model's."""
        small, choice = picked.astype(np.int32), np.zeros(self.problem.nodes, dtype=np.int32)
        self.library.autopar_pairwise_lift(self.handle, small.ctypes.data, choice.ctypes.data)
        return choice.astype(np.int64)

    def search(self, seconds: float, rounds: int | None, threads: int, told: Told) -> Walked:
        """Bound and choices, until proof, an end by itself, or time."""
        choice, numbers = np.zeros(self.problem.nodes, dtype=np.int32), np.zeros(2)
        done = self.library.autopar_pairwise_search(
            self.handle, seconds, 2**62 if rounds is None else rounds, threads, _TOLD(lambda *n: int(told(*n))),
            choice.ctypes.data, numbers.ctypes.data,
        )  # fmt: skip
        if done < 0:
            raise CompilerError(f"{self.problem.name}: no memory for the search")
        return Walked(
            choice=choice.astype(np.int64) if done & 2 else None,
            cost=float(numbers[0]), bound=float(numbers[1]), ended=bool(done & 1),
        )  # fmt: skip


@cache
def library() -> Any:
    """The library with its functions declared, or None (`autopar.native.found` says why)."""
    kernels = built_kernels()
    if kernels is None:
        return None
    opened = ctypes.CDLL(str(kernels.path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(opened, f"autopar_pairwise_{name}")
        function.restype, function.argtypes = result, arguments
    return opened


@contextmanager
def reduced(problem: PairwiseProblem) -> Iterator[Reduced]:
    """The problem (pairs only) reduced; the library lets go of it at the end."""
    opened = library()
    arrays = (problem.start, problem.intervals, problem.cost, problem.usage, problem.edge_nodes, problem.tables)
    kept = [np.ascontiguousarray(a, dtype=np.int64) for a in arrays]
    handle = opened.autopar_pairwise_reduce(problem.nodes, problem.edges, problem.limit, *(a.ctypes.data for a in kept))
    if not handle:
        raise CompilerError(f"{problem.name}: no memory to reduce it")
    try:
        counts = np.zeros(_COUNTS, dtype=np.int64)
        opened.autopar_pairwise_counts(handle, counts.ctypes.data)
        yield Reduced(problem, opened, handle, tuple(counts.tolist()))
    finally:
        opened.autopar_pairwise_free(handle)

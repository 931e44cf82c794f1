"""How long does the solver take on problems of the size of real captured graphs?

    PYTHONPATH=. .venv/bin/python benchmarks/solver_scaling.py [--blocks 17] [--memory 0.6] [--time-limit 60]

Prints a line for each stage. The problems are chains of transformer-like blocks: matmuls with row-, column- and
batch-split strategies on a two-axis mesh, element-wise followers, a residual stream that several ops read, parameters
with storage choices, and one memory limit. `chain_problem` is deterministic.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Callable
from typing import TypeVar

from autopar.ir.problem import Consumer, Moment, NodeBytes, Problem, ProblemNode, ProblemValue
from autopar.solver import build_model, reduce_problem, solve
from autopar.solver.highs import solve_lp

ONE_AXIS = ("R", "S0", "S1", "P")
LAYOUTS = tuple(itertools.product(ONE_AXIS, repeat=2))
STORED = tuple(i for i, pair in enumerate(LAYOUTS) if "P" not in pair)
# one-axis rules: (inputs, output, share of the work)
MATMUL = ((("R", "R"), "R", 1.0), (("S0", "R"), "S0", 0.0), (("R", "S1"), "S1", 0.0), (("S1", "S0"), "P", 0.0))
POINTWISE = ((("R",), "R", 1.0), (("S0",), "S0", 0.0), (("S1",), "S1", 0.0))
LINEAR = (*POINTWISE, (("P",), "P", 0.0))
NORM = ((("R",), "R", 1.0), (("S0",), "S0", 0.0))
ADD = tuple(((p, p), p, share) for ((p,), _, share) in LINEAR)
SIZES = (4, 8)
T = TypeVar("T")
LP_METHODS: dict[str, dict[str, str | float | int]] = {
    "simplex, presolve": {"solver": "simplex", "presolve": "on"},
    "simplex": {"solver": "simplex", "presolve": "off"},
    "interior point, presolve": {"solver": "ipm", "presolve": "on"},
}


def _share(split: float, size: int) -> float:
    return 1.0 if split == 1.0 else 1.0 / size


def _product(rule: tuple[tuple[tuple[str, ...], str, float], ...]) -> list[tuple[tuple[int, ...], int, float]]:
    """One-axis rules on both axes: (input layouts, output layout, share of the work)."""
    index = {pair: i for i, pair in enumerate(LAYOUTS)}
    return [
        (
            tuple(index[pair] for pair in zip(a_in, b_in, strict=True)),
            index[a_out, b_out],
            _share(a, SIZES[0]) * _share(b, SIZES[1]),
        )
        for (a_in, a_out, a), (b_in, b_out, b) in itertools.product(rule, repeat=2)
    ]


def _step_us(p: str, q: str, part_bytes: float, size: int) -> float:
    """Ring collective on one axis: latency and bytes / bandwidth; inf where no conversion exists."""
    if p == q or (p == "R" and q != "P"):
        return 0.0
    if q == "P":
        return float("inf")
    wire = part_bytes * (size - 1) / size / 1e5
    if p == "P":
        return 8.0 + (2 * wire if q == "R" else wire)
    return 8.0 + (wire if q == "R" else wire / size)


def _reshard_us(tensor_bytes: float) -> tuple[tuple[float, ...], ...]:
    def local(pair: tuple[str, str]) -> float:
        return (
            tensor_bytes / (SIZES[0] if pair[0] in ("S0", "S1") else 1) / (SIZES[1] if pair[1] in ("S0", "S1") else 1)
        )

    def price(p: tuple[str, str], q: tuple[str, str]) -> float:
        part = max(local(p), local(q))
        return sum(_step_us(a, b, part, size) for a, b, size in zip(p, q, SIZES, strict=True))

    return tuple(tuple(price(p, q) for q in LAYOUTS) for p in LAYOUTS)


class _Chain:
    """Collects nodes and values; `value[name]` maps to (producer, made, readers, bytes)."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.nodes: list[ProblemNode] = []
        self.made: list[tuple[str, int, tuple[int, ...], float]] = []
        self.readers: list[list[Consumer]] = []
        self.held: list[NodeBytes] = []

    def op(
        self,
        name: str,
        rule: tuple[tuple[tuple[str, ...], str, float], ...],
        inputs: list[int],
        work_us: float,
        out_bytes: float,
    ) -> int:
        """Add an op; returns the index of the value that it makes."""
        strategies = _product(rule)
        node = len(self.nodes)
        jitter = self.random.uniform(0.8, 1.2)
        self.nodes.append(ProblemNode(name=name, cost_us=tuple(4.0 + work_us * jitter * s for _, _, s in strategies)))
        for position, value in enumerate(inputs):
            self.readers[value].append(Consumer(node=node, wants=tuple(i[position] for i, _, _ in strategies)))
        self.made.append((name, node, tuple(o for _, o, _ in strategies), out_bytes))
        self.readers.append([])
        return len(self.made) - 1

    def parameter(self, name: str, size_bytes: float) -> int:
        node = len(self.nodes)
        local = tuple(size_bytes / _parts(p) for p in STORED)
        self.nodes.append(ProblemNode(name=name, cost_us=tuple(b / 1e6 for b in local)))
        self.held.append(NodeBytes(node=node, bytes=tuple(int(8 * b) for b in local)))
        self.made.append((name, node, STORED, size_bytes))
        self.readers.append([])
        return len(self.made) - 1

    def problem(self, name: str, memory: float) -> Problem:
        values = tuple(
            ProblemValue(name=n, producer=o, made=m, consumers=tuple(r), reshard_us=_reshard_us(b))
            for (n, o, m, b), r in zip(self.made, self.readers, strict=True)
            if r
        )
        least = sum(min(h.bytes) for h in self.held)
        most = sum(max(h.bytes) for h in self.held)
        moment = Moment(name="step", limit_bytes=int(least + memory * (most - least)), nodes=tuple(self.held))
        return Problem(name=name, nodes=tuple(self.nodes), values=values, moments=(moment,))


def _parts(layout: int) -> int:
    return (SIZES[0] if LAYOUTS[layout][0] != "R" else 1) * (SIZES[1] if LAYOUTS[layout][1] != "R" else 1)


def chain_problem(blocks: int, *, memory: float = 1.0, seed: int = 0) -> Problem:
    """`blocks` transformer-like blocks; `memory` = 0 leaves room for the smallest storage only, 1 for any."""
    chain = _Chain(seed)
    hidden, wide, weight = 64e6, 256e6, 32e6
    stream = chain.op("embed", NORM, [chain.parameter("embedding", weight)], 50.0, hidden)
    for b in range(blocks):
        normed = chain.op(f"{b}.norm1", NORM, [stream], 40.0, hidden)
        heads = [
            chain.op(f"{b}.{n}", MATMUL, [normed, chain.parameter(f"{b}.w{n}", weight)], 900.0, hidden) for n in "qkv"
        ]
        heads = [chain.op(f"{b}.rotate{i}", POINTWISE, [h], 30.0, hidden) for i, h in enumerate(heads)]
        mixed = chain.op(f"{b}.scores", ADD[:3], heads[:2], 600.0, hidden)
        mixed = chain.op(f"{b}.mix", ADD[:3], [mixed, heads[2]], 600.0, hidden)
        out = chain.op(f"{b}.out", MATMUL, [mixed, chain.parameter(f"{b}.wo", weight)], 900.0, hidden)
        stream = chain.op(f"{b}.add1", ADD, [stream, out], 30.0, hidden)
        normed = chain.op(f"{b}.norm2", NORM, [stream], 40.0, hidden)
        up = chain.op(f"{b}.up", MATMUL, [normed, chain.parameter(f"{b}.wup", 4 * weight)], 3600.0, wide)
        act = chain.op(f"{b}.act", POINTWISE, [up], 120.0, wide)
        scaled = chain.op(f"{b}.scale", LINEAR, [act], 60.0, wide)
        down = chain.op(f"{b}.down", MATMUL, [scaled, chain.parameter(f"{b}.wdown", 4 * weight)], 3600.0, hidden)
        stream = chain.op(f"{b}.add2", ADD, [stream, down], 30.0, hidden)
    chain.op("loss", NORM, [stream], 10.0, 4.0)
    return chain.problem(f"chain of {blocks} blocks", memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=17)
    parser.add_argument("--memory", type=float, default=0.6)
    parser.add_argument("--gap", type=float, default=0.0)
    parser.add_argument("--time-limit", type=float, default=120.0)
    arguments = parser.parse_args()
    problem = chain_problem(arguments.blocks, memory=arguments.memory)
    print(problem)
    reduction = timed("reduce", lambda: reduce_problem(problem))
    for stage, subject in (("as it is", problem), ("reduced", reduction.problem if reduction else problem)):
        print(f"{stage}: {subject}")
        model = timed("build", lambda subject=subject: build_model(subject)).linear
        print(f"{'':>30} {model}")
        for name, options in LP_METHODS.items():
            timed(name, lambda model=model, options=options: solve_lp(model, options=options).objective)
    solution = timed("solve", lambda: solve(problem, time_limit_s=arguments.time_limit, gap=arguments.gap))
    print(
        f"{solution.status.name} {solution.objective_us:.3f} us, gap {solution.gap:.2%}, integral LP: "
        f"{solution.integral_lp}, {solution.memory_price_us_per_byte:.3g} us/byte"
    )


def timed(label: str, work: Callable[[], T]) -> T:
    """Run, and print the processor time of this thread: the wall clock says little on a shared machine."""
    began = time.process_time()
    result = work()
    said = f"   {result:.3f} us" if isinstance(result, float) else ""
    print(f"{label:>30} {time.process_time() - began:8.2f} s{said}")
    return result


if __name__ == "__main__":
    main()

"""Reads a large problem from a JSON file, plain or gzip, as Google's contest on intra-operator parallelism writes it:

    {"problem": {"name": ...,
                 "nodes": {"intervals": [[first, last], ...], "costs": [[...], ...], "usages": [[...], ...]},
                 "edges": {"nodes": [[a, b], ...], "costs": [[...], ...]},
                 "usage_limit": ...}}

Without a usage_limit usage is free. An edge may be over more than two nodes, or one.

Usage is live from `first` up to but not including `last`. Whatever is wrong is one line of a UserError.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np

from autopar.errors import UserError
from autopar.solver.linear import Ints
from autopar.solver.pairwise.problem import FORBIDDEN, PairwiseProblem

GZIP = b"\x1f\x8b"
LARGEST = 2**62  # of a sum: what is added up stays a 64-bit number


class _Nodes(msgspec.Struct):
    intervals: list[list[int]]
    costs: list[list[int]]
    usages: list[list[int]]


class _Edges(msgspec.Struct):
    nodes: list[list[int]] = []
    costs: list[list[int]] = []


class _Problem(msgspec.Struct):
    nodes: _Nodes
    usage_limit: int | None = None
    edges: _Edges = msgspec.field(default_factory=_Edges)
    name: str = "problem"


class _File(msgspec.Struct):
    problem: _Problem


def read_problem(path: str | Path) -> PairwiseProblem:
    """The problem in a file.

    Raises:
        UserError: no such file, not JSON, or not such a problem.
    """
    try:
        data = Path(path).read_bytes()
        if data.startswith(GZIP):
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    try:
        return parse_problem(data)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def parse_problem(data: bytes) -> PairwiseProblem:
    """The problem in JSON text. Raises UserError."""
    try:
        problem = msgspec.json.decode(data, type=_File).problem
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"not a problem: {error}") from None
    nodes, edges = problem.nodes, problem.edges
    _check_counts(nodes, edges)
    sizes = np.fromiter(map(len, nodes.costs), np.int64, len(nodes.costs))
    arity = np.fromiter(map(len, edges.nodes), np.int64, len(edges.nodes))
    intervals = _whole("an interval", chain.from_iterable(nodes.intervals), 2 * len(sizes), LARGEST)
    limit = LARGEST if problem.usage_limit is None else min(problem.usage_limit, LARGEST)
    if limit < 0:
        raise UserError(f"usage_limit is negative: {limit}")
    result = PairwiseProblem(
        name=problem.name, limit=limit, start=_ends(sizes), intervals=intervals.reshape(-1, 2),
        cost=_whole("a node's cost", chain.from_iterable(nodes.costs), int(sizes.sum()), FORBIDDEN),
        usage=_whole("a usage", chain.from_iterable(nodes.usages), int(sizes.sum()), limit + 1),
        edge_start=_ends(arity),
        edge_nodes=_whole("an edge's node", chain.from_iterable(edges.nodes), int(arity.sum()), LARGEST),
        table_start=_ends(np.fromiter(map(len, edges.costs), np.int64, len(edges.costs))),
        tables=_whole("an edge's cost", chain.from_iterable(edges.costs), sum(map(len, edges.costs)), FORBIDDEN),
    )  # fmt: skip
    _check_edges(result)
    if (limit + 1) * len(sizes) >= LARGEST and sum(result.usage.tolist()) >= LARGEST:
        raise UserError("usages add up to more than 2^62")
    return result


def _check_counts(nodes: _Nodes, edges: _Edges) -> None:
    """One interval, and as many usages as costs, for each node; a table for each edge."""
    if not len(nodes.intervals) == len(nodes.costs) == len(nodes.usages):
        raise UserError(
            f"{len(nodes.intervals)} intervals, {len(nodes.costs)} costs and {len(nodes.usages)} usages of nodes:"
            " there must be one each"
        )
    if len(edges.nodes) != len(edges.costs):
        raise UserError(f"{len(edges.nodes)} edges but {len(edges.costs)} tables of edge costs")
    for n, (interval, costs, usages) in enumerate(zip(nodes.intervals, nodes.costs, nodes.usages, strict=True)):
        if len(interval) != 2 or not costs or len(costs) != len(usages):
            raise UserError(
                f"node {n}: an interval of {len(interval)} times, {len(costs)} costs and {len(usages)} usages:"
                " wanted 2 times, and as many usages as costs, at least one"
            )


def _check_edges(problem: PairwiseProblem) -> None:
    """Edges are over nodes that exist, their tables have an entry for each combination."""
    outside = np.flatnonzero(problem.edge_nodes >= problem.nodes)
    if len(outside):
        edge = int(np.searchsorted(problem.edge_start, outside[0], side="right")) - 1
        raise UserError(f"edge {edge}: no node {problem.edge_nodes[outside[0]]} among {problem.nodes}")
    sizes = np.diff(problem.start).tolist()
    nodes, starts, lengths = problem.edge_nodes.tolist(), problem.edge_start.tolist(), np.diff(problem.table_start)
    for edge, length in enumerate(lengths.tolist()):
        wanted = 1
        for n in nodes[starts[edge] : starts[edge + 1]]:
            wanted *= sizes[n]
        if starts[edge] == starts[edge + 1] or length != wanted:
            raise UserError(f"edge {edge}: {length} costs for {wanted} combinations of its nodes' strategies")


def _ends(lengths: Ints) -> Ints:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])


def _whole(what: str, values: Iterable[int], count: int, most: int) -> Ints:
    """As an array; more than `most` is as much as `most`."""
    listed = list(values)
    try:
        array = np.array(listed, dtype=np.int64)
    except OverflowError:
        array = np.array([min(v, most) if v > 0 else max(v, -1) for v in listed], dtype=np.int64)
    if count and array.min() < 0:
        raise UserError(f"{what} is negative: {array.min()}")
    return np.minimum(array, most)

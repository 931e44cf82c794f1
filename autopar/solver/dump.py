"""A `Problem` as JSON text, to store, to compare, or to give to another solver.

    {"version": 1, "name": ..., "nodes": [{"name", "cost_us", "cover_us", "group"}],
     "values": [{"name", "producer", "made", "consumers": [{"node", "wants"}], "reshard_us", "group"}],
     "moments": [{"name", "limit_bytes", "fixed_bytes", "nodes", "versions"}], "groups": ..., "fixed_us": ...}

JSON has no infinity: a conversion that does not exist is null in `reshard_us`.
"""

from __future__ import annotations

import math

import msgspec

from autopar.errors import UserError
from autopar.ir.problem import (
    INFINITY,
    Consumer,
    Moment,
    NodeBytes,
    Problem,
    ProblemNode,
    ProblemValue,
    VersionBytes,
    check_problem,
)

VERSION = 1


class _Node(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    cost_us: tuple[float, ...]
    cover_us: tuple[float, ...] = ()
    group: int | None = None


class _Consumer(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    node: int
    wants: tuple[int, ...]


class _Value(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    producer: int
    made: tuple[int, ...]
    consumers: tuple[_Consumer, ...]
    reshard_us: tuple[tuple[float | None, ...], ...]
    group: int | None = None


class _NodeBytes(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    node: int
    bytes: tuple[int, ...]


class _VersionBytes(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    value: int
    consumers: tuple[int, ...]
    bytes: tuple[int, ...]


class _Moment(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    limit_bytes: int
    fixed_bytes: int = 0
    nodes: tuple[_NodeBytes, ...] = ()
    versions: tuple[_VersionBytes, ...] = ()


class _Problem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    version: int
    name: str
    nodes: tuple[_Node, ...]
    values: tuple[_Value, ...]
    moments: tuple[_Moment, ...] = ()
    groups: int = 0
    fixed_us: float = 0.0


def dump_problem(problem: Problem) -> str:
    """JSON text that `load_problem` reads back to an equal problem; equal problems give equal text."""
    text = _Problem(
        version=VERSION,
        name=problem.name,
        nodes=tuple(
            _Node(name=n.name, cost_us=n.cost_us, cover_us=n.cover_us, group=n.group) for n in problem.nodes
        ),
        values=tuple(_dumped_value(v) for v in problem.values),
        moments=tuple(_dumped_moment(m) for m in problem.moments),
        groups=problem.groups,
        fixed_us=problem.fixed_us,
    )  # fmt: skip
    return msgspec.json.encode(text).decode()


def load_problem(text: str) -> Problem:
    """The problem that `dump_problem` wrote.

    Raises:
        UserError: not JSON, another version, a key that is unknown, missing or of a wrong type, or bad indices.
    """
    try:
        stored = msgspec.json.decode(text, type=_Problem)
    except msgspec.DecodeError as error:
        raise UserError(f"this is not a problem file of autopar: {error}") from error
    if stored.version != VERSION:
        raise UserError(
            f"problem file has version {stored.version}, this autopar reads version {VERSION}: write it again"
        )
    try:
        problem = Problem(
            name=stored.name,
            nodes=tuple(
                ProblemNode(name=n.name, cost_us=n.cost_us, cover_us=n.cover_us, group=n.group) for n in stored.nodes
            ),
            values=tuple(_loaded_value(v) for v in stored.values),
            moments=tuple(_loaded_moment(m) for m in stored.moments),
            groups=stored.groups,
            fixed_us=stored.fixed_us,
        )
        check_problem(problem)
    except (ValueError, IndexError) as error:
        raise UserError(f"problem file {stored.name}: {error}") from error
    return problem


def _dumped_value(value: ProblemValue) -> _Value:
    return _Value(
        name=value.name,
        producer=value.producer,
        made=value.made,
        consumers=tuple(_Consumer(node=c.node, wants=c.wants) for c in value.consumers),
        reshard_us=tuple(tuple(None if math.isinf(r) else r for r in row) for row in value.reshard_us),
        group=value.group,
    )


def _loaded_value(value: _Value) -> ProblemValue:
    return ProblemValue(
        name=value.name,
        producer=value.producer,
        made=value.made,
        consumers=tuple(Consumer(node=c.node, wants=c.wants) for c in value.consumers),
        reshard_us=tuple(tuple(INFINITY if r is None else r for r in row) for row in value.reshard_us),
        group=value.group,
    )


def _dumped_moment(moment: Moment) -> _Moment:
    return _Moment(
        name=moment.name,
        limit_bytes=moment.limit_bytes,
        fixed_bytes=moment.fixed_bytes,
        nodes=tuple(_NodeBytes(node=h.node, bytes=h.bytes) for h in moment.nodes),
        versions=tuple(_VersionBytes(value=v.value, consumers=v.consumers, bytes=v.bytes) for v in moment.versions),
    )


def _loaded_moment(moment: _Moment) -> Moment:
    return Moment(
        name=moment.name,
        limit_bytes=moment.limit_bytes,
        fixed_bytes=moment.fixed_bytes,
        nodes=tuple(NodeBytes(node=h.node, bytes=h.bytes) for h in moment.nodes),
        versions=tuple(VersionBytes(value=v.value, consumers=v.consumers, bytes=v.bytes) for v in moment.versions),
    )

"""What an op's entry in the table says, and small helpers that entries are written with.

An entry is needed only where DTensor has no rule or a wrong one, where the local form of the op differs from the op
itself, or where its cost isn't "reads its inputs, writes its outputs".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from autopar.errors import CompilerError
from autopar.ir.cuts import LengthOf, Own, is_even
from autopar.ir.graph import Node, Ref, TensorMeta
from autopar.ir.layout import Kind, Placement, R, S, unit_of
from autopar.ir.mesh import Mesh
from autopar.ir.reshard import Collective
from autopar.ir.strategy import Rule, Strategy

Metas = tuple[TensorMeta, ...]
OutMetas = tuple[TensorMeta | None, ...]


class Pieces(Enum):
    """Which pieces of a dim that doesn't divide an op's rules hold for: any, those of which none is empty, none."""

    ANY = 0
    FILLED = 1
    EQUAL = 2


@dataclass(frozen=True, slots=True)
class LocalCall:
    """What a rank runs for one node: `function(*args, **kwargs)` on local tensors.

    `function` is "aten.mm.default" (torch.ops.aten.mm.default) or "local_ops.NAME" (autopar.runtime.local_ops), whose
    first argument, not in `args`, is the rank's context `rt`. Arguments are nested tuples of literals, `Ref`s and
    `TorchConst`s; the results are the node's outputs, in order, whole tuple or single tensor as the aten op gives.
    """

    function: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class LocalContext:
    """All that a lowering may look at.

    `inputs` and `outputs` are local metas (of the largest piece), `inputs` in the order of `node.refs`; `wholes` are
    the global metas of the inputs, for lengths that depend on the rank.
    """

    node: Node
    strategy: Strategy
    mesh: Mesh
    inputs: Metas
    outputs: OutMetas
    wholes: Metas = ()

    def out_axes(self, dim: int, output: int = 0) -> tuple[str, ...]:
        """Axes that cut a dim of an output, slowest first."""
        layout = self.strategy.outputs[output]
        return () if layout is None else layout.axes_of(dim)

    def in_axes(self, dim: int, argument: int = 0) -> tuple[str, ...]:
        """Axes that cut a dim of a tensor argument, slowest first."""
        return self.strategy.inputs[argument].axes_of(dim)

    def tagged(self, tag: str) -> tuple[str, ...]:
        """Axes on which the rule with this tag is used, slowest first."""
        return tuple(a for a, t in zip(self.mesh.names, self.strategy.tags, strict=True) if t == tag)

    @property
    def shape(self) -> tuple[int | Own | LengthOf, ...]:
        """Local shape of the first output; an `Own` where pieces aren't equal, a `LengthOf` where nobody knows."""
        return tuple(self.out_length(d) for d in range(len(out_shape(self.node))))

    def out_length(self, dim: int, output: int = 0) -> int | Own | LengthOf:
        """Local length of a dim of an output."""
        value, local = self.node.outputs[output], self.outputs[output]
        assert value is not None and local is not None
        if dim in value.meta.unordered and self.out_axes(dim, output):
            return self._as_input(value.meta.shape[dim])
        return self._own(value.meta, dim, self.out_axes(dim, output)) or local.shape[dim]

    def _as_input(self, length: int) -> LengthOf:
        """As long as a tensor argument that has as many unordered rows."""
        for name, whole in zip(self.node.refs, self.wholes, strict=False):
            for dim in whole.unordered:
                if whole.shape[dim] == length:
                    return LengthOf(name, dim)
        raise CompilerError(f"{self.node.key}: no argument says how many rows its result has")

    def in_length(self, dim: int, argument: int = 0) -> int | Own:
        """Local length of a dim of a tensor argument."""
        return self.in_cut(dim, argument) or self.inputs[argument].shape[dim]

    def out_cut(self, dim: int, output: int = 0) -> Own | None:
        """The length of this rank's piece of a dim of an output, where pieces aren't equal; else None."""
        value = self.node.outputs[output]
        return None if value is None else self._own(value.meta, dim, self.out_axes(dim, output))

    def in_cut(self, dim: int, argument: int = 0) -> Own | None:
        """The length of this rank's piece of a dim of a tensor argument, where pieces aren't equal; else None."""
        return self._own(self.wholes[argument], dim, self.in_axes(dim, argument)) if self.wholes else None

    def _own(self, meta: TensorMeta, dim: int, axes: tuple[str, ...]) -> Own | None:
        left, unit = meta.shape[dim], unit_of(meta.units, dim)
        for axis in axes:
            parts = self.mesh.axis(axis).size
            if not is_even(left, parts, unit):
                return Own(meta.shape[dim], axes, unit)
            left //= parts
        return None

    def same(self, function: str | None = None) -> LocalCall:
        """The op itself on the pieces."""
        return LocalCall(function or self.node.op, self.node.args, self.node.kwargs)

    def with_args(self, changes: Mapping[int | str, Any], function: str | None = None) -> LocalCall:
        """The op itself with some arguments (by position, or by name if given as keyword) replaced."""
        args, kwargs = list(self.node.args), dict(self.node.kwargs)
        for where, value in changes.items():
            if isinstance(where, str):
                kwargs[where] = value
            elif where < len(args):
                args[where] = value
        return LocalCall(function or self.node.op, tuple(args), tuple(kwargs.items()))


Rules = Callable[[Node, Metas], Iterable[Rule]]
Lower = Callable[[LocalContext], LocalCall]
Flops = Callable[[Node, Metas, OutMetas], float]
Inner = tuple[Collective, str, int]
InnerCost = Callable[[LocalContext], Iterable[Inner]]
Rounds = Callable[[LocalContext], tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpEntry:
    """One op.

    Attributes:
        rules: one-axis rules besides all-R, or None to ask DTensor.
        local: the local form, or None for the op itself on the pieces.
        flops: on local metas, or None for one per output element.
        view: moves no bytes.
        random: draws random numbers.
        inner: collectives inside the local form, or None for none.
        rounds: where the local form runs the op on its pieces several times: as many as that, in each round, takes.
            The k-th collective of `inner` is then on its way during the k-th round.
        pieces: what a dim that doesn't divide may be cut into.
    """

    rules: Rules | None = None
    local: Lower | None = None
    flops: Flops | None = None
    view: bool = False
    random: bool = False
    inner: InnerCost | None = None
    rounds: Rounds | None = None
    pieces: Pieces = Pieces.ANY


def arg(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument by position or keyword."""
    if position < len(node.args):
        return node.args[position]
    return dict(node.kwargs).get(name, default)


def first_of(cut: Own | None) -> tuple[Own, ...]:
    """The last argument of a local form that counts from the whole's start: (the piece's first index), or nothing where
    pieces are equal."""
    return () if cut is None else (replace(cut, part="start"),)


def dim_of(dim: int, ndim: int) -> int:
    """A dim counted from 0."""
    return dim + ndim if dim < 0 else dim


def dims_of(dims: Any, ndim: int) -> tuple[int, ...]:
    """Reduced dims counted from 0; None and () mean all."""
    if dims is None or dims == ():
        return tuple(range(ndim))
    if isinstance(dims, int):
        return (dim_of(dims, ndim),)
    return tuple(dim_of(d, ndim) for d in dims)


def rule(inputs: Iterable[Placement], *outputs: Placement | None, tag: str = "") -> Rule:
    """`rule((S(0), R), S(0))`: inputs first, as one reads it."""
    return Rule(outputs, tuple(inputs), tag)


def out_shape(node: Node, output: int = 0) -> tuple[int, ...]:
    """Global shape of an output that isn't None."""
    value = node.outputs[output]
    assert value is not None
    return value.meta.shape


def mask_outputs(node: Node, outputs: Iterable[Placement]) -> tuple[Placement | None, ...]:
    """None where the node's output is None (a backward op's output mask)."""
    return tuple(None if o is None else p for o, p in zip(node.outputs, outputs, strict=True))


def each_out(node: Node, placement: Placement) -> tuple[Placement | None, ...]:
    """The same placement for every output."""
    return tuple(None if o is None else placement for o in node.outputs)


def all_replicated(node: Node, metas: Metas) -> Rule:
    """The rule that every op has."""
    return Rule(each_out(node, R), (R,) * len(metas))


def broadcast_cut(shape: tuple[int, ...], out: tuple[int, ...], dim: int) -> Placement:
    """How an argument that is broadcast to `out` is cut when `out` is cut along `dim`."""
    own = dim - (len(out) - len(shape))
    return S(own) if own >= 0 and shape[own] == out[dim] and out[dim] != 1 else R


def is_cut(placement: Placement | None) -> bool:
    """True if sharded."""
    return placement is not None and placement.kind is Kind.SHARD


def ref_positions(node: Node) -> dict[str, int]:
    """Index into `node.refs` of each tensor argument that is a plain Ref, by its position ("0") or keyword name.

    Refs inside lists take up their places but have no name.
    """
    found: dict[str, int] = {}
    count = 0
    for where, value in [*((str(i), a) for i, a in enumerate(node.args)), *node.kwargs]:
        if isinstance(value, Ref):
            found[where] = count
        count += _refs_in(value)
    return found


def _refs_in(tree: Any) -> int:
    if isinstance(tree, Ref):
        return 1
    return sum(map(_refs_in, tree)) if isinstance(tree, (tuple, list)) else 0

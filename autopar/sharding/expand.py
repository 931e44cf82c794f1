"""Products of one-axis rules over the axes of a mesh, without what can't be cut.

A dim that an axis divides is cut in equal pieces. One that it doesn't is cut in unequal ones where the op takes
such pieces, where all dims that the rule cuts are cut in the same proportions, where there is a row for each rank,
and where no other axis cuts the dim (docs/decisions/0003-uneven-cuts.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from autopar.ir.cuts import chunk, piece
from autopar.ir.graph import TensorMeta
from autopar.ir.layout import Kind, Layout, Placement, R, divides, unit_of
from autopar.ir.mesh import Mesh
from autopar.ir.strategy import Rule, Strategy
from autopar.ops.attention import RING
from autopar.ops.entry import Pieces
from autopar.ops.experts import EXCHANGE

Metas = tuple[TensorMeta, ...]
OutMetas = tuple[TensorMeta | None, ...]


class Expander:
    """Of one mesh. Layouts are shared objects; equal questions get the same answer object."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.layouts: dict[tuple[Placement, ...], Layout] = {}
        self.answers: dict[Any, tuple[Strategy, ...]] = {}

    def layout(self, placements: tuple[Placement, ...]) -> Layout:
        """The layout with these placements, in mesh order."""
        found = self.layouts.get(placements)
        if found is None:
            found = self.layouts[placements] = Layout(self.mesh.names, placements)
        return found

    def fitting(
        self, axis: int, rules: Sequence[Rule], inputs: Metas, outputs: OutMetas, pieces: Pieces
    ) -> tuple[Rule, ...]:
        """Rules by which one axis can cut. `pieces`: those that the op takes."""
        size = self.mesh.axes[axis].size
        return tuple(r for r in rules if cuts_well(r, inputs, outputs, size, pieces))

    def holds(self, layout: Layout, meta: TensorMeta, edge: bool) -> bool:
        """True if a tensor that no op of ours makes may be laid out so. `edge`: in torch's own cut, without units."""
        if not self._nested_fits(layout.placements, meta):
            return False
        for axis, placement in zip(self.mesh.axes, layout.placements, strict=True):
            if placement.kind is Kind.SHARD:
                n, unit = meta.shape[placement.dim], unit_of(meta.units, placement.dim)
                if not worth_cutting(meta, placement.dim, axis.size):
                    return False
                if edge and chunk(n, axis.size, unit) != chunk(n, axis.size):
                    return False
        return True

    def expand(self, per_axis: tuple[tuple[Rule, ...], ...], inputs: Metas, outputs: OutMetas) -> tuple[Strategy, ...]:
        """One strategy per combination of a rule on each axis that divides; none twice."""
        key = (per_axis, inputs, outputs)
        found = self.answers.get(key)
        if found is None:
            combinations = itertools.product(*per_axis)
            made = (self._strategy(rules, inputs, outputs) for rules in combinations)
            found = self.answers[key] = tuple(dict.fromkeys(s for s in made if s is not None))
        return found

    def _strategy(self, rules: tuple[Rule, ...], inputs: Metas, outputs: OutMetas) -> Strategy | None:
        if any(sum(r.tag == tag for r in rules) > 1 for tag in (EXCHANGE, RING)):
            return None  # rows go to the ranks of one axis, blocks round one
        if not rules:
            whole = self.layout(())
            return Strategy(tuple(None if m is None else whole for m in outputs), (whole,) * len(inputs))
        ins = tuple(zip(*(r.inputs for r in rules), strict=True))
        outs = tuple(zip(*(r.outputs for r in rules), strict=True))
        if len(rules) > 1:
            if not all(map(self._nested_fits, ins, inputs)):
                return None
            if not all(m is None or self._nested_fits(o, m) for o, m in zip(outs, outputs, strict=True)):
                return None
        return Strategy(
            tuple(None if m is None else self.layout(o) for o, m in zip(outs, outputs, strict=True)),
            tuple(map(self.layout, ins)),
            tuple(r.tag for r in rules),
        )

    def _nested_fits(self, placements: tuple[Any, ...], meta: TensorMeta) -> bool:
        """Axis by axis each cut is good already; a dim that several axes cut must divide."""
        cut = [p.dim for p in placements if p.kind is Kind.SHARD]
        return len(set(cut)) == len(cut) or divides(self._of(placements, cut), meta.shape, self.mesh, meta.units)

    def _of(self, placements: tuple[Placement, ...], cut: list[int]) -> Layout:
        """The layout with only those cuts that several axes share."""
        return self.layout(tuple(p if cut.count(p.dim) > 1 else R for p in placements))


def worth_cutting(meta: TensorMeta, dim: int, size: int) -> bool:
    """True if a dim has a row for each rank."""
    return meta.shape[dim] >= size


def cuts_well(rule: Rule, inputs: Metas, outputs: OutMetas, size: int, pieces: Pieces) -> bool:
    """True if an axis of this size can cut by a rule: equally, or all dims in the same proportions."""
    proportion: tuple[int, int] | None = None
    for placement, meta in (*zip(rule.inputs, inputs, strict=True), *zip(rule.outputs, outputs, strict=True)):
        if placement is None or meta is None or placement.dim < 0:
            continue
        n = meta.shape[placement.dim]
        largest = chunk(n, size, unit_of(meta.units, placement.dim))
        if largest * size != n:
            empty = largest * (size - 1) >= n
            if pieces is Pieces.EQUAL or (empty and pieces is Pieces.FILLED):
                return False
            if not worth_cutting(meta, placement.dim, size):
                return False
        if proportion is not None and largest * proportion[1] != proportion[0] * n:
            return False
        proportion = largest, n
    return True


def cuts_alike(rule: Rule, inputs: Metas, outputs: OutMetas, sizes: Sequence[int], pieces: Pieces) -> bool:
    """As `cuts_well`, of an axis that is several in turn (ranks, and their micro-batches), piece by piece."""
    shares: list[tuple[Fraction, Fraction]] | None = None
    for placement, meta in (*zip(rule.inputs, inputs, strict=True), *zip(rule.outputs, outputs, strict=True)):
        if placement is None or meta is None or placement.dim < 0:
            continue
        n, unit = meta.shape[placement.dim], unit_of(meta.units, placement.dim)
        places = itertools.product(*map(range, sizes))
        found = [piece(n, zip(sizes, at, strict=True), unit) for at in places]
        lengths = {p.length for p in found}
        if len(lengths) > 1 and (pieces is Pieces.EQUAL or (0 in lengths and pieces is Pieces.FILLED)):
            return False
        mine = [(Fraction(p.start, n), Fraction(p.length, n)) for p in found]
        if n == 0 or (shares is not None and mine != shares):
            return False
        shares = mine
    return True

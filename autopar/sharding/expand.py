"""Products of one-axis rules over the axes of a mesh, without what doesn't divide."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from autopar.ir.graph import TensorMeta
from autopar.ir.layout import Kind, Layout, Placement
from autopar.ir.mesh import Mesh
from autopar.ir.strategy import Rule, Strategy

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

    def fitting(self, axis: int, rules: Sequence[Rule], inputs: Metas, outputs: OutMetas) -> tuple[Rule, ...]:
        """Rules whose cut dims are multiples of one axis's size."""
        size = self.mesh.axes[axis].size
        return tuple(r for r in rules if _divides(r, inputs, outputs, size))

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
        """Axis by axis each cut divides already; here only dims that several axes cut are looked at."""
        parts: dict[int, int] = {}
        for axis, placement in zip(self.mesh.axes, placements, strict=True):
            if placement.kind is Kind.SHARD:
                parts[placement.dim] = parts.get(placement.dim, 1) * axis.size
        return all(meta.shape[dim] % n == 0 for dim, n in parts.items())


def _divides(rule: Rule, inputs: Metas, outputs: OutMetas, size: int) -> bool:
    for placement, meta in zip(rule.inputs, inputs, strict=True):
        if placement.dim >= 0 and meta.shape[placement.dim] % size:
            return False
    for out, value in zip(rule.outputs, outputs, strict=True):
        if out is not None and value is not None and out.dim >= 0 and value.shape[out.dim] % size:
            return False
    return True

"""In which layouts each parameter may be stored.

dp, cp, ep: whole, or cut along the first dim that divides and that no other axis cuts (which dim makes no difference to
the cost); where none divides, along the longest, in unequal pieces. tp: two or more dims: cut along a dim that its
readers take cut; one dim: whole or cut. Parameters that are the same input of the same block, instance by instance,
have the same choices.

A dim shorter than the axis leaves ranks with empty pieces: only where cutting is asked for (`zero` = 3, or a pin).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.errors import UserError
from autopar.ir.graph import CapturedGraph, InputKind, ParameterInfo, Ref, TensorMeta
from autopar.ir.layout import Kind, Layout, Placement, R, S
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.options import TOKEN_AXES
from autopar.ir.strategy import Note
from autopar.sharding.expand import worth_cutting
from autopar.sharding.weights import RulesOf, Weights, accepted_dims, agree, cuts


@dataclass(frozen=True, slots=True)
class Uses:
    """`of`: parameter name -> where it is an input: (graph name, value name).

    `group`: parameter -> first of its group.
    """

    of: Mapping[str, tuple[tuple[str, str], ...]]
    group: Mapping[str, str]


def find_uses(captured: CapturedGraph) -> Uses:
    """Direct uses in the top graph and, through calls, in blocks."""
    names = {i.value.name: i.target for i in captured.top.inputs if i.kind is InputKind.PARAMETER}
    of: dict[str, dict[tuple[str, str], None]] = {p.name: {} for p in captured.parameters}
    for value, name in names.items():
        of.setdefault(name, {})[(captured.top.name, value)] = None
    for node in captured.top.nodes:
        if node.block is None:
            continue
        graph = captured.block(node.block.key).graph
        for argument, given in zip(node.args, graph.inputs, strict=False):
            if given.kind is InputKind.PARAMETER and isinstance(argument, Ref) and argument.name in names:
                of[names[argument.name]][(graph.name, given.value.name)] = None
    first: dict[tuple[str, str], str] = {}
    group: dict[str, str] = {}
    for name, places in of.items():
        inside = [p for p in places if p[0] != captured.top.name]
        known = next((group[first[p]] for p in inside if p in first), name)
        group[name] = known
        for place in inside:
            first.setdefault(place, name)
    return Uses({name: tuple(places) for name, places in of.items()}, group)


@dataclass(frozen=True, slots=True)
class Storage:
    """`layouts`: parameter -> choices. `used`: (graph name, parameter's value name) -> axis -> placements in use."""

    layouts: dict[str, tuple[Layout, ...]]
    used: dict[tuple[str, str], dict[str, frozenset[Placement]]]
    notes: tuple[Note, ...]


def choose_storage(
    captured: CapturedGraph,
    mesh: Mesh,
    uses: Uses,
    weights: Mapping[str, Weights],
    rules_of: RulesOf,
    pins: Mapping[str, Mapping[str, Placement]],
    zero: int | str | None,
) -> Storage:
    """See the module. Raises UserError where `zero` is neither 0 nor 3, or pins of one group differ."""
    if zero not in (None, 0, 3):
        raise UserError(f"pin 'zero': {zero!r}; wanted 0 (parameters whole on dp) or 3 (cut on dp)")
    pinned = _pins_of_groups(uses, pins)
    found = Storage({}, {}, ())
    notes: list[Note] = []
    members: dict[str, list[ParameterInfo]] = {}
    for parameter in captured.parameters:
        members.setdefault(uses.group[parameter.name], []).append(parameter)
    for leader, parameters in members.items():
        places = tuple(dict.fromkeys(p for m in parameters for p in uses.of[m.name]))
        meta = parameters[0].meta
        per_axis = {
            axis.name: _on_axis(axis, meta, places, weights, rules_of, pinned.get(leader, {})) for axis in mesh.axes
        }
        layouts = tuple(dict.fromkeys(_layouts(meta, mesh, per_axis, zero, pinned.get(leader, {}))))
        for place in places:
            found.used[place] = {a: frozenset(p) for a, p in per_axis.items()}
        found.layouts.update({p.name: layouts for p in parameters})
        notes += _notes(parameters, meta, mesh, per_axis, layouts, zero, pinned.get(leader, {}))
    return Storage(found.layouts, found.used, tuple(notes))


def _pins_of_groups(uses: Uses, pins: Mapping[str, Mapping[str, Placement]]) -> dict[str, dict[str, Placement]]:
    """A pin on one instance of a block holds for all of them: they run the same code."""
    found: dict[str, dict[str, Placement]] = {}
    for name, wanted in pins.items():
        mine = found.setdefault(uses.group[name], {})
        for axis, placement in wanted.items():
            if mine.setdefault(axis, placement) != placement:
                raise UserError(
                    f"pins: {name} is pinned to {axis}:{placement}, and another instance of the same block to "
                    f"{axis}:{mine[axis]}; pin all instances alike or search with fold_blocks=False"
                )
    return found


def _on_axis(
    axis: Axis,
    meta: TensorMeta,
    places: tuple[tuple[str, str], ...],
    weights: Mapping[str, Weights],
    rules_of: RulesOf,
    pinned: Mapping[str, Placement],
) -> tuple[Placement, ...]:
    """Placements in which the parameter is used on one axis (tp: also stored)."""
    if axis.size == 1:
        return (R,)
    if axis.name in TOKEN_AXES:
        return (R,)
    if axis.name in pinned:
        return (pinned[axis.name],)
    if axis.name != "tp":
        return (R, *(S(d) for d in range(len(meta.shape)) if worth_cutting(meta, d, axis.size)))

    def fits(of: TensorMeta, dim: int) -> bool:
        return worth_cutting(of, dim, axis.size)

    answers = (accepted_dims(value, weights[graph], rules_of, fits) for graph, value in places)
    dims = agree(a for a in answers if a is not None) or frozenset()
    cut = tuple(sorted(cuts(dims), key=lambda p: p.dim))
    even = any(meta.shape[p.dim] % axis.size == 0 for p in cut)
    return cut if even and len(meta.shape) > 1 else (R, *cut)


def _layouts(
    meta: TensorMeta,
    mesh: Mesh,
    per_axis: Mapping[str, tuple[Placement, ...]],
    zero: int | str | None,
    pinned: Mapping[str, Placement],
) -> Iterator[Layout]:
    batch = [a for a in mesh.axes if a.name in TOKEN_AXES and a.name not in pinned and a.size > 1]
    held = [a for a in mesh.axes if a not in batch]
    for combination in itertools.product(*(_held(a, per_axis, pinned) for a in held)):
        fixed = {a.name: p for a, p in zip(held, combination, strict=True)}
        cut = [p.dim for p in fixed.values() if p.kind is Kind.SHARD]
        if len(set(cut)) < len(cut):
            continue
        for cutting in itertools.product((False, True), repeat=len(batch)):
            axes = [a for a, yes in zip(batch, cutting, strict=True) if yes]
            chosen = _cut_batch_axes(meta, axes, set(cut), empty=zero == 3)
            if chosen is None or not _zero_allows(zero, meta, mesh, batch, cutting, set(cut)):
                continue
            both = {**fixed, **chosen}
            yield Layout(mesh.names, tuple(both.get(a, R) for a in mesh.names))


def _held(
    axis: Axis, per_axis: Mapping[str, tuple[Placement, ...]], pinned: Mapping[str, Placement]
) -> tuple[Placement, ...]:
    if axis.name in TOKEN_AXES:
        return (pinned.get(axis.name, R),)
    return per_axis[axis.name]


def _cut_batch_axes(meta: TensorMeta, axes: list[Axis], taken: set[int], *, empty: bool) -> dict[str, Placement] | None:
    """Each axis cuts the first dim that is free and divides, or else the longest; None if there is none left.

    `ep` cuts experts, where there are any. `empty`: pieces may be.
    """
    found: dict[str, Placement] = {}
    taken = set(taken)
    for axis in sorted(axes, key=lambda a: a.name != "ep"):
        if axis.name == "ep" and meta.experts >= 0 and meta.experts not in taken:
            taken.add(meta.experts)
            found[axis.name] = S(meta.experts)
            continue
        free = [d for d in range(len(meta.shape)) if d not in taken and meta.shape[d] > 1]
        even = [d for d in free if meta.shape[d] % axis.size == 0]
        dim = even[0] if even else max(free, key=lambda d: meta.shape[d], default=None)
        if dim is None or not (empty or worth_cutting(meta, dim, axis.size)):
            return None
        taken.add(dim)
        found[axis.name] = S(dim)
    return found


def _zero_allows(
    zero: int | str | None, meta: TensorMeta, mesh: Mesh, batch: list[Axis], cutting: tuple[bool, ...], taken: set[int]
) -> bool:
    """0: nothing cut on batch axes. 3: cut on dp wherever that can be."""
    if zero == 0:
        return not any(cutting)
    if zero == 3:
        wanted = [a for a in batch if a.name == "dp" and _cut_batch_axes(meta, [a], taken, empty=True) is not None]
        return all(yes for a, yes in zip(batch, cutting, strict=True) if a in wanted)
    return True


def _notes(
    parameters: list[ParameterInfo],
    meta: TensorMeta,
    mesh: Mesh,
    per_axis: Mapping[str, tuple[Placement, ...]],
    layouts: tuple[Layout, ...],
    zero: int | str | None,
    pinned: Mapping[str, Placement],
) -> Iterator[Note]:
    more = f" (and {len(parameters) - 1} like it)" if len(parameters) > 1 else ""
    where = parameters[0].name + more
    for axis in mesh.axes:
        if axis.size == 1 or axis.name in pinned:
            continue
        if axis.name == "tp" and len(meta.shape) > 1 and per_axis["tp"] == (R,):
            yield Note("whole", where, f"{meta} is stored whole on tp={axis.size}: no reader takes it cut")
        if axis.name == "dp" and zero == 3 and all(layout.on("dp") == R for layout in layouts):
            yield Note("whole", where, f"{meta} is stored whole on dp={axis.size}: it has no dim to cut")

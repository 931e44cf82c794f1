"""One function being lowered: which versions of which values exist, and the steps so far."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from autopar.errors import CompilerError
from autopar.ir.cuts import Own, chunk, is_even
from autopar.ir.graph import Graph, TensorMeta
from autopar.ir.layout import Layout, fits, local_shape, unit_of
from autopar.ir.mesh import Mesh
from autopar.ir.program import CallBlock, Collective, Compute, Convert, Free, Keep, Local, Place, Step
from autopar.ir.reshard import Collective as Kind
from autopar.ir.reshard import ReshardStep, keeps_order, plan_reshard

RESERVED = frozenset(
    {
        *("rt", "i", "k", "aten", "torch", "prims", "autopar", "local_ops", "parameters", "buffers", "constants"),
        *("inputs", "saved", "tangents", "gradient", "gradients", "weights", "forward", "backward", "_"),
    }
)  # fmt: skip
"""Names that the emitted functions use themselves."""


@dataclass
class Names:
    """Python names of the versions of one graph's values: the same in its forward and its backward."""

    mesh: Mesh
    metas: dict[str, TensorMeta]
    _taken: set[str] = field(default_factory=set)
    _made: dict[str, Layout] = field(default_factory=dict)
    _locals: dict[tuple[str, Layout], Local] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph, mesh: Mesh) -> Names:
        """Fresh names for a graph."""
        metas = {name: value.meta for name, value in graph.values().items()}
        return cls(mesh=mesh, metas=metas, _taken=set(metas) | RESERVED)

    def made(self, value: str, layout: Layout) -> Local:
        """The version that the producer makes: it has the value's own name."""
        self._made[value] = layout
        name = value
        if value in RESERVED or keyword.iskeyword(value) or not value.isidentifier():
            name = self._free("".join(c if c.isalnum() else "_" for c in f"v_{value}"))
        return self._add(name, value, layout)

    def version(self, value: str, layout: Layout) -> Local:
        """A version converted from the made one, named by the axes that changed: `x_dpS0`."""
        found = self._locals.get((value, layout))
        if found is not None:
            return found
        made = self._made[value]
        pairs = zip(made.axes, made.placements, layout.placements, strict=True)
        tail = "_".join(f"{axis}{str(new).translate(_PLAIN)}" for axis, old, new in pairs if old != new)
        return self._add(self._free(f"{value}_{tail}"), value, layout)

    def local_meta(self, value: str, layout: Layout) -> TensorMeta:
        """Shape of the largest piece; CompilerError if the layout cuts a dim that the value lacks."""
        meta = self.metas[value]
        if not fits(layout, meta.shape):
            raise CompilerError(f"{value}: {meta} cannot be cut as {layout} on mesh {self.mesh}")
        return TensorMeta(local_shape(meta.shape, layout, self.mesh, meta.units), meta.dtype)

    def _add(self, name: str, value: str, layout: Layout) -> Local:
        found = self._locals[(value, layout)] = Local(name, value, layout, self.local_meta(value, layout))
        return found

    def _free(self, name: str) -> str:
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name


_PLAIN = str.maketrans("", "", "()")


@dataclass
class Scope:
    """The versions at hand in one function, and its steps. `earlier` is the forward's scope in a backward's, and the
    first half's in that of a second half.

    `later`: what a backward finds of the forward, by value: the version that is kept, or None of what is made again; of
    a value that isn't named, whatever is asked for is kept. `again` runs a value's op in this scope.
    """

    names: Names
    earlier: Scope | None = None
    later: Mapping[str, Layout | None] = field(default_factory=dict)
    again: Callable[[str], None] | None = None
    steps: list[Step] = field(default_factory=list)
    made: dict[str, Local] = field(default_factory=dict)
    versions: dict[tuple[str, Layout], Local] = field(default_factory=dict)
    saved: dict[str, Local] = field(default_factory=dict)

    def make(self, value: str, layout: Layout) -> Local:
        """A value comes to be here, in this layout."""
        local = self.names.made(value, layout)
        self.made[value] = local
        self.versions[(value, layout)] = local
        return local

    def fetch(self, value: str, layout: Layout, place: Place) -> Local:
        """The version in `layout`: at hand, saved by the forward, or converted now from the made layout."""
        found = self.versions.get((value, layout))
        if found is not None:
            return found
        if self.earlier is not None and value in self.later and value not in self.made:
            self._find(value, self.later[value])
            if (value, layout) in self.versions:
                return self.versions[(value, layout)]
        elif self.earlier is not None and (value not in self.made or self._from_earlier(value)):
            found = self._saved(value, layout)
            if found.layout == layout:
                return found
        made = self.made.get(value)
        if made is None:
            raise CompilerError(f"{value} is read before it is made (by {place.key})")
        after = self.names.version(value, layout)
        self.steps.append(conversion(made, after, self.names, place))
        self.versions[(value, layout)] = after
        return after

    def _find(self, value: str, kept: Layout | None) -> None:
        """Have here what waits for the backward, or what is made again."""
        assert self.earlier is not None
        made_again = self.earlier.earlier is not None and value in self.earlier.made
        if kept is None and not made_again:
            if self.again is None:
                raise CompilerError(f"{value} is to be made again, where nothing can be")
            self.again(value)
            return
        found = self.made[value] = self.earlier.waiting(value, kept or self.earlier.made[value].layout)
        self.saved[found.name] = found
        self.versions[(value, found.layout)] = found

    def _from_earlier(self, value: str) -> bool:
        """True if the forward made the value, and it isn't at hand here anyway as parameters are."""
        assert self.earlier is not None
        return value not in self.later and self.made[value].name in self.saved

    def _saved(self, value: str, layout: Layout) -> Local:
        """Ask the forward for `layout` if it has it, else for the made version."""
        assert self.earlier is not None
        found = self.earlier.waiting(value, layout)
        if found.layout != layout:
            self.made[value] = found
        self.saved[found.name] = found
        self.versions[(value, found.layout)] = found
        return found

    def waiting(self, value: str, layout: Layout) -> Local:
        """What a function after this one finds of a value: `layout` where that is here, else as it was made or kept."""
        found = self.versions.get((value, layout)) or self.made.get(value)
        if found is not None:
            return found
        if self.earlier is None:
            raise CompilerError(f"{value} is read before it is made")
        return self._saved(value, self.later.get(value) or layout)


def conversion(before: Local, after: Local, names: Names, place: Place) -> Convert:
    """The steps from one version to another. All go by the name of the last."""
    path = plan_reshard(before.layout, after.layout)
    if path is None or not keeps_order(before.layout, after.layout, names.metas[before.value].unordered):
        raise CompilerError(f"{before.value}: nothing turns {before.layout} into {after.layout} (for {place.key})")
    steps, at = [], before.name
    for step in path:
        meta = names.local_meta(before.value, step.after)
        sizes = step_sizes(step, names.metas[before.value], names.mesh)
        steps.append(Collective(step=step, before=at, after=replace(after, layout=step.after, meta=meta), sizes=sizes))
        at = after.name
    return Convert(before=before, after=after, steps=tuple(steps), place=place)


def step_sizes(step: ReshardStep, meta: TensorMeta, mesh: Mesh) -> tuple[tuple[str, int | Own], ...]:
    """What unequal pieces don't say themselves (`Collective.sizes`); nothing where they are equal."""
    found: list[tuple[str, int | Own]] = []
    if step.dim >= 0:
        length, unit = _before_cut(step, step.dim, step.before if step.collective in _JOINS else step.after, meta, mesh)
        if unit and step.collective in _JOINS:
            found.append(("length", length))
        if unit > 1:
            found.append(("unit", unit))
    if step.to_dim >= 0:
        _, unit = _before_cut(step, step.to_dim, step.after, meta, mesh)
        if unit > 1:
            found.append(("cut_unit", unit))
    return tuple(found)


_JOINS = (Kind.ALL_GATHER, Kind.ALL_TO_ALL)


def _before_cut(step: ReshardStep, dim: int, cut: Layout, meta: TensorMeta, mesh: Mesh) -> tuple[int | Own, int]:
    """(rows of a dim that the step's axis cuts in `cut`; their unit, or 0 where the pieces are equal)."""
    length, unit, even = meta.shape[dim], unit_of(meta.units, dim), True
    around = tuple(a for a in cut.axes_of(dim) if a != step.axis)
    for axis in around:
        parts = mesh.axis(axis).size
        even, length = even and is_even(length, parts, unit), chunk(length, parts, unit)
    if even and is_even(length, mesh.axis(step.axis).size, unit):
        return length, 0
    return (length if even else Own(meta.shape[dim], around, unit)), unit


def reads(step: Step) -> tuple[str, ...]:
    """Names that a step reads. A block's parameters are not among them."""
    match step:
        case Compute() | CallBlock():
            return tuple(i.name for i in step.inputs)
        case Convert():
            return (step.before.name,)
        case Keep():
            return (step.local.name,)
        case Free():
            return ()


def writes(step: Step) -> tuple[str, ...]:
    """Names that a step makes."""
    match step:
        case Compute():
            return tuple(o.name for o in step.outputs if o is not None)
        case CallBlock():
            return tuple(o.name for o in (*step.outputs, *step.gradients) if o is not None)
        case Convert():
            return (step.after.name,)
        case Keep():
            return (step.local.name,)
        case Free():
            return ()


def with_frees(steps: Iterable[Step], keep: set[str], held: Iterable[str] = ()) -> tuple[Step, ...]:
    """The steps with a Free after each name's last read. `keep` is what leaves; `held` what is at hand from the start
    and may be freed. Outputs that nothing reads become None."""
    listed = list(steps)
    last: dict[str, int] = {}
    for i, step in enumerate(listed):
        last.update(dict.fromkeys(reads(step), i))
    mine = {name for step in listed for name in writes(step)} | set(held)
    found: list[Step] = []
    for i, step in enumerate(listed):
        found.append(_without_unread(step, last, keep))
        done = tuple(n for n in dict.fromkeys(reads(step)) if last[n] == i and n in mine and n not in keep)
        if done:
            found.append(Free(done))
    return tuple(found)


def _without_unread(step: Step, last: dict[str, int], keep: set[str]) -> Step:
    if not isinstance(step, (Compute, CallBlock)):
        return step

    def live(local: Local | None) -> Local | None:
        return local if local is not None and (local.name in last or local.name in keep) else None

    if isinstance(step, Compute):
        return replace(step, outputs=tuple(map(live, step.outputs)))
    return replace(step, outputs=tuple(map(live, step.outputs)), gradients=tuple(map(live, step.gradients)))

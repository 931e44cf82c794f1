"""Which meshes a search looks at: all ways to write the device count as dp × cp × ep × free × tp within the options."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise, permutations

import msgspec

from autopar.errors import UserError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.options import DEGREE_NAMES, STAGES, Options

ORDER = ("dp", "cp", "ep", "free", "tp")
"""Mesh axes, slowest first: the heaviest traffic (tp) between neighbours, who have the fastest links."""
DEGREES = (*ORDER, "pp")
"""What a pin may give a size to: the axes, and the number of pipeline stages."""
SEARCHED = frozenset({"dp", "tp"})
"""Axes that take any size unless told otherwise; `ep` takes what divides the experts, if a model has any; the others
have size 1 unless pinned or in `search_space`."""


def mesh_candidates(cluster: ClusterSpec, options: Options, sizes: Mapping[str, int] | None = None) -> tuple[Mesh, ...]:
    """Meshes over all devices of `cluster` within pins and search space, the most promising first.

    `sizes`: of what the model's inputs give an axis to cut, as far as it is known: rows of the batch to dp, places of
    the sequence to cp, experts to ep. Where such an axis is asked for, no rank is left with nothing.

    Axes of size 1 are left out: one device gives the mesh with no axes. Where neighbours don't have the fastest links,
    each mesh comes with its axes in every order. Raises UserError where a pin names no axis, is no size, or contradicts
    another pin, the search space, the device count or the batch.
    """
    pins = axis_pins(options)
    if (stages := pins.pop("pp", 1)) != 1:
        raise UserError(_no_axis("pp", stages))
    allowed = allowed_degrees(options)
    allowed.pop("pp", None)
    check_pins(pins, allowed, cluster)
    experts = (sizes or {}).get("ep", 1)
    open_ = {"cp", "ep"} & set(allowed) or (experts > 1 and "ep" not in pins)
    if set(pins) >= SEARCHED and math.prod(pins.values()) != cluster.devices and not open_:
        raise UserError(
            f"{_show(pins)} multiply to {math.prod(pins.values())} devices, but cluster {cluster.name} has "
            f"{cluster.devices} devices"
        )
    allowed = within_sizes(pins, allowed, sizes or {})
    if experts > 1 and "ep" not in pins:
        allowed.setdefault("ep", expert_degrees(experts, cluster.devices))
    choices = tuple(_choices(axis, pins, allowed, cluster.devices) for axis in ORDER)
    orders = (ORDER,) if _neighbours_are_fastest(cluster) else tuple(permutations(ORDER))
    products = [dict(zip(ORDER, found, strict=True)) for found in _products(choices, cluster.devices)]
    products = [p for p in products if _shares_batch(p, pins, (sizes or {}).get("dp", 0))]
    meshes = list(dict.fromkeys(_mesh(order, sizes, cluster) for sizes in products for order in orders))
    if not meshes:
        raise UserError(_nothing_left(pins, allowed, cluster))
    check_axes(meshes, options, cluster)
    return tuple(sorted(meshes, key=_promise))


def axis_pins(options: Options) -> dict[str, int]:
    """Pinned sizes of `DEGREES`. Raises UserError for a size below 1, not whole, or of an axis that does not exist."""
    found: dict[str, int] = {}
    for name, value in options.pins.items():
        if name == STAGES or (name not in DEGREES and not _looks_like_size(name, value)):
            continue
        size = _size(name, value)
        if name in DEGREES:
            found[name] = size
        else:
            raise UserError(_no_axis(name, value))
    return found


def _no_axis(name: str, value: str | int) -> str:
    return f"pin {name}={value}: there is no mesh axis {name!r}; wanted one of {', '.join(ORDER)}"


def _looks_like_size(name: str, value: str | int) -> bool:
    """True for a pin that can only be meant as an axis: a number under another name than `zero`."""
    return name != "zero" and (isinstance(value, int) or value.strip().lstrip("+-").isdigit())


def _size(name: str, value: str | int) -> int:
    try:
        size = int(value) if not isinstance(value, bool) else 0
    except ValueError:
        size = 0
    if size < 1:
        raise UserError(f"pin {name}={value}: wanted a whole number of 1 or more")
    return size


def allowed_degrees(options: Options) -> dict[str, tuple[int, ...]]:
    """Sizes of `DEGREES` that the search space allows; those that it does not mention are absent."""
    found: dict[str, tuple[int, ...]] = {}
    for name, sizes in options.search_space.items():
        wrong = [s for s in sizes if isinstance(s, bool) or not isinstance(s, int) or s < 1]
        if wrong or not sizes:
            raise UserError(f"search_space {name}={list(sizes)}: wanted whole numbers of 1 or more")
        found[DEGREE_NAMES[name]] = tuple(sorted(set(sizes)))
    return found


def check_axes(meshes: Iterable[Mesh], options: Options, cluster: ClusterSpec) -> None:
    """UserError for a pin that cuts over an axis of which every mesh has one rank, so that it would say nothing."""
    longer = {a.name for mesh in meshes for a in mesh.axes if a.size > 1}
    others = [f"pin {name}={size}" for name, size in axis_pins(options).items()]
    others += [f"search_space {name}={list(sizes)}" for name, sizes in options.search_space.items()]
    for name, value in options.pins.items():
        terms = ["dp:S"] if name == "zero" and str(value) == "3" else str(value).split()
        cut = [term.partition(":")[0] for term in terms if ":S" in term]
        gone = next((axis for axis in cut if axis in ORDER and axis not in longer), None)
        if gone is not None and cluster.devices > 1:
            because = " and ".join(others) or "a search that isn't told of it"
            raise UserError(
                f"pin {name}={value}: cuts over {gone}, of which {because} leaves one rank on the {cluster.devices} "
                f"devices of {cluster.name}"
            )


def check_pins(pins: Mapping[str, int], allowed: Mapping[str, tuple[int, ...]], cluster: ClusterSpec) -> None:
    """UserError for pinned degrees that contradict the search space or the number of devices."""
    for axis, size in pins.items():
        if axis in allowed and size not in allowed[axis]:
            raise UserError(f"pin {axis}={size} contradicts search_space {_degree(axis)}={list(allowed[axis])}")
    product, text = math.prod(pins.values()), _show(pins)
    if cluster.devices % product:
        raise UserError(
            f"{text} needs a multiple of {product} devices, but cluster {cluster.name} has {cluster.devices} devices"
        )


CUT = {"dp": ("batch", "rows"), "cp": ("sequence", "places"), "ep": ("set of experts", "experts")}
"""What an axis cuts, and into what."""


def expert_degrees(experts: int, devices: int) -> tuple[int, ...]:
    """Sizes of `ep`: what divides both."""
    return divisors(math.gcd(experts, devices))


def _shares_batch(sizes: Mapping[str, int], pins: Mapping[str, int], rows: int) -> bool:
    """True unless the search itself would add expert parallelism that leaves ranks unequal rows of the batch."""
    return sizes["ep"] == 1 or "ep" in pins or not rows or rows % (sizes["dp"] * sizes["ep"]) == 0


def within_sizes(
    pins: Mapping[str, int], allowed: Mapping[str, tuple[int, ...]], sizes: Mapping[str, int]
) -> dict[str, tuple[int, ...]]:
    """`allowed` without degrees that leave ranks with nothing. Raises UserError where one is pinned or none is left."""
    found = dict(allowed)
    for axis, size in sizes.items():
        what, parts = CUT[axis]
        asked = (pins[axis],) if axis in pins else allowed.get(axis, ())
        fit = tuple(n for n in asked if n <= max(1, size) and (axis != "ep" or max(1, size) % n == 0))
        if asked and not fit:
            said = f"pin {axis}={asked[0]}" if axis in pins else f"search_space {_degree(axis)}={list(asked)}"
            raise UserError(
                f"{said}: a {what} of {size} {parts} can't be cut {min(asked)} ways, ranks would be left with nothing; "
                f"take {axis} of {max(1, size)} at most, or a larger {what}"
            )
        if axis in allowed:
            found[axis] = fit
    return found


def _show(pins: Mapping[str, int]) -> str:
    return ("pin " if len(pins) == 1 else "pins ") + ", ".join(f"{axis}={size}" for axis, size in pins.items())


def _degree(axis: str) -> str:
    return next(name for name, short in DEGREE_NAMES.items() if short == axis)


def _choices(
    axis: str, pins: Mapping[str, int], allowed: Mapping[str, tuple[int, ...]], devices: int
) -> tuple[int, ...]:
    if axis in pins:
        return (pins[axis],)
    if axis in allowed:
        return allowed[axis]
    return divisors(devices) if axis in SEARCHED else (1,)


def divisors(n: int) -> tuple[int, ...]:
    """All of them, smallest first."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return tuple(sorted({*small, *(n // d for d in small)}))


def _products(choices: tuple[tuple[int, ...], ...], devices: int) -> Iterator[tuple[int, ...]]:
    """One size from each choice, such that they multiply to `devices`."""
    if not choices:
        if devices == 1:
            yield ()
        return
    for size in choices[0]:
        if devices % size == 0:
            for rest in _products(choices[1:], devices // size):
                yield (size, *rest)


def _neighbours_are_fastest(cluster: ClusterSpec) -> bool:
    """True if no link level is faster than one inside it."""
    rates = [level.bytes_per_us for level in cluster.levels if level.size > 1]
    return all(inside >= outside for inside, outside in pairwise(rates))


def parts_of(cluster: ClusterSpec) -> tuple[ClusterSpec, ...]:
    """Parts of a cluster that a plan may be made for, the smallest first, the whole last.

    Of one unit of a link level (a node, a rack) a number of its units that is a power of two or divides it; of several
    kinds of device the first so many of all, and the first of each kind.
    """
    starts = [sum(g.count for g in cluster.groups[:i]) for i in range(len(cluster.groups))]
    found: list[ClusterSpec] = []
    for count in _part_sizes(cluster):
        for start in starts:
            part = _part(cluster, start, count)
            if part is not None and all((p.groups, p.levels) != (part.groups, part.levels) for p in found):
                found.append(part)
    return (*(p for p in found if p.devices < cluster.devices), cluster)


def _part_sizes(cluster: ClusterSpec) -> list[int]:
    sizes, inside = {1, cluster.devices}, 1
    for level in cluster.levels:
        powers = {2**i for i in range(level.size.bit_length()) if 2**i <= level.size}
        sizes |= {inside * k for k in powers | set(divisors(level.size))}
        inside *= level.size
    return sorted(sizes)


def _part(cluster: ClusterSpec, start: int, count: int) -> ClusterSpec | None:
    """`count` devices from `start` on; None if they are not that many, or not whole units of a level."""
    levels, inside, left = [], 1, count
    for level in cluster.levels:
        size = min(level.size, left)
        if left % size:
            return None
        levels.append(msgspec.structs.replace(level, size=size))
        left //= size
        if left == 1 and (start % inside or start % (inside * level.size) + count > inside * level.size):
            return None
        if left > 1 and start % (inside * level.size):
            return None
        inside *= level.size
    groups, at = [], 0
    for group in cluster.groups:
        held = min(at + group.count, start + count) - max(at, start)
        if held > 0:
            groups.append(msgspec.structs.replace(group, count=held))
        at += group.count
    if left > 1 or sum(g.count for g in groups) != count:
        return None
    kinds = f" ({', '.join(g.device.name for g in groups)})" if len(cluster.groups) > 1 else ""
    return msgspec.structs.replace(
        cluster, name=f"{count} of {cluster.name}{kinds}", groups=tuple(groups), levels=tuple(levels)
    )


def stage_mesh(data: int, tensor: int, cluster: ClusterSpec, experts: int = 1, context: int = 1) -> Mesh:
    """The mesh of one pipeline stage: `dp`, which micro-batches cut too, always; the others where longer than 1."""
    sizes = {"dp": data, "cp": context, "ep": experts, "tp": tensor}
    return _mesh(tuple(sizes), sizes, cluster, always="dp")


def _mesh(order: tuple[str, ...], sizes: Mapping[str, int], cluster: ClusterSpec, always: str = "") -> Mesh:
    axes = []
    for i, name in enumerate(order):
        if sizes[name] > 1 or name == always:
            stride = math.prod(sizes[inner] for inner in order[i + 1 :])
            axes.append(Axis(name=name, size=sizes[name], level=cluster.level_of(sizes[name], stride)))
    return Mesh(axes=tuple(axes))


def _promise(mesh: Mesh) -> tuple[int, ...]:
    """Smaller is better: heavy axes on fast links first, then as much data parallelism as that leaves."""
    by_name = {axis.name: axis for axis in mesh.axes}
    heavy = [by_name.get(name) for name in ("tp", "cp", "ep")]
    return (*(a.level if a else 0 for a in heavy), *(a.size if a else 1 for a in heavy))


def _nothing_left(pins: Mapping[str, int], allowed: Mapping[str, tuple[int, ...]], cluster: ClusterSpec) -> str:
    spaces = ", ".join(f"{_degree(axis)}={list(sizes)}" for axis, sizes in allowed.items())
    asked = " and ".join(filter(None, [_show(pins) if pins else "", f"search_space {spaces}" if spaces else ""]))
    return f"{asked}: no mesh multiplies to the {cluster.devices} devices of cluster {cluster.name}"

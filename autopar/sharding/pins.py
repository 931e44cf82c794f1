"""What a user pinned, checked against the names that the model has, and against the other pins.

A pin names parameters (by their names, or by a module above them) or, as "input:NAME", inputs of the model. Of two that
name the same tensor, one may be the exception of the other: it names a part of what that names, and counts. Any others
that want different things of one tensor contradict each other.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise

from autopar.errors import UserError
from autopar.ir.graph import CapturedGraph, InputKind, ParameterInfo
from autopar.ir.layout import Kind, Placement, fits, parse_layout
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.options import AXES, DEGREE_NAMES, STAGES

INPUT = "input:"
"""Before the name of an input, as plans write it."""
_OWN_KEYS = {"zero", "free", "pp", STAGES, *AXES, *DEGREE_NAMES}


class PinError(UserError):
    """A pin that this mesh can't satisfy; another mesh might."""


def layout_pins(captured: CapturedGraph, mesh: Mesh, pins: Mapping[str, str | int]) -> dict[str, dict[str, Placement]]:
    """Parameter name, or "input:" and the path of an input -> axis -> pinned placement, for axes that the mesh has.

    Raises UserError with the closest names for a pattern that matches nothing, and with both pins for two that
    contradict each other; PinError for what doesn't fit this mesh.
    """
    every = Mesh(axes=(*mesh.axes, *(Axis(name=a, size=1) for a in (*AXES, "free") if a not in mesh.names)))
    given = [_Pin.of(captured, pattern, str(text), every) for pattern, text in pins.items() if is_layout_pin(pattern)]
    shapes = _shapes(captured)
    found: dict[str, dict[str, Placement]] = {}
    for pin in _general_first(given):
        wanted = {axis: placement for axis, placement in pin.wanted.items() if axis in mesh.names}
        fit = [name for name in pin.names if _fits(shapes[name], wanted, mesh)]
        if wanted and not fit:
            raise PinError(_unfit(pin, shapes[pin.names[0]], mesh))
        for name in fit:
            found.setdefault(name, {}).update(wanted)
    return found


@dataclass(frozen=True, slots=True)
class _Pin:
    """`names`: of all tensors that the pattern matches. `wanted`: by axis, also by those that a mesh lacks."""

    pattern: str
    text: str
    names: tuple[str, ...]
    wanted: Mapping[str, Placement]

    @classmethod
    def of(cls, captured: CapturedGraph, pattern: str, text: str, every: Mesh) -> _Pin:
        if pattern.startswith(INPUT):
            names = tuple(n for n in _inputs(captured) if fnmatchcase(n, pattern))
        else:
            names = tuple(p.name for p in matching(captured, pattern))
        if not names:
            raise UserError(_nothing(pattern, captured))
        return cls(pattern, text, names, _placements(pattern, text, every))

    def narrows(self, other: _Pin) -> bool:
        """True if it is an exception of the other: that names all of its tensors, and more."""
        return set(self.names) < set(other.names)

    def __str__(self) -> str:
        return f"{self.pattern!r} = {self.text!r}"


def _general_first(pins: list[_Pin]) -> list[_Pin]:
    """Exceptions last. Raises UserError for pins that contradict each other."""
    for i, one in enumerate(pins):
        for other in pins[i + 1 :]:
            if one.narrows(other) or other.narrows(one):
                continue
            both = next((n for n in one.names if n in other.names), None)
            axis = next((a for a, p in one.wanted.items() if other.wanted.get(a, p) != p), None)
            if both is not None and axis is not None:
                raise UserError(
                    f"pins {one} and {other} contradict each other: both name {both}, and want {axis}:"
                    f"{one.wanted[axis]} and {axis}:{other.wanted[axis]}; leave one out, or narrow it to an exception"
                )
    return sorted(pins, key=lambda pin: -len(pin.names))


def is_layout_pin(pattern: str) -> bool:
    """True unless the pin is of an axis or of `zero`."""
    return pattern not in _OWN_KEYS


def matching(captured: CapturedGraph, pattern: str) -> list[ParameterInfo]:
    """Parameters whose name, or a module above them, a pattern names."""
    return [p for p in captured.parameters if _matches(pattern, p)]


def _matches(pattern: str, parameter: ParameterInfo) -> bool:
    names = (parameter.name, *parameter.aliases)
    return any(fnmatchcase(n, pattern) or fnmatchcase(n, f"{pattern}.*") for n in names)


def _inputs(captured: CapturedGraph) -> dict[str, tuple[int, ...]]:
    """Name of each tensor that a call passes, as pins and plans write it -> its shape."""
    given = (i for i in captured.top.inputs if i.kind is InputKind.INPUT)
    return {f"{INPUT}{i.target}": i.value.meta.shape for i in given}


def _shapes(captured: CapturedGraph) -> dict[str, tuple[int, ...]]:
    return {**{p.name: p.meta.shape for p in captured.parameters}, **_inputs(captured)}


def _placements(pattern: str, text: str, every: Mesh) -> dict[str, Placement]:
    """The pin's terms, by axis; "whole" names all of them."""
    try:
        layout = parse_layout(text, every)
    except ValueError as error:
        raise UserError(f"pin {pattern!r}: {text!r} is no layout ({error}); write for example 'tp:S(0)'") from None
    named = {term.split(":")[0] for term in text.split()} if text != "whole" else set(every.names)
    found = {a: layout.on(a) for a in every.names if a in named}
    if any(p.kind is Kind.PARTIAL for p in found.values()):
        what = "an input can't be given" if pattern.startswith(INPUT) else "a parameter can't be stored"
        raise UserError(f"pin {pattern!r}: {what} as a sum ({text!r}); write AXIS:R or AXIS:S(DIM)")
    return found


def _fits(shape: tuple[int, ...], wanted: Mapping[str, Placement], mesh: Mesh) -> bool:
    layout = parse_layout(" ".join(f"{a}:{p}" for a, p in wanted.items()) or "whole", mesh)
    dims = [p.dim for p in layout.placements if p.kind is Kind.SHARD]
    return fits(layout, shape) and len(set(dims)) == len(dims)


def _unfit(pin: _Pin, shape: tuple[int, ...], mesh: Mesh) -> str:
    return (
        f"pin {pin}: {pin.names[0]} has shape {list(shape)}, which the mesh {mesh} can't cut so; pin another dim, or "
        f"another size of the axis"
    )


def _nothing(pattern: str, captured: CapturedGraph) -> str:
    if pattern.startswith(INPUT):
        return f"pin {pattern!r} matches no input of the model; its inputs are {', '.join(_inputs(captured)) or 'none'}"
    parameters: Iterable[ParameterInfo] = captured.parameters
    names = sorted({n for p in parameters for name in (p.name, *p.aliases) for n in _with_parents(name)})
    close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.5) or difflib.get_close_matches(
        pattern.replace("*", "0"), names, n=3, cutoff=0.3
    )
    hint = f"; did you mean {', '.join(close)}?" if close else ""
    return f"pin {pattern!r} matches no module and no parameter of the model{hint}"


def _with_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def stage_blocks(captured: CapturedGraph, pins: Mapping[str, str | int]) -> tuple[int, ...] | None:
    """How many blocks each pipeline stage holds, in the order of their calls, as pinned; None where it isn't.

    Raises UserError for what is no cut of the model's blocks.
    """
    if STAGES not in pins:
        return None
    text = str(pins[STAGES])
    terms = [term.strip() for term in text.split(",")]
    blocks = _called_blocks(captured)
    if len(terms) == 1 and terms[0].isdigit():
        raise UserError(
            f"pin {STAGES}={text}: wanted the blocks of every stage, as in {STAGES}=12,12, or the modules that the "
            f"second and later ones start with; their number alone is pp={text}"
        )
    if all(term.isdigit() for term in terms):
        counts = tuple(map(int, terms))
    else:
        starts = [_block_at(term, text, blocks) for term in terms]
        ends = (0, *starts, len(blocks))
        counts = tuple(b - a for a, b in pairwise(ends))
        if min(counts) < 1:
            raise UserError(
                f"pin {STAGES}={text}: wanted modules in the order of their calls, each once, and not the model's "
                f"first block, {blocks[0]}, with which the first stage starts"
            )
    if sum(counts) != len(blocks) or min(counts) < 1:
        raise UserError(
            f"pin {STAGES}={text}: {sum(counts)} blocks in all, the model has {len(blocks)}; wanted 1 or more on each "
            f"stage and all of them"
        )
    return counts


def _called_blocks(captured: CapturedGraph) -> list[str]:
    """Module paths of the repeated blocks, in the order of their calls."""
    at = {b.key: iter(b.instances) for b in captured.blocks}
    return [
        next(at[n.block.key], n.block.key)
        for n in captured.top.nodes
        if n.op == "autopar.block" and n.block is not None
    ]


def _block_at(path: str, text: str, blocks: list[str]) -> int:
    if path in blocks:
        return blocks.index(path)
    near = difflib.get_close_matches(path, blocks, n=1, cutoff=0.3)
    known = f"did you mean {near[0]}?" if near else f"they are {blocks[0]} to {blocks[-1]}" if blocks else "it has none"
    raise UserError(f"pin {STAGES}={text}: {path!r} is none of the model's repeated blocks; {known}")

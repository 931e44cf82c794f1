"""What a user pinned, checked against the names that the model has."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from autopar.errors import UserError
from autopar.ir.graph import CapturedGraph, ParameterInfo
from autopar.ir.layout import Kind, Placement, fits, parse_layout
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.options import AXES, DEGREE_NAMES

_OWN_KEYS = {"zero", "free", "pp", *AXES, *DEGREE_NAMES}


class PinError(UserError):
    """A pin that this mesh can't satisfy; another mesh might."""


def layout_pins(captured: CapturedGraph, mesh: Mesh, pins: Mapping[str, str | int]) -> dict[str, dict[str, Placement]]:
    """Parameter name -> axis -> pinned placement, for axes that the mesh has. Later pins win.

    Raises UserError with the closest names for a pattern that matches nothing, PinError for what doesn't fit this mesh.
    """
    found: dict[str, dict[str, Placement]] = {}
    for pattern, text in pins.items():
        if not is_layout_pin(pattern):
            continue
        matched = matching(captured, pattern)
        if not matched:
            raise UserError(_nothing(pattern, captured.parameters))
        wanted = _placements(pattern, str(text), mesh)
        fit = [p for p in matched if _fits(p, wanted, mesh)]
        if wanted and not fit:
            raise PinError(_unfit(pattern, str(text), matched[0], mesh))
        for parameter in fit:
            found.setdefault(parameter.name, {}).update(wanted)
    return found


def is_layout_pin(pattern: str) -> bool:
    """True unless the pin is of an axis or of `zero`."""
    return pattern not in _OWN_KEYS


def matching(captured: CapturedGraph, pattern: str) -> list[ParameterInfo]:
    """Parameters whose name, or a module above them, a pattern names."""
    return [p for p in captured.parameters if _matches(pattern, p)]


def _matches(pattern: str, parameter: ParameterInfo) -> bool:
    names = (parameter.name, *parameter.aliases)
    return any(fnmatchcase(n, pattern) or fnmatchcase(n, f"{pattern}.*") for n in names)


def _placements(pattern: str, text: str, mesh: Mesh) -> dict[str, Placement]:
    """The pin's terms for the mesh's own axes. Axes that this mesh lacks (a search tries several) are skipped."""
    everything = Mesh(axes=(*mesh.axes, *(Axis(name=a, size=1) for a in AXES if a not in mesh.names)))
    try:
        layout = parse_layout(text, everything)
    except ValueError as error:
        raise UserError(f"pin {pattern!r}: {text!r} is no layout ({error}); write for example 'tp:S(0)'") from None
    named = {term.split(":")[0] for term in text.split()} if text != "whole" else set(mesh.names)
    found = {a: layout.on(a) for a in mesh.names if a in named}
    if any(p.kind is Kind.PARTIAL for p in found.values()):
        raise UserError(
            f"pin {pattern!r}: a parameter can't be stored as a sum ({text!r}); write AXIS:R or AXIS:S(DIM)"
        )
    return found


def _fits(parameter: ParameterInfo, wanted: Mapping[str, Placement], mesh: Mesh) -> bool:
    layout = parse_layout(" ".join(f"{a}:{p}" for a, p in wanted.items()) or "whole", mesh)
    dims = [p.dim for p in layout.placements if p.kind is Kind.SHARD]
    return fits(layout, parameter.meta.shape) and len(set(dims)) == len(dims)


def _unfit(pattern: str, text: str, parameter: ParameterInfo, mesh: Mesh) -> str:
    return (
        f"pin {pattern!r} = {text!r}: {parameter.name} has shape {list(parameter.meta.shape)}, which the mesh {mesh} "
        f"can't cut so; pin another dim, or another size of the axis"
    )


def _nothing(pattern: str, parameters: Iterable[ParameterInfo]) -> str:
    names = sorted({n for p in parameters for name in (p.name, *p.aliases) for n in _with_parents(name)})
    close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.5) or difflib.get_close_matches(
        pattern.replace("*", "0"), names, n=3, cutoff=0.3
    )
    hint = f"; did you mean {', '.join(close)}?" if close else ""
    return f"pin {pattern!r} matches no module and no parameter of the model{hint}"


def _with_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]

"""The tables of an emitted module: names with layouts, and which parameters each instance of a block takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from autopar.ir.layout import Layout
from autopar.ir.program import Compute, Function, Program


def stem(key: str) -> str:
    """A block's key as a part of names."""
    plain = "".join(c if c.isalnum() else "_" for c in key)
    return plain if plain[:1].isalpha() else f"block_{plain}"


def saved_name(key: str) -> str:
    """The list of what each instance saved."""
    return f"{stem(key)}_saved"


def waiting_name(key: str) -> str:
    """The list of what the first half of each instance's backward leaves to the second."""
    return f"{stem(key)}_waiting"


def rows_name(key: str) -> str:
    """The table of the parameters' positions."""
    return f"{stem(key)}_PARAMETERS"


def instances_name(key: str) -> str:
    """The table of the instances' module paths."""
    return f"{stem(key)}_INSTANCES"


def draws(function: Function) -> bool:
    """True if a step draws random numbers: it is told its own key."""
    return any(isinstance(s, Compute) and s.place.key in s.args for s in function.steps)


def may_draw(function: Function) -> bool:
    """True if a step draws random numbers, or runs a region, which may."""
    return draws(function) or any(isinstance(s, Compute) and s.function == "rt.region" for s in function.steps)


def pattern(instances: Sequence[str]) -> str:
    """ "model.layers.*" of "model.layers.0", "model.layers.1"."""
    rows = [name.split(".") for name in instances]
    if len({len(r) for r in rows}) != 1:
        return instances[0]
    return ".".join(parts[0] if len(set(parts)) == 1 else "*" for parts in zip(*rows, strict=True))


def head_rows(program: Program) -> Iterable[str]:
    """Constants above the functions."""
    axes = [f'("{a.name}", {a.size})' for a in program.mesh.axes]
    yield ""
    yield f"AXES = ({', '.join(axes)}{',' if len(axes) == 1 else ''})"
    if any(map(may_draw, program.functions)):
        yield "DRAWS = True  # each call has a step of its own, from which random ops draw"
    yield from _layouts("INPUTS", program.inputs)
    yield from _layouts("OUTPUTS", program.outputs)
    yield from _layouts("TANGENTS", program.tangents)
    for key, instances in program.calls.items():
        yield f"{rows_name(key)} = {_rows(program.block_parameters[key])}"
        yield f"{instances_name(key)} = {_instances(instances)}"


def parameter_rows(program: Program) -> Iterable[str]:
    """Constants below the functions: long in large models."""
    yield from _layouts("PARAMETERS", program.parameters)
    yield from _layouts("BUFFERS", program.buffers)
    yield from _layouts("CONSTANTS", program.constants)
    yield "UPDATES = (" + "".join(f'"{name}", ' for name in program.updates).rstrip() + ")"
    if program.differentiated:
        yield "DIFFERENTIATED = (" + "".join(f'"{name}", ' for name in program.differentiated).rstrip() + ")"


def _layouts(name: str, layouts: Mapping[str, Layout]) -> Iterable[str]:
    if not layouts:
        yield f"{name} = {{}}"
        return
    yield f"{name} = {{"
    for key, layout in layouts.items():
        yield f'    "{key}": "{layout}",'
    yield "}"


def _rows(rows: Sequence[tuple[int, ...]]) -> str:
    """Rows of positions; as one expression where each is the first moved by a constant step."""
    if len(rows) > 1 and rows[0]:
        step = rows[1][0] - rows[0][0]
        if all(row == tuple(k + step * i for k in rows[0]) for i, row in enumerate(rows)):
            return f"[[k + {step} * i for k in {list(rows[0])}] for i in range({len(rows)})]"
    return "[" + ", ".join(str(list(r)) for r in rows) + "]"


def _instances(names: Sequence[str]) -> str:
    """Module paths; as one expression where only a count differs."""
    text = pattern(names)
    if text.count("*") == 1 and all(n == text.replace("*", str(k)) for k, n in enumerate(names)):
        return f'[f"{text.replace("*", "{i}")}" for i in range({len(names)})]'
    return "[" + ", ".join(f'"{n}"' for n in names) + "]"

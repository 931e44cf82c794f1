"""Arguments and layouts as Python text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from autopar.errors import CompilerError
from autopar.ir.cuts import LengthOf, Own
from autopar.ir.graph import Ref, TorchConst
from autopar.ir.program import Collective, Compute, Local
from autopar.ir.reshard import Collective as Kind

_MODULES = {"dtype": "torch", "layout": "torch", "memory_format": "torch"}


def literal(arg: Any, rename: Mapping[str, str]) -> str:
    """One argument. CompilerError for what has no text."""
    match arg:
        case Ref():
            return rename.get(arg.name, arg.name)
        case Own():
            return f"{rename.get(own_key(arg), own_name(arg))}.{arg.part}"
        case LengthOf():
            return f"{rename.get(arg.name, arg.name)}.shape[{arg.dim}]"
        case TorchConst(kind="device"):
            return "rt.device"
        case TorchConst():
            return f"{_MODULES[arg.kind]}.{arg.name}"
        case tuple() | list():
            return "[" + ", ".join(literal(a, rename) for a in arg) + "]"
        case float() if not math.isfinite(arg):
            return f'float("{arg}")'
        case None | bool() | int() | float() | complex() | str():
            return _quoted(arg) if isinstance(arg, str) else repr(arg)
        case _:
            raise CompilerError(f"an argument of type {type(arg).__name__} cannot be written as Python: {arg!r}")


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def own_name(own: Own) -> str:
    """What a function calls this rank's piece of a dim, before it makes the name its own: "dp_7"."""
    return "_".join((*own.axes, str(own.whole), *([str(own.unit)] if own.unit > 1 else [])))


def own_key(own: Own) -> str:
    """Where a table of new names has the one of this piece; no tensor is called so."""
    return f"own {own_name(own)}"


def own_piece(own: Own) -> str:
    """The right-hand side of such a name."""
    axes = f'"{own.axes[0]}"' if len(own.axes) == 1 else literal(own.axes, {})
    return f"rt.piece({own.whole}, {axes}{f', {own.unit}' if own.unit > 1 else ''})"


def call(step: Compute, rename: Mapping[str, str]) -> str:
    """The right-hand side of an op."""
    first = ["rt"] if step.function.startswith("local_ops.") else []
    args = [literal(a, rename) for a in step.args]
    kwargs = [f"{k}={literal(v, rename)}" for k, v in step.kwargs]
    return f"{step.function}({', '.join([*first, *args, *kwargs])})"


def gives_list(function: str) -> bool:
    """True if an op returns a list of tensors (`unbind`, a region), also when it has one element."""
    if function.startswith("rt."):
        return True
    parts = function.split(".")
    if len(parts) != 3:
        return False
    packet = getattr(getattr(torch.ops, parts[0]), parts[1])
    returns = getattr(packet, parts[2])._schema.returns
    return len(returns) == 1 and isinstance(returns[0].type, torch.ListType)


def collective(part: Collective, rename: Mapping[str, str]) -> str:
    """The right-hand side of one step of a conversion."""
    step = part.step
    name = rename.get(part.before, part.before)
    dims = ""
    if step.collective is Kind.ALL_TO_ALL:
        dims = f", {step.dim}, {step.to_dim}"
    elif step.collective is not Kind.ALL_REDUCE:
        dims = f", {step.dim}"
    sizes = "".join(f", {k}={literal(v, rename)}" for k, v in part.sizes)
    function = "narrow" if part.view else step.collective.value
    return f'rt.{function}({name}, "{step.axis}"{dims}{sizes})'


def shape(local: Local) -> str:
    """Comment on what a name holds: local shape and layout."""
    return f"{local.meta} {local.layout}" if local.layout.axes else str(local.meta)


def short(path: str, stem: int = 2) -> str:
    """The last parts of a source path: "models/llama.py:12" of "/usr/lib/…/models/llama.py:12"."""
    return "/".join(path.split("/")[-stem:])

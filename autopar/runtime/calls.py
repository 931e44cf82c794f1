"""What a call asks of a program, beside its numbers: modes, shapes, dtypes, plain values, what needs a gradient.

Two calls with the same `Wanted` run the same program; another one is captured and planned first.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from autopar.ir.graph import CallSignature, CapturedGraph, InputKind
from autopar.ir.plan import Plan

PROGRAMS_KEPT = 16
"""Programs that a module holds; the one that was not called for longest goes first."""
P = TypeVar("P")
Leaf = tuple[str, Any, str, bool]
"""Of a tensor (path, shape, dtype, whether its gradient is wanted); else (path, None, type and value, False)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The key of a program.

    Attributes:
        modes: training flag of each submodule, the module itself first.
        leaves: of the call's arguments.
        unfrozen: parameters that need a gradient now and did not when the module was compiled.
        autocast: dtype of the autocast around the call, "" if there is none.
    """

    modes: tuple[bool, ...]
    leaves: tuple[Leaf, ...]
    unfrozen: tuple[str, ...] = ()
    autocast: str = ""

    @property
    def mode(self) -> str:
        """The mode in words."""
        word = "training" if self.modes[0] else "evaluation"
        return word if len(set(self.modes)) == 1 else f"{word} (parts are not)"

    @property
    def inputs(self) -> str:
        """The arguments in words."""
        return ", ".join(f"{p} {d}{list(s)}" if s is not None else f"{p}={d.partition(' ')[2]}" for p, s, d, _ in
                         self.leaves)  # fmt: skip

    def __str__(self) -> str:
        more = [f"autocast to {self.autocast}"] if self.autocast else []
        more += [f"{', '.join(self.unfrozen)} unfrozen"] if self.unfrozen else []
        return "; ".join([self.mode, self.inputs, *more])


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be captured and planned anew.

    Attributes:
        modes: training flag by module path.
        args, kwargs: of the call.
    """

    wanted: Wanted
    modes: Mapping[str, bool]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One program of a module: for which calls, under which plan, and what it took to plan again.

    `seconds` is 0.0 for the first, which `compile` made.
    """

    wanted: Wanted
    plan: Plan
    seconds: float

    def __str__(self) -> str:
        how = f"planned again in {self.seconds:.1f} s" if self.seconds else "compiled"
        return f"{self.wanted}: {how}"


def leaves_of(found: Mapping[str, Any], dtype: Any) -> tuple[Leaf, ...]:
    """Of a call's arguments by path. `dtype`: of a tensor, what it is captured as."""
    wants = torch.is_grad_enabled()
    return tuple(
        (path, tuple(x.shape), _dtype_name(dtype(x.dtype)), wants and x.requires_grad)
        if isinstance(x, Tensor)
        else (path, None, f"{type(x).__qualname__} {x!r}", False)
        for path, x in found.items()
    )


def read_call(signature: CallSignature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by path."""
    if signature.read is not None:
        found: dict[str, Any] = signature.read(args, kwargs)
        return found
    leaves = signature.flatten(args, kwargs)
    return {leaf.path: x for leaf, x in zip(signature.inputs, leaves, strict=True)}


def add_program(programs: OrderedDict[Wanted, P], wanted: Wanted, program: P) -> None:
    """One more program of a module. Beyond `PROGRAMS_KEPT` the one that was not called for longest goes."""
    programs[wanted] = program
    if len(programs) > PROGRAMS_KEPT:
        gone, _ = programs.popitem(last=False)
        warnings.warn(
            f"more than {PROGRAMS_KEPT} kinds of calls: the program for ({gone}) is dropped and will be planned "
            "again when it is called for; pad inputs to fewer shapes",
            stacklevel=5,
        )


def captured_leaves(captured: CapturedGraph) -> tuple[Leaf, ...]:
    """Of the call that a graph was captured from."""
    grads = {i.target: i.requires_grad for i in captured.top.inputs if i.kind is InputKind.INPUT}
    return tuple(
        (leaf.path, leaf.meta.shape, leaf.meta.dtype, grads.get(leaf.path, False))
        if leaf.meta is not None
        else (leaf.path, None, f"{type(leaf.constant).__qualname__} {leaf.constant!r}", False)
        for leaf in captured.signature.inputs
    )


def autocast_now(device: torch.device) -> str:
    """The dtype that autocast casts to here, "" where it is off."""
    if not torch.is_autocast_enabled(device.type):
        return ""
    return _dtype_name(torch.get_autocast_dtype(device.type))


def unfrozen(parameters: Mapping[str, Tensor], compiled: Mapping[str, bool]) -> tuple[str, ...]:
    """Parameters that need a gradient though they were frozen when the module was compiled."""
    return tuple(name for name, p in parameters.items() if p.requires_grad and not compiled.get(name, True))


def modes_of(modules: Sequence[torch.nn.Module]) -> tuple[bool, ...]:
    """Training flags."""
    return tuple(m.training for m in modules)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

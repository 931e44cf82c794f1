"""What a compiled module keeps besides its parameters, whatever its programs are: one for each kind of call."""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import nn

from autopar.ir.graph import CapturedGraph
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.runtime.calls import (
    Leaf,
    Planned,
    Request,
    Wanted,
    add_program,
    autocast_now,
    captured_leaves,
    leaves_of,
    modes_of,
    read_call,
    unfrozen,
)
from autopar.runtime.comm import Communicator
from autopar.runtime.parameters import Weights, storage_layouts


class Text(Protocol):
    """What is emitted for a plan."""

    @property
    def text(self) -> str:
        """Python."""


class Ready(Protocol):
    """One captured graph ready to run, for calls of one kind."""

    @property
    def planned(self) -> Planned:
        """For which calls, under which plan."""


R = TypeVar("R", bound=Ready)
C = TypeVar("C")


class Programs(ABC, Generic[R, C]):
    """One module's. `R`: a program ready to run; `C`: what `recompile` gives.

    Attributes:
        captured, plan, source: what the module was compiled with.
        recompile: gives what runs a call that no program fits; None: such a call is an InputError.
        trains: which parameters had a gradient then.
        modules: the tree's modules by path.
        programs: the programs at hand, the one called last at the end.
        replans: how many were made after the first.
        seed, step: where random ops draw from: the next call that draws takes this step.
    """

    weights: Weights

    def __init__(
        self, captured: CapturedGraph, plan: Plan, source: Text, rt: Communicator,
        recompile: Callable[[Request], C] | None, seed: int,
    ) -> None:  # fmt: skip
        self.captured, self.plan, self.source, self.rt = captured, plan, source, rt
        self.recompile = recompile
        self.trains = {p.name: p.requires_grad for p in captured.parameters}
        self.modules: Mapping[str, nn.Module] = {}
        self.programs: OrderedDict[Wanted, R] = OrderedDict()
        self.replans = 0
        self.seed, self.step = seed, 0

    def copied(self, root: nn.Module) -> Self:
        """The same for a copy of the module: other weights, and a table of programs that grows on its own."""
        new = copy.copy(self)
        new.weights = self.weights.of_copy(root)
        new.modules = dict(root.named_modules())
        new.programs = OrderedDict(self.programs)
        return new

    def root(self, module: nn.Module) -> None:
        """The module is this one now."""
        self.weights.root = module
        self.modules = dict(module.named_modules())

    def add_first(self, ready: Callable[[Planned], R]) -> None:
        """The program that the module was compiled with."""
        planned = Planned(wanted=self._wanted(captured_leaves(self.captured)), plan=self.plan, seconds=0.0)
        self.programs[planned.wanted] = ready(planned)

    def program_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[R, dict[str, Any]]:
        """(what runs this call, made now if there is a way to; the call's arguments by path).

        Raises:
            InputError: the call differs from the captured one and there is no way to run it; says how it differs.
        """
        signature = self.captured.signature
        given = read_call(signature, args, kwargs)
        as_captured = signature.as_captured or (lambda dtype: dtype)
        wanted = self._wanted(leaves_of(given, as_captured), unfrozen(self.weights.parameters, self.trains))
        found = self.programs.get(wanted)
        if found is None:
            found = self._made_again(wanted, args, kwargs)
        self.programs.move_to_end(wanted)
        return found, given

    def _wanted(self, leaves: tuple[Leaf, ...], unfrozen: tuple[str, ...] = ()) -> Wanted:
        return Wanted(
            modes=modes_of(tuple(self.modules.values())), leaves=leaves, unfrozen=unfrozen,
            autocast=autocast_now(self.rt.device),
        )  # fmt: skip

    def _made_again(self, wanted: Wanted, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        recompile = self.recompile
        self.refuse(wanted, next(reversed(self.programs)), args, kwargs)
        assert recompile is not None
        start = time.perf_counter()
        modes = {path: m.training for path, m in self.modules.items()}
        with torch.inference_mode(False):
            compiled = recompile(Request(wanted=wanted, modes=modes, args=args, kwargs=kwargs))
            found = self.ready(compiled, wanted, time.perf_counter() - start)
        self.replans += 1
        add_program(self.programs, wanted, found)
        return found

    @abstractmethod
    def refuse(self, wanted: Wanted, known: Wanted, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """InputError where nothing can be made that runs such a call (without `recompile` always); says how it differs
        from one that is known."""

    @abstractmethod
    def ready(self, compiled: C, wanted: Wanted, seconds: float) -> R:
        """Make it ready to run; `seconds` is what it took to make.

        Raises:
            PlanError: it stores parameters otherwise than this module does.
        """


def declared(captured: CapturedGraph, plan: Plan, mesh: Mesh) -> tuple[dict[str, Layout], dict[str, str]]:
    """(storage layout of each parameter, dtype of each parameter and buffer), under each of its names."""
    stored = storage_layouts({name: p.layout for name, p in plan.parameters.items()}, mesh)
    layouts = {n: stored[p.name] for p in captured.parameters for n in (p.name, *p.aliases) if p.name in stored}
    dtypes = {n: p.meta.dtype for p in captured.parameters for n in (p.name, *p.aliases)}
    dtypes |= {n: b.meta.dtype for b in captured.buffers for n in (b.name, *b.aliases)}
    return layouts, dtypes

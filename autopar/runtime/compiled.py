"""What every compiled module can do, however it runs: its state, its seed, and what it refuses."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from autopar.errors import InputError, UserError
from autopar.ir.account import RunReport, StagesReport
from autopar.ir.layout import Kind, Layout
from autopar.ir.plan import Plan
from autopar.runtime.agreement import agree_among
from autopar.runtime.calls import Planned
from autopar.runtime.comm import Communicator
from autopar.runtime.parameters import unwrap
from autopar.runtime.programs import Programs

Module = TypeVar("Module", bound="CompiledModule")


class CompiledModule(nn.Module):
    """A model compiled for one rank. `_autopar` holds all but its parameters, so that no submodule's name is taken."""

    _autopar: Programs[Any, Any]

    def _begin(self, model: nn.Module) -> None:
        """Take the modes of the model, and of its capture, once the parameters are there."""
        self.training = model.training
        if self.training != self._autopar.captured.training:
            self.train(self._autopar.captured.training)
        self._autopar.modules = dict(self.named_modules())

    @property
    def plan(self) -> Plan:
        """The plan that this module was compiled with; it fixes how parameters are stored."""
        return self._autopar.plan

    @property
    def plans(self) -> tuple[Planned, ...]:
        """Every program at hand: for which calls, its plan, and the time that making it again took."""
        return tuple(p.planned for p in self._autopar.programs.values())

    @property
    def replans(self) -> int:
        """How often a call made this module capture again."""
        return self._autopar.replans

    @property
    def source(self) -> str:
        """The emitted Python of `plan`."""
        return self._autopar.source.text

    @property
    def communicator(self) -> Communicator:
        """This rank's `rt`."""
        return self._autopar.rt

    @property
    def storage_layouts(self) -> dict[str, Layout]:
        """How each parameter is stored, by its first name."""
        return dict(self._autopar.weights.layouts)

    def manual_seed(self, seed: int) -> None:
        """Draw from another seed, from its start. Collective. `Options.seed` is the first one."""
        self.set_rng_state({"seed": seed, "step": 0})

    def get_rng_state(self) -> dict[str, int]:
        """Where the random ops are: the seed, and how many calls have drawn. The same on every rank."""
        return {"seed": self._autopar.seed, "step": self._autopar.step}

    def set_rng_state(self, state: Mapping[str, int]) -> None:
        """Go on from a state of `get_rng_state`, of this module or of one compiled otherwise. Collective.

        Raises:
            InputError: it isn't such a state.
            PlanError: ranks were given different ones.
        """
        wanted = {"seed", "step"}
        if set(state) != wanted or not all(type(v) is int and -(2**63) <= v < 2**63 for v in state.values()):
            raise InputError(f"an rng state has whole numbers of 64 bits for 'seed' and 'step'; got {dict(state)}")
        agree_among(self._autopar.rt, str(sorted(state.items())), f"rng state {dict(state)}")
        self._autopar.seed, self._autopar.step = state["seed"], state["step"]

    def _tell(self, found: RunReport | StagesReport, rank: int, path: str | Path | None) -> None:
        """Print a report, and write it where a path is given: rank 0 does."""
        if rank == 0:
            print(found)
            if path is not None:
                found.save(path)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> Tensor:  # fmt: skip
        """As torch.nn.utils.clip_grad_norm_ on the whole model's gradients, wherever they are. Collective.

        Gives their norm before clipping, the same on every rank, in float32 or wider.

        Raises:
            UserError: `norm_type` is not above 0; it may be infinite.
            RuntimeError: `error_if_nonfinite`, and the norm is infinite or NaN.
        """
        if not norm_type > 0:
            raise UserError(f"clip_grad_norm_ with norm_type {norm_type}; wanted a number above 0, or infinity")
        total = self._gradient_norm(norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(total)):
            raise RuntimeError(f"the norm of order {norm_type} of the gradients is {float(total)}: nothing is clipped")
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for parameter in self._autopar.weights.parameters.values():
            if parameter.grad is not None:
                unwrap(parameter.grad).mul_(factor)
        return total

    def _gradient_norm(self, order: float) -> Tensor:
        """Of all gradients, each entry counted once. One collective for all that the same axes cut."""
        state = self._autopar
        largest = order == math.inf
        dtype = torch.float64 if torch.float64 in state.weights.dtypes.values() else torch.float32
        found: dict[tuple[str, ...], list[Tensor]] = {(): [torch.zeros((), dtype=dtype, device=state.rt.device)]}
        for name, parameter in state.weights.parameters.items():
            if parameter.grad is not None and self._counts(name):
                layout = state.weights.layouts[name]
                cut = tuple(axis for axis in layout.axes if layout.on(axis).kind is Kind.SHARD)
                found.setdefault(cut, []).append(_power(unwrap(parameter.grad), order, dtype))
        join = state.rt.all_reduce_max if largest else state.rt.all_reduce
        totals = torch.stack([join(_together(own, largest), cut) for cut, own in found.items()])
        total = self._over_stages(_together(totals, largest), largest)
        return total if largest else total.pow(1.0 / order)

    def _counts(self, name: str) -> bool:
        """True if this rank's copy of a parameter is the one that norms are made of, or a piece of it."""
        return True

    def _over_stages(self, power: Tensor, largest: bool) -> Tensor:
        """What all stages' gradients come to."""
        return power

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole model's state as plain tensors on every rank; loads strictly into the plain model. Collective."""
        return self._autopar.weights.full_state_dict()

    def load_full_state_dict(self, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
        """Take this rank's pieces of a plain state dict."""
        self._autopar.weights.load_full_state_dict(state, strict=strict)

    def load_safetensors(self, paths: Path | str | list[Path | str], *, strict: bool = True) -> None:
        """Take this rank's pieces from safetensors files, reading only what it needs."""
        self._autopar.weights.load_safetensors(paths, strict=strict)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """A state dict of a compiled module (pieces), or of the plain model (whole tensors), each key as it comes."""
        if assign:
            raise UserError("load_state_dict(assign=True): a compiled module keeps its own pieces; leave assign out")
        return self._autopar.weights.load_state_dict(state_dict, strict=strict)

    def _apply(self: Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Module:
        """What `.to()`, `.half()`, `.cuda()` and the like do to every tensor: nothing, or an error if it were a change.

        Dtypes and devices are part of the program.
        """
        tensors = (*self._autopar.weights.parameters.values(), *self._autopar.weights.buffers.values())
        for dtype, device in {(t.dtype, t.device) for t in map(unwrap, tensors)}:
            made = fn(torch.empty(0, dtype=dtype, device=device))
            if made.dtype != dtype:
                raise UserError(
                    f"a compiled module keeps its dtypes ({dtype} would become {made.dtype}): convert the plain model "
                    "before compile, or compile with Options(precision='bf16', 'fp16' or 'fp64')"
                )
            if made.device != device:
                raise UserError(
                    f"a compiled module keeps its device ({device}, asked for {made.device}): each rank's device is "
                    "decided where ranks are started; leave the call out"
                )
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UserError(
            "a compiled module cannot be pickled (it holds this rank's process groups): save module.state_dict(), or "
            "module.full_state_dict() for the plain model, and compile again"
        )

    def __deepcopy__(self: Module, memo: dict[int, Any]) -> Module:
        """A module with weights of its own that runs the same programs (an average of the weights, for example)."""
        new = type(self).__new__(type(self))
        nn.Module.__init__(new)
        memo[id(self)] = new
        for key, value in self.__dict__.items():
            if key != "_autopar":
                new.__dict__[key] = copy.deepcopy(value, memo)
        new._autopar = self._autopar.copied(new)
        return new

    def become(self, other: nn.Module) -> None:
        """Make `other` this module: the same object to whoever holds it. This one is not to be used any more."""
        other.__dict__ = self.__dict__
        other.__class__ = type(self)
        self._autopar.root(other)


def _power(piece: Tensor, order: float, dtype: torch.dtype) -> Tensor:
    """The sum of |x|^order over a tensor's entries; of order infinity, the largest."""
    real = piece.abs() if piece.is_complex() else piece
    if order == math.inf:
        return real.abs().max().to(dtype) if real.numel() else real.new_zeros((), dtype=dtype)
    norm: Tensor = torch.linalg.vector_norm(real, order, dtype=dtype)
    return norm.pow(order)


def _together(powers: Sequence[Tensor] | Tensor, largest: bool) -> Tensor:
    whole = powers if isinstance(powers, Tensor) else torch.stack([*powers])
    return whole.max() if largest else whole.sum()

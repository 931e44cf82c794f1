"""`AdamW` and `SGD`: torch's own in arguments, results and state, with the update of all parameters in one pass.

The state is torch's, under torch's names, so `state_dict` loads into torch's optimizer and torch's into this one. What
torch does another way (`amsgrad`, `differentiable`) is refused.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import UserError
from autopar.optim import update
from autopar.optim.update import Item, Rule
from autopar.runtime.parameters import unwrap
from autopar.runtime.philox import Space, Stream, space
from autopar.runtime.torch_private import piece_of

MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What torch's optimizers don't have.

    Attributes:
        state_dtype: of the moments; None: the parameter's.
        stochastic_rounding: of what is stored in bfloat16.
        seed: of that rounding.
        copies: parameter -> a tensor of its shape that gets the new value too, in its own dtype.
    """

    state_dtype: torch.dtype | None = None
    stochastic_rounding: bool = False
    seed: int = 0
    copies: Mapping[Tensor, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.state_dtype not in (None, torch.float64, torch.float32, torch.bfloat16):
            raise UserError(f"state_dtype is {self.state_dtype}; wanted torch.float32, torch.bfloat16 or None")
        for parameter, copy in self.copies.items():
            if copy.shape != parameter.shape:
                raise UserError(f"a copy has shape {list(copy.shape)}, its parameter {list(parameter.shape)}")


class _OnePass(torch.optim.Optimizer):
    """What both share. `extras`: see there."""

    extras: Extras
    moments: tuple[str, ...]
    _step_supports_amp_scaling = True
    """torch.amp.GradScaler leaves gradients scaled, and says by `grad_scale` and `found_inf` what to do."""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "extras": self.extras}  # type: ignore[no-untyped-call]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """A state of this class or of torch's. Moments keep their precision where `state_dtype` says so."""
        super().load_state_dict(dict(state_dict))
        if self.extras.state_dtype is None:
            return  # torch has given them the parameter's dtype
        given = state_dict["state"]
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, index in zip(group["params"], saved["params"], strict=True):
                for name in self.moments:
                    if isinstance(value := given.get(index, {}).get(name), Tensor):
                        kept = value.to(parameter.device, self.extras.state_dtype, copy=True)
                        self.state[parameter][name] = kept

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, *, max_norm: float | None = None
    ) -> Any:
        """One update.

        Args:
            closure: computes the loss again, as torch's optimizers take it.
            max_norm: gradients count as if clipped to this norm all together, as torch.nn.utils.clip_grad_norm_ does;
                they are left as they are. Collective if they are spread.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if found_inf is not None and found_inf.item():
            return loss
        factor = self._factor(max_norm)
        back: list[tuple[Tensor, Tensor]] = []
        for at, group in enumerate(self.param_groups):
            for unknown in ("amsgrad", "differentiable"):
                if group.get(unknown):
                    raise UserError(f"{unknown} is not offered here; take torch.optim.{type(self).__name__}")
            named = group.get("param_names") or [f"{at}.{i}" for i in range(len(group["params"]))]
            pairs = zip(group["params"], named, strict=True)
            items = [self._item(group, p, name, back) for p, name in pairs if p.grad is not None]
            self._update(group, items, -factor if group["maximize"] else factor)
        for given, arranged in back:
            given.copy_(arranged)
        return loss

    def _factor(self, max_norm: float | None) -> float:
        """What gradients are multiplied by: unscaled, then clipped."""
        scale: Tensor | None = getattr(self, "grad_scale", None)
        factor = 1.0 if scale is None else 1.0 / float(scale)
        if max_norm is None:
            return factor
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients)) * factor
        return factor * min(1.0, max_norm / (norm + 1e-6))  # as torch clips

    def _update(self, group: dict[str, Any], items: list[Item], factor: float) -> None:
        raise NotImplementedError

    def _item(self, group: dict[str, Any], p: Tensor, name: str, back: list[tuple[Tensor, Tensor]]) -> Item:
        raise NotImplementedError

    def _zeros(self, p: Tensor) -> Tensor:
        return torch.zeros_like(p, dtype=self.extras.state_dtype or p.dtype, memory_format=torch.preserve_format)

    def _arranged(
        self, p: Tensor, name: str, moments: tuple[Tensor | None, Tensor | None], numbers: tuple[float, float],
        step: int, back: list[tuple[Tensor, Tensor]],
    ) -> Item:  # fmt: skip
        """The item, its tensors in one order of memory; those that had another go back into place from `back`."""
        assert p.grad is not None
        gradient = p.grad
        if gradient.is_sparse:
            raise UserError(f"parameter {name} has a sparse gradient: take torch.optim.SGD or SparseAdam")
        if isinstance(p, DTensor) and isinstance(gradient, DTensor) and gradient.placements != p.placements:
            gradient = gradient.redistribute(p.device_mesh, p.placements)
        noise = self._noise(p, name, step) if self.extras.stochastic_rounding else None
        parameter = _plain(p)
        order = parameter if _dense(parameter) and noise is None else torch.empty(parameter.shape, device="meta")
        strides = order.stride()

        def placed(x: Tensor | None, written: bool = True) -> Tensor | None:
            if x is None or (x := _plain(x)).stride() == strides:
                return x
            arranged = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)
            if written:
                back.append((x, arranged))
            return arranged

        at, first, second = placed(parameter), *map(placed, moments)
        towards, copy = placed(gradient, written=False), placed(self.extras.copies.get(p))
        assert at is not None and towards is not None
        return Item(at, towards, first, second, copy, *numbers, noise)

    def _noise(self, p: Tensor, name: str, step: int) -> tuple[Stream, Space]:
        """The stream of a parameter at a step, and the numbers of its elements in the whole."""
        text = f"{self.extras.seed}|{name}"
        key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        whole, (shape, starts) = tuple(p.shape), (tuple(p.shape), (0,) * p.ndim)
        if isinstance(p, DTensor):
            shape, starts = piece_of(p)
        return Stream(key, step), space(whole, tuple(starts), tuple(shape))


def _plain(x: Tensor) -> Tensor:
    """This rank's piece, of real numbers."""
    x = unwrap(x.detach())
    return torch.view_as_real(x) if x.is_complex() else x


def _dense(x: Tensor) -> bool:
    """Whether its elements lie in memory one after another, in some order."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


class AdamW(_OnePass, torch.optim.AdamW):
    """torch.optim.AdamW in one pass; see `Extras` for what it has besides.

    Raises:
        UserError: `amsgrad` is asked for.
    """

    moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, *, maximize: bool = False, state_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False, seed: int = 0, copies: Mapping[Tensor, Tensor] | None = None,
    ) -> None:  # fmt: skip
        torch.optim.AdamW.__init__(self, params, lr, betas, eps, weight_decay, maximize=maximize)
        self.extras = Extras(
            state_dtype=state_dtype, stochastic_rounding=stochastic_rounding, seed=seed, copies=copies or {}
        )

    def _update(self, group: dict[str, Any], items: list[Item], factor: float) -> None:
        beta1, beta2 = map(float, group["betas"])
        keep = 1 - float(group["lr"]) * group["weight_decay"]
        update.adamw(items, Rule(factor, keep, 1 - beta1, beta2, 1 - beta2, group["eps"]))

    def _item(self, group: dict[str, Any], p: Tensor, name: str, back: list[tuple[Tensor, Tensor]]) -> Item:
        state = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)
            state.update((moment, self._zeros(p)) for moment in self.moments)
        state["step"] += 1
        step = int(state["step"])
        beta1, beta2 = map(float, group["betas"])
        numbers = float(group["lr"]) / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step)
        return self._arranged(p, name, (state["exp_avg"], state["exp_avg_sq"]), numbers, step, back)


class SGD(_OnePass, torch.optim.SGD):
    """torch.optim.SGD in one pass; see `Extras` for what it has besides."""

    moments = ("momentum_buffer",)

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-3, momentum: float = 0, dampening: float = 0,
        weight_decay: float = 0, nesterov: bool = False, *, maximize: bool = False,
        state_dtype: torch.dtype | None = None, stochastic_rounding: bool = False, seed: int = 0,
        copies: Mapping[Tensor, Tensor] | None = None,
    ) -> None:  # fmt: skip
        torch.optim.SGD.__init__(self, params, lr, momentum, dampening, weight_decay, nesterov, maximize=maximize)
        self.extras = Extras(
            state_dtype=state_dtype, stochastic_rounding=stochastic_rounding, seed=seed, copies=copies or {}
        )

    def _update(self, group: dict[str, Any], items: list[Item], factor: float) -> None:
        rule = Rule(
            factor, float(group["weight_decay"]), 1 - group["dampening"], group["momentum"], float(group["nesterov"])
        )
        update.sgd(items, rule)

    def _item(self, group: dict[str, Any], p: Tensor, name: str, back: list[tuple[Tensor, Tensor]]) -> Item:
        state, step = self.state[p], 0
        momentum = state.get("momentum_buffer")
        begun = momentum is not None
        if group["momentum"] and not begun:
            momentum = state["momentum_buffer"] = self._zeros(p)
        if self.extras.stochastic_rounding:  # torch's keeps no count; this one is of the rounding alone
            step = int(state.get("step", 0)) + 1
            state["step"] = torch.tensor(float(step))
        moments = (momentum if group["momentum"] else None, None)
        return self._arranged(p, name, moments, (float(group["lr"]), float(begun)), step, back)

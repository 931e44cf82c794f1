"""Does a plan compute what one device computes? Loss, every gradient, and the state after three AdamW steps.

Ranks are threads of this process, so that 16 need no processes. The optimizer is AdamW with torch's default rate,
1e-3, and a large eps, 1e-4. An update turns a gradient's rounding error e into at most rate / eps · e: with a small
eps the noise of gradients that are zero in exact arithmetic (a key's bias under softmax) would become steps of the
full rate; with a rate of 1e-2, float32 states of one device itself and of the same ops in another order differ by up
to 5e-5. A gradient that is wrong still moves its parameter by about the rate, a hundred tolerances and more.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import InputError
from autopar.tracer import Wide
from autopar.verification.bisect import Bisection

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
LEARNING_RATE, EPS = 1e-3, 1e-4
Tensors = dict[str, Tensor]
DRAWN_ALIKE = (
    "the model draws random numbers: one device ran its captured graph, which draws what every plan draws "
    "(docs/randomness.md); eager PyTorch draws others"
)


@dataclass(frozen=True, slots=True)
class Row:
    """One compared tensor: `error` is the largest difference, on any rank, over the largest entry of the reference.

    `rank`: the first that has this error.
    """

    name: str
    layout: str
    error: float
    tolerance: float
    rank: int = 0

    @property
    def ok(self) -> bool:
        """Within tolerance; NaN is not."""
        return self.error <= self.tolerance

    def __str__(self) -> str:
        mark = "ok  " if self.ok else "DIFF"
        rank = "" if self.ok else f" on rank {self.rank}"
        return f"{mark} {self.name:60} {self.layout:20} {self.error:9.2e} (tolerance {self.tolerance:.0e}){rank}"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was compared, in the order loss, gradients, their norm, parameters, optimizer state, buffers.

    `bisection`: where the first difference comes from, if that was asked for. `note`: what one device ran, if that
    was not the model itself.
    """

    ranks: int
    rows: tuple[Row, ...]
    bisection: Bisection | None = None
    note: str = ""

    @property
    def ok(self) -> bool:
        """True if every tensor agrees."""
        return bool(self.rows) and all(r.ok for r in self.rows)

    @property
    def first_difference(self) -> Row | None:
        """The first tensor that differs, or None."""
        return next((r for r in self.rows if not r.ok), None)

    def __str__(self) -> str:
        wrong = [r for r in self.rows if not r.ok]
        if not wrong:
            worst = max(self.rows, key=lambda r: r.error / (r.tolerance or 1.0))
            return (
                f"{len(self.rows)} tensors equal one device's on {self.ranks} ranks; "
                f"largest error {worst.error:.1e} in {worst.name}{f'; {self.note}' if self.note else ''}"
            )
        more = [self.note] if self.note else []
        more += [str(self.bisection)] if self.bisection is not None else []
        return "\n".join(
            [f"{len(wrong)} of {len(self.rows)} tensors differ on {self.ranks} ranks:", *map(str, wrong[:20]), *more]
        )


@dataclass(frozen=True, slots=True)
class Trained:
    """What three steps left: whole tensors by name. `gradients` are of the first step, None where None, and `norm` is
    theirs, as clipping takes it."""

    losses: tuple[float, ...]
    gradients: dict[str, Tensor | None]
    norm: float
    state: Tensors
    optimizer: Tensors


def losses_of(result: Any) -> list[Tensor]:
    """Scalar floating tensors with a gradient in a model's return value, in order; else all with a gradient."""
    found = [x for x in _leaves(result) if x.requires_grad and x.is_floating_point()]
    scalars = [x for x in found if x.dim() == 0]
    return scalars or found


def _leaves(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        return [x for v in tree.values() for x in _leaves(v)]
    if isinstance(tree, (tuple, list)):
        return [x for v in tree for x in _leaves(v)]
    if hasattr(tree, "__dataclass_fields__"):
        return [x for name in tree.__dataclass_fields__ for x in _leaves(getattr(tree, name))]
    return []


def objective(result: Any) -> Tensor:
    """One scalar to differentiate: the sum of the losses; of outputs that are no scalars, of their squares."""
    total = torch.zeros((), dtype=torch.float64)
    losses = losses_of(result)
    if not losses:
        raise InputError("the model returns nothing that can be differentiated; pass labels so that it returns a loss")
    for x in losses:
        total = total + (x if x.dim() == 0 else x.pow(2).sum() / x.numel()).to(torch.float64)
    return total


def train(
    module: nn.Module, call: Callable[[nn.Module], Any], whole: Callable[[str, Tensor], Tensor], steps: int,
    full_state: Callable[[], Tensors],
) -> Trained:  # fmt: skip
    """Run `steps` AdamW steps and gather what they left. `whole(name, piece)` joins a parameter-like piece."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, eps=EPS, weight_decay=0.01)
    losses = []
    gradients: dict[str, Tensor | None] = {}
    norm = 0.0
    for step in range(steps):
        loss = objective(call(module))
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()))
        if step == 0:
            gradients = {
                name: None if p.grad is None else whole(name, p.grad.detach()).clone()
                for name, p in module.named_parameters()
            }
            norm = _gradient_norm(module)
        optimizer.step()
        optimizer.zero_grad()
    moments = {
        f"{name}.{key}": whole(name, value)
        for name, p in module.named_parameters()
        for key, value in sorted(optimizer.state.get(p, {}).items())
        if isinstance(value, Tensor) and value.dim() == p.dim() and value.dim() > 0
    }
    return Trained(tuple(losses), gradients, norm, full_state(), moments)


def _gradient_norm(module: nn.Module) -> float:
    """As clipping takes it, with nothing clipped; a compiled module knows where its gradients are."""
    clip = getattr(module, "clip_grad_norm_", None) or partial(torch.nn.utils.clip_grad_norm_, module.parameters())
    return float(clip(math.inf))


def reference(model: nn.Module, call: Callable[[nn.Module], Any], steps: int) -> Trained:
    """The plain model, trained in one process on the whole batch. The model given is left as it is.

    A float64 model is proven in float64 throughout, also where its code says float32.
    """
    plain = copy.deepcopy(model)
    wide = any(p.dtype is torch.float64 for p in plain.parameters())
    with Wide() if wide else nullcontext():
        return train(plain, call, lambda _, x: x, steps, lambda: dict(plain.state_dict()))


def compare(expected: Trained, found: list[Trained], layouts: Mapping[str, str]) -> VerifyReport:
    """Every rank's results against the reference: of each tensor the worst rank's."""
    by_rank = [_compared(expected, mine, layouts) for mine in found]
    rows = []
    for same in zip(*by_rank, strict=True):
        worst = max(range(len(same)), key=lambda r: (_badness(same[r].error), -r))
        rows.append(replace(same[worst], rank=worst))
    return VerifyReport(len(found), tuple(rows))


def _badness(error: float) -> float:
    """NaN is as wrong as can be."""
    return float("inf") if math.isnan(error) else error


def _compared(expected: Trained, mine: Trained, layouts: Mapping[str, str]) -> list[Row]:
    floats = [x.dtype for x in expected.state.values() if x.is_floating_point()]
    loose = max((TOLERANCE.get(d, 1e-5) for d in floats), default=1e-5)
    rows = []
    for step, (a, b) in enumerate(zip(expected.losses, mine.losses, strict=True)):
        rows.append(Row(f"loss of step {step + 1}", "", abs(a - b) / max(abs(a), 1e-30), loose))
    for name, gradient in expected.gradients.items():
        other = mine.gradients.get(name)
        label = f"gradient of {name}"
        if gradient is None or other is None:
            rows.append(Row(label, layouts.get(name, ""), 0.0 if gradient is other else float("inf"), loose))
        else:
            rows.append(_row(label, layouts.get(name, ""), gradient, other, zero=_scale(expected)))
    rows.append(Row("norm of the gradients", "", abs(expected.norm - mine.norm) / max(expected.norm, 1e-30), loose))
    for kind, wanted, given in (("", expected.state, mine.state), ("optimizer ", expected.optimizer, mine.optimizer)):
        for name, tensor in wanted.items():
            found = given.get(name)
            label, layout = f"{kind}{name}", layouts.get(name.rpartition(".")[0] if kind else name, "")
            if found is None or found.shape != tensor.shape:
                rows.append(Row(label, layout, float("inf"), loose))
            else:
                zero = _largest_alike(name, wanted) if kind else _scale(expected) * LEARNING_RATE / EPS
                rows.append(_row(label, layout, tensor, found, zero))
    return rows


def _scale(expected: Trained) -> float:
    """Largest gradient entry of the whole model."""
    return max((float(g.abs().max()) for g in expected.gradients.values() if g is not None and g.numel()), default=0.0)


def _largest_alike(name: str, moments: Tensors) -> float:
    """Largest entry of the optimizer's moments of the same kind ("exp_avg") over all parameters."""
    kind = name.rpartition(".")[2]
    alike = (x for n, x in moments.items() if n.rpartition(".")[2] == kind)
    return max((float(x.abs().max()) for x in alike if x.numel()), default=0.0)


def _row(name: str, layout: str, a: Tensor, b: Tensor, zero: float = 0.0) -> Row:
    """`zero`: the largest entry of all tensors of this kind; of a parameter, what an update makes of a gradient's. One
    whose entries are all below the rounding noise of it is zero in exact arithmetic (the bias of keys, a bias before
    batch norm) and has no scale of its own."""
    if a.numel() == 0 or not (a.is_floating_point() or a.is_complex()):
        return Row(name, layout, 0.0 if bool(torch.equal(a, b)) else float("inf"), 0.0)
    tolerance = TOLERANCE.get(a.dtype, 1e-5)
    noise = zero * torch.finfo(a.dtype).eps * 1e2
    scale = max(float(a.abs().max()), noise / tolerance, 1e-30)
    return Row(name, layout, float((a.double() - b.double()).abs().max()) / scale, tolerance)

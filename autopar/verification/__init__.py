"""Does a plan compute what one device computes? Loss, every gradient, and the state after three optimizer steps.

Ranks are threads of this process, so that 16 need no processes. The optimizer is AdamW with torch's default rate,
1e-3, and a large eps, 1e-4. An update turns a gradient's rounding error e into at most rate / eps · e: with a small
eps the noise of gradients that are zero in exact arithmetic (a key's bias under softmax) would become steps of the
full rate; with a rate of 1e-2, float32 states of one device itself and of the same ops in another order differ by up
to 5e-5. A gradient that is wrong still moves its parameter by about the rate, a hundred tolerances and more.

In half precision one device is the model itself with its parameters cast anew in every call, the optimizer working on
those that are stored (`narrowed.py`). In float16 losses are scaled. Where rounding decides which way a function goes
(the sign under a ReLU), or a tensor is nothing but rounding, no order of sums has more claim than another: so the model
is also trained as it is stored, and a tensor may differ by `SPREAD` times what half precision alone makes of it, where
that is more than the tolerance. Such tolerances would let a lost master weight pass. So one device makes each rank's
updates once more, of that rank's own gradients and in the dtype that parameters are stored in, to its tolerance.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import InputError
from autopar.ir.options import COMPUTE_DTYPE, HALF, Precision
from autopar.tracer import Wide
from autopar.verification.bisect import Bisection

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
LEARNING_RATE, EPS = 1e-3, 1e-4
SPREAD = 5.0
NOISE, NOISE_HALF = 1e2, 0.1
"""Rounding errors of the largest entry that a tensor which is zero in exact arithmetic may hold."""
LOSS_SCALE: Mapping[Precision, float] = {"fp16": 2.0**8}
"""So much the losses are scaled, that float16 holds the gradients of small models."""
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
    """What was compared, in the order loss, gradients, their norm, parameters, optimizer state, buffers, updates.

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
    theirs, as clipping takes it.

    In half precision also parameters as they were at the `start`, and `every` step's gradients.
    """

    losses: tuple[float, ...]
    gradients: dict[str, Tensor | None]
    norm: float
    state: Tensors
    optimizer: Tensors
    start: Tensors = field(default_factory=dict)
    every: tuple[dict[str, Tensor | None], ...] = ()


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
    full_state: Callable[[], Tensors], precision: Precision = "fp32",
) -> Trained:  # fmt: skip
    """Run `steps` AdamW steps and gather what they left. `whole(name, piece)` joins a parameter-like piece."""
    scale = LOSS_SCALE.get(precision, 1.0)
    optimizer = _optimizer(module.parameters())
    start = {name: x.clone() for name, x in full_state().items()} if precision in HALF else {}
    losses = []
    every: list[dict[str, Tensor | None]] = []
    norm = 0.0
    for step in range(steps):
        loss = objective(call(module))
        (loss * scale).backward()  # type: ignore[no-untyped-call]
        for p in module.parameters():
            if p.grad is not None and scale != 1:
                p.grad.div_(scale)
        losses.append(float(loss.detach()))
        if step == 0 or precision in HALF:
            every.append(
                {
                    name: None if p.grad is None else whole(name, p.grad.detach()).clone()
                    for name, p in module.named_parameters()
                }
            )
        if step == 0:
            norm = _gradient_norm(module)
        optimizer.step()
        optimizer.zero_grad()
    moments = {
        f"{name}.{key}": whole(name, value)
        for name, p in module.named_parameters()
        for key, value in sorted(optimizer.state.get(p, {}).items())
        if isinstance(value, Tensor) and value.dim() == p.dim() and value.dim() > 0
    }
    return Trained(
        tuple(losses), every[0], norm, full_state(), moments, start, tuple(every) if precision in HALF else ()
    )


def _gradient_norm(module: nn.Module) -> float:
    """As clipping takes it, with nothing clipped; a compiled module knows where its gradients are."""
    clip = getattr(module, "clip_grad_norm_", None) or partial(torch.nn.utils.clip_grad_norm_, module.parameters())
    return float(clip(math.inf))


def _optimizer(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, eps=EPS, weight_decay=0.01)


def reference(
    model: nn.Module, call: Callable[[nn.Module], Any], steps: int, precision: Precision = "fp32"
) -> Trained:  # fmt: skip
    """The plain model, trained in one process on the whole batch. The model given is left as it is.

    A float64 model is proven in float64 throughout, also where its code says float32.
    """
    plain = copy.deepcopy(model)
    wide = precision not in HALF and any(p.dtype is torch.float64 for p in plain.parameters())
    with Wide() if wide else nullcontext():
        return train(plain, call, lambda _, x: x, steps, lambda: dict(plain.state_dict()), precision)


def compare(
    expected: Trained, found: list[Trained], layouts: Mapping[str, str], precision: Precision = "fp32",
    exact: Trained | None = None,
) -> VerifyReport:  # fmt: skip
    """Every rank's results against the reference: of each tensor the worst rank's.

    `exact`: in half precision, what the same steps leave without it.
    """
    by_rank = [_compared(expected, mine, layouts, precision) for mine in found]
    spread = _spread(_compared(expected, exact, layouts, precision)) if exact else {}
    rows = []
    for same in zip(*by_rank, strict=True):
        worst = max(range(len(same)), key=lambda r: (_badness(same[r].error), -r))
        row = replace(same[worst], rank=worst)
        rows.append(replace(row, tolerance=max(row.tolerance, spread.get(row.name, 0.0))))
    return VerifyReport(len(found), tuple(rows))


def _spread(rows: list[Row]) -> dict[str, float]:
    """How far each tensor may be from one device's, of what half precision alone makes of it there.

    A tensor that it happens to have left nearly alone counts as the median of its kind.
    """
    kinds: dict[str, list[float]] = {}
    for row in rows:
        kinds.setdefault(_kind(row), []).append(_badness(row.error))
    return {r.name: SPREAD * max(r.error, statistics.median(kinds[_kind(r)])) for r in rows}


def _kind(row: Row) -> str:
    """ "loss", "gradient", "optimizer", or "" of parameters and buffers."""
    word = row.name.partition(" ")[0]
    return word if word != row.name else ""


def _badness(error: float) -> float:
    """NaN is as wrong as can be."""
    return float("inf") if math.isnan(error) else error


def _compared(expected: Trained, mine: Trained, layouts: Mapping[str, str], precision: Precision) -> list[Row]:
    floats = [x.dtype for x in expected.state.values() if x.is_floating_point()]
    half: torch.dtype | None = getattr(torch, COMPUTE_DTYPE[precision]) if precision in HALF else None
    loose = max((TOLERANCE.get(half or d, 1e-5) for d in floats), default=1e-5)
    rows = []
    for step, (a, b) in enumerate(zip(expected.losses, mine.losses, strict=True)):
        rows.append(Row(f"loss of step {step + 1}", "", abs(a - b) / max(abs(a), 1e-30), loose))
    for name, gradient in expected.gradients.items():
        other = mine.gradients.get(name)
        label = f"gradient of {name}"
        if gradient is None or other is None:
            rows.append(Row(label, layouts.get(name, ""), 0.0 if gradient is other else float("inf"), loose))
        else:
            rows.append(_row(label, layouts.get(name, ""), gradient, other, half, _scale(expected)))
    rows.append(Row("norm of the gradients", "", abs(expected.norm - mine.norm) / max(expected.norm, 1e-30), loose))
    for kind, wanted, given in (("", expected.state, mine.state), ("optimizer ", expected.optimizer, mine.optimizer)):
        for name, tensor in wanted.items():
            found = given.get(name)
            label, layout = f"{kind}{name}", layouts.get(name.rpartition(".")[0] if kind else name, "")
            if found is None or found.shape != tensor.shape:
                rows.append(Row(label, layout, float("inf"), loose))
            else:
                zero = _largest_alike(name, wanted) if kind else _scale(expected) * LEARNING_RATE / EPS
                rows.append(_row(label, layout, tensor, found, half, zero))
    return [*rows, *_updates(mine, layouts)]


def _scale(expected: Trained) -> float:
    """Largest gradient entry of the whole model."""
    return max((float(g.abs().max()) for g in expected.gradients.values() if g is not None and g.numel()), default=0.0)


def _updates(mine: Trained, layouts: Mapping[str, str]) -> list[Row]:
    """A rank's parameters against what one device's optimizer makes of its gradients, as precise as they are stored."""
    if not mine.every:
        return []
    held = {name: nn.Parameter(mine.start[name].clone()) for name in mine.every[0]}
    optimizer = _optimizer(held.values())
    for gradients in mine.every:
        for name, gradient in gradients.items():
            held[name].grad = gradient
        optimizer.step()
    return [
        _row(f"update of {name}", layouts.get(name, ""), p.detach(), mine.state[name], None, 0.0)
        for name, p in held.items()
    ]


def _largest_alike(name: str, moments: Tensors) -> float:
    """Largest entry of the optimizer's moments of the same kind ("exp_avg") over all parameters."""
    kind = name.rpartition(".")[2]
    alike = (x for n, x in moments.items() if n.rpartition(".")[2] == kind)
    return max((float(x.abs().max()) for x in alike if x.numel()), default=0.0)


def _row(name: str, layout: str, a: Tensor, b: Tensor, half: torch.dtype | None, zero: float) -> Row:
    """`zero`: the largest entry of all tensors of this kind; of a parameter, what an update makes of a gradient's. One
    whose entries are all below the rounding noise of it is zero in exact arithmetic (the bias of keys, a bias before
    batch norm) and has no scale of its own."""
    if a.numel() == 0 or not (a.is_floating_point() or a.is_complex()):
        return Row(name, layout, 0.0 if bool(torch.equal(a, b)) else float("inf"), 0.0)
    if a.dtype != b.dtype:
        return Row(name, layout, float("inf"), 0.0)
    used = half or a.dtype
    tolerance = TOLERANCE.get(used, 1e-5)
    noise = zero * torch.finfo(used).eps * (NOISE if half is None else NOISE_HALF)
    scale = max(float(a.abs().max()), noise / tolerance, 1e-30)
    return Row(name, layout, float((a.double() - b.double()).abs().max()) / scale, tolerance)

"""Is it the same training? Runs a plan with threads as ranks beside the plain model, and compares every tensor.

Both sides take the same steps from the same weights on the same batch. The parallel side's pieces are joined by their
layouts; replicas that differ are a failure of their own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autopar.ir.graph import CapturedGraph
from autopar.ir.layout import Kind, Layout, local_offset, replicated
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.plan import Plan
from autopar.ir.program import Source
from autopar.runtime.comm import Alone, Communicator
from autopar.runtime.module import ParallelModule
from autopar.runtime.parameters import unwrap
from autopar.runtime.threads import run_threads

RELATIVE = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}
"""Tolerance by dtype, relative to the largest entry of the tensor. Integers and booleans must be equal."""

MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The optimizer of `autopar verify`."""
    return torch.optim.AdamW(parameters, lr=1e-3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a few training steps gave, as whole tensors by name, in the order in which they are made.

    Attributes:
        losses: per step, one per rank (a single one of the plain model).
        gradients: after the first backward. `parameters`, `buffers`, `state` (optimizer): after the last step.
        layouts: layout of each parameter, for messages.
        replicas: what differs between ranks that should hold the same: (name, largest difference).
    """

    losses: tuple[tuple[float, ...], ...]
    gradients: Mapping[str, Tensor | None]
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    layouts: Mapping[str, str] = field(default_factory=dict)
    replicas: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One compared tensor. `error` is the largest difference over the largest entry of the reference."""

    name: str
    layout: str
    error: float
    tolerance: float
    note: str = ""

    @property
    def equal(self) -> bool:
        """True if within tolerance."""
        return self.error <= self.tolerance

    def __str__(self) -> str:
        verdict = "ok" if self.equal else "DIFFERS"
        layout = f" ({self.layout})" if self.layout else ""
        note = f"  {self.note}" if self.note else ""
        return f"{verdict:8}{self.name}{layout}: error {self.error:.2e}, tolerance {self.tolerance:.0e}{note}"


@dataclass
class _Pieces:
    """One rank's own tensors."""

    losses: list[float]
    gradients: dict[str, Tensor | None]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    state: dict[str, Tensor]


def run_reference(
    model: nn.Module, batch: Mapping[str, Any], *, steps: int = 3, optimizer: MakeOptimizer = adamw
) -> Run:
    """The plain model on one device. The model itself is left as it was."""
    model = copy.deepcopy(model)
    found = _train(model, batch, steps, optimizer)
    return Run(
        losses=tuple((x,) for x in found.losses), gradients=found.gradients, parameters=found.parameters,
        buffers=found.buffers, state=found.state,
    )  # fmt: skip


def run_in_threads(
    captured: CapturedGraph,
    plan: Plan,
    source: Source,
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    steps: int = 3,
    optimizer: MakeOptimizer = adamw,
    timeout_s: float = 600.0,
) -> Run:
    """The plan with one thread per rank, from the model's weights. The model itself is left as it was.

    Raises:
        RankError: a rank failed or the time is over.
    """
    mesh = Mesh(axes=tuple(Axis(name=n, size=s, level=plan.mesh.levels.get(n, 0)) for n, s in plan.mesh.axes.items()))

    def one(rt: Communicator) -> tuple[_Pieces, dict[str, Layout]]:
        module = ParallelModule(captured, plan, source, model, rt)
        return _train(module, batch, steps, optimizer), module.storage_layouts

    alone = mesh.size == 1
    ranks = [one(Alone(mesh, torch.device("cpu")))] if alone else run_threads(mesh, one, timeout_s=timeout_s)
    return _joined([pieces for pieces, _ in ranks], ranks[0][1], mesh)


def _train(model: nn.Module, batch: Mapping[str, Any], steps: int, make: MakeOptimizer) -> _Pieces:
    optimizer = make(model.parameters())
    losses: list[float] = []
    gradients: dict[str, Tensor | None] = {}
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model(**batch))
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        if step == 0:
            for name, p in model.named_parameters():
                gradients[name] = None if p.grad is None else unwrap(p.grad).clone()
        optimizer.step()
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    state = {
        f"{names[p]}.{key}": unwrap(value).clone() if isinstance(value, Tensor) else torch.tensor(value)
        for p, values in optimizer.state.items()
        for key, value in values.items()
    }
    return _Pieces(
        losses=losses,
        gradients=gradients,
        parameters={name: unwrap(p.detach()).clone() for name, p in model.named_parameters()},
        buffers={name: unwrap(b).clone() for name, b in model.named_buffers()},
        state=state,
    )


def loss_of(output: Any) -> Tensor:
    """The loss in what a model returns: `.loss`, ["loss"], the first scalar of a tuple, or the tensor itself.

    A tensor that is no scalar is summed with fixed unequal weights, so that every entry's gradient counts.
    """
    if isinstance(output, Tensor):
        return output if output.ndim == 0 else _weighted(output)
    found = getattr(output, "loss", None)
    if found is None and isinstance(output, Mapping):
        found = output.get("loss")
    tensors = list(output.values()) if isinstance(output, Mapping) else output
    if found is None:
        tensors = [t for t in tensors if isinstance(t, Tensor)]
        found = next((t for t in tensors if t.ndim == 0), None)
        found = found if found is not None else _weighted(tensors[0])
    assert isinstance(found, Tensor)
    return found


def _weighted(x: Tensor) -> Tensor:
    weights = torch.linspace(-1.0, 2.0, x.numel(), dtype=x.dtype, device=x.device).view(x.shape)
    return (x * weights).sum()


def _joined(ranks: list[_Pieces], layouts: dict[str, Layout], mesh: Mesh) -> Run:
    """Whole tensors from all ranks' pieces."""
    whole = replicated(mesh)
    replicas: list[tuple[str, float]] = []

    def join(name: str, pieces: list[Tensor], layout: Layout) -> Tensor:
        full, off = gather(pieces, layout, mesh)
        if off > 0:
            replicas.append((name, off))
        return full

    def of(kind: str, layout_of: Callable[[str, Tensor], Layout]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, first in getattr(ranks[0], kind).items():
            pieces = [getattr(r, kind)[name] for r in ranks]
            found[name] = None if first is None else join(f"{kind} {name}", pieces, layout_of(name, first))
        return found

    def of_state(name: str, first: Tensor) -> Layout:
        return layouts[name.rpartition(".")[0]] if first.ndim else whole

    return Run(
        losses=tuple(zip(*[r.losses for r in ranks], strict=True)),
        gradients=of("gradients", lambda n, _: layouts[n]),
        parameters=of("parameters", lambda n, _: layouts[n]),
        buffers=of("buffers", lambda n, _: whole),
        state=of("state", of_state),
        layouts={n: str(x) for n, x in layouts.items()},
        replicas=tuple(replicas),
    )


def gather(pieces: list[Tensor], layout: Layout, mesh: Mesh) -> tuple[Tensor, float]:
    """(whole tensor, largest difference between ranks that should hold the same piece)."""
    shape = list(pieces[0].shape)
    for axis, place in zip(mesh.axes, layout.placements, strict=True):
        if place.kind is Kind.SHARD:
            shape[place.dim] *= axis.size
    full = torch.zeros(shape, dtype=pieces[0].dtype)
    seen: dict[tuple[int, ...], Tensor] = {}
    off = 0.0
    for rank, piece in enumerate(pieces):
        start = local_offset(tuple(shape), layout, mesh, rank)
        part = full[tuple(slice(a, a + n) for a, n in zip(start, piece.shape, strict=True))]
        if layout.partial:
            part += piece
        elif start in seen:
            off = max(off, _distance(piece, seen[start]))
        else:
            seen[start] = piece
            part.copy_(piece)
    return full, off


def _distance(a: Tensor, b: Tensor) -> float:
    if a.numel() == 0:
        return 0.0
    if a.dtype == torch.bool or not (a.is_floating_point() or a.is_complex()):
        return float((a != b).any())
    off = float((a - b).abs().max())
    return off if off == off else float("inf")


def compare(reference: Run, parallel: Run, *, tolerance: Mapping[str, float] | None = None) -> list[Difference]:
    """Every tensor, in the order in which a step makes them: losses, gradients, optimizer state, parameters, buffers.

    `first_difference` of the result names what went wrong first.
    """
    limits = {**RELATIVE, **(tolerance or {})}
    dtype = next(str(t.dtype).removeprefix("torch.") for t in reference.parameters.values())
    losses = _losses(reference, parallel, limits[dtype])
    first = len(parallel.losses[0])
    found = [
        *losses[:first],
        *_kind("gradient", reference.gradients, parallel.gradients, parallel, limits),
        *losses[first:],
        *_kind("optimizer", reference.state, parallel.state, parallel, limits),
        *_kind("parameter", reference.parameters, parallel.parameters, parallel, limits),
        *_kind("buffer", reference.buffers, parallel.buffers, parallel, limits),
    ]
    found += [
        Difference(name=f"replicas of {name}", layout="", error=off, tolerance=0.0, note="ranks differ")
        for name, off in parallel.replicas
    ]
    return found


def _losses(reference: Run, parallel: Run, tolerance: float) -> list[Difference]:
    found = []
    for step, ((wanted,), many) in enumerate(zip(reference.losses, parallel.losses, strict=True)):
        for rank, loss in enumerate(many):
            error = abs(loss - wanted) / max(abs(wanted), 1e-30)
            name = f"loss of step {step + 1} on rank {rank}"
            error = error if error == error else float("inf")
            found.append(Difference(name=name, layout="", error=error, tolerance=tolerance))
    return found


def _kind(
    noun: str,
    wanted: Mapping[str, Tensor | None],
    got: Mapping[str, Tensor | None],
    parallel: Run,
    limits: Mapping[str, float],
) -> list[Difference]:
    """One row per tensor. Gradients and moments below the rounding noise of the largest of their kind are zero in exact
    arithmetic (the bias of keys under softmax) and have no scale of their own: the noise is their scale."""
    noise: dict[str, float] = {}
    for name, tensor in wanted.items():
        if noun in ("gradient", "optimizer") and tensor is not None and tensor.numel() and tensor.is_floating_point():
            kind = name.rpartition(".")[2] if noun == "optimizer" else ""
            noise[kind] = max(noise.get(kind, 0.0), 100 * torch.finfo(tensor.dtype).eps * float(tensor.abs().max()))
    found = []
    for name, tensor in wanted.items():
        layout = parallel.layouts.get(name, parallel.layouts.get(name.rpartition(".")[0], ""))
        kind = name.rpartition(".")[2] if noun == "optimizer" else ""
        found.append(_difference(f"{noun} {name}", layout, tensor, got.get(name), limits, noise.get(kind, 0.0)))
    return found


def _difference(
    name: str, layout: str, wanted: Tensor | None, got: Tensor | None, limits: Mapping[str, float], noise: float
) -> Difference:
    if wanted is None or got is None:
        same = (wanted is None or not wanted.any()) and (got is None or not got.any())
        note = "" if same else f"one is missing: {'reference' if wanted is None else 'plan'}"
        return Difference(name=name, layout=layout, error=0.0 if same else float("inf"), tolerance=0.0, note=note)
    tolerance = limits.get(str(wanted.dtype).removeprefix("torch."), 0.0)
    if wanted.shape != got.shape:
        note = f"shape {tuple(got.shape)}, wanted {tuple(wanted.shape)}"
        return Difference(name=name, layout=layout, error=float("inf"), tolerance=tolerance, note=note)
    scale = float(wanted.abs().max()) if wanted.numel() and wanted.is_floating_point() else 1.0
    scale = max(scale, noise / tolerance if tolerance else 0.0) or 1.0
    return Difference(
        name=name, layout=layout, error=_distance(got.to(wanted.dtype), wanted) / scale, tolerance=tolerance
    )


def first_difference(differences: list[Difference]) -> Difference | None:
    """The first that is beyond its tolerance."""
    return next((d for d in differences if not d.equal), None)

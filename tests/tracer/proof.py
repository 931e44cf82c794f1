"""Compares a captured graph, run on one device, with the model itself."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from autopar.ir.graph import CapturedGraph
from autopar.ir.options import Options
from autopar.tracer import capture, interpret


def doubled(tree: Any) -> Any:
    """Floating tensors in float64."""
    if isinstance(tree, Tensor):
        return tree.double() if tree.is_floating_point() else tree
    if isinstance(tree, dict):
        return {k: doubled(v) for k, v in tree.items()}
    return [doubled(v) for v in tree] if isinstance(tree, list) else tree


def losses(result: Any) -> list[Tensor]:
    """Scalar tensors of a result that need a gradient."""
    items = result.values() if isinstance(result, dict) else result if isinstance(result, (tuple, list)) else [result]
    return [x for x in items if isinstance(x, Tensor) and x.dim() == 0 and x.requires_grad]


def check_equal(
    model: nn.Module,
    batch: dict[str, Any],
    *,
    tolerance: float = 1e-10,
    fold: bool = True,
    captured: CapturedGraph | None = None,
) -> CapturedGraph:
    """Capture `model(**batch)` and assert that loss, every gradient and every buffer are those of the model itself."""
    captured = captured or capture(model, (), batch, options=Options(fold_blocks=fold))
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    got = interpret(captured, parameters, buffers, captured.signature.flatten((), batch))
    eager = copy.deepcopy(model)
    result = eager(**batch)
    sum(losses(result)).backward()  # type: ignore[union-attr]
    rebuilt = captured.signature.rebuild(got.outputs)
    assert type(rebuilt) is type(result)
    for mine, theirs in zip(losses_of(rebuilt, result), losses(result), strict=True):
        close(mine, theirs, tolerance, "loss")
    for name, p in eager.named_parameters():
        gradient = got.gradients.get(name)
        assert (gradient is None) == (p.grad is None), f"gradient of {name}: {gradient} against {p.grad}"
        if gradient is not None and p.grad is not None:
            close(gradient, p.grad, tolerance, name)
    for name, b in eager.named_buffers():
        close(got.buffer_updates.get(name, buffers[name]), b, tolerance, name)
    return captured


def losses_of(rebuilt: Any, result: Any) -> list[Tensor]:
    """The tensors of `rebuilt` at the places of the losses of `result`."""
    if isinstance(result, dict):
        return [rebuilt[k] for k, x in result.items() if losses([x])]
    if isinstance(result, (tuple, list)):
        return [x for x, y in zip(rebuilt, result, strict=True) if losses([y])]
    return [rebuilt]


def close(got: Tensor, wanted: Tensor, tolerance: float, what: str) -> None:
    """Equal within `tolerance` of the largest entry."""
    assert got.shape == wanted.shape and got.dtype == wanted.dtype, f"{what}: {got.dtype}{got.shape}"
    if wanted.numel():
        apart = (got.double() - wanted.double()).abs().max().item()
        assert apart <= tolerance * max(wanted.double().abs().max().item(), 1e-3), f"{what}: off by {apart}"

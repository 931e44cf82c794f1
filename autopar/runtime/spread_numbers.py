"""Numbers that a user's own loop reads off spread tensors are one device's: clipping, loss scaling, `.item()`.

Gradients and parameters are DTensors, and torch's own functions take them. Three of DTensor's answers (torch 2.13) are
wrong or missing, and are replaced here for all DTensors of the process:

- `.item()`, `float()`: of a pending sum or maximum (a norm or mean of a cut tensor) the rank's own part, without a
  word. Here the whole; every rank must ask, as for `full_tensor()`.
- `torch.stack` of numbers, by which `clip_grad_norm_` joins norms: refuses spread beside plain ones, and leaves the
  maximum norm pending. Here a plain tensor of whole numbers, with one collective per mesh axis and kind of number
  instead of one per number.
- the flag of `GradScaler` that some gradient is not finite: joined over the axes that cut the first gradient only, so
  ranks disagree on whether to step. Here joined over all axes of all gradients' meshes.

`foreach=True` beside plain gradients is served one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.runtime.torch_private import op_handlers, reduced_over

_aten = torch.ops.aten


def serve_whole_numbers() -> None:
    """Make it so, once for the process."""
    op_handlers().update(
        {
            _aten._local_scalar_dense.default: _item,
            _aten.stack.default: _stack,
            _aten._foreach_norm.Scalar: _foreach_norm,
            _aten._foreach_mul_.Tensor: _foreach_mul,
            _aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
        }
    )


def _item(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The number in a DTensor of one element."""
    x: DTensor = args[0]
    with torch.no_grad():
        whole = x.full_tensor() if x.dim() else whole_numbers([x])[0]
    return op(whole)


def _stack(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Numbers that nobody differentiates: a plain vector. Anything else: as torch does, by way of `cat`."""
    tensors: Sequence[Tensor] = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    followed = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if followed or any(x.dim() for x in tensors):
        return torch.cat([x.unsqueeze(dim) for x in tensors], dim)
    return torch.stack(whole_numbers(tensors), dim)


def whole_numbers(numbers: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of shape () as plain ones with one device's values; collective over the meshes of those that are pending.

    Numbers that wait for the same reductions travel together.
    """
    alike: dict[tuple[object, ...], list[int]] = {}
    for i, x in enumerate(numbers):
        if isinstance(x, DTensor):
            alike.setdefault((x.device_mesh, tuple(x.placements), x.dtype), []).append(i)
    found = list(numbers)
    for at in alike.values():
        first = numbers[at[0]]
        assert isinstance(first, DTensor)
        values = torch.stack([_local(numbers[i]) for i in at])
        for axis, placement in enumerate(first.placements):
            if placement.is_partial():
                values = reduced_over(values, placement, first.device_mesh, axis)
        for i, value in zip(at, values.unbind(), strict=True):
            found[i] = value
    return found


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _foreach_norm(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    tensors, order = args[0], args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    return [torch.linalg.vector_norm(x, order, dtype=dtype) for x in tensors]


def _foreach_mul(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tensors, factor = args
    for x in tensors:
        x.mul_(factor)


def _unscale(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Divide gradients by the loss's scale; `found`, a plain number, becomes 1 on all ranks if any is not finite."""
    gradients, found, inverse = args
    op([_local(g) for g in gradients], found, inverse)
    meshes: dict[DeviceMesh, None] = dict.fromkeys(g.device_mesh for g in gradients if isinstance(g, DTensor))
    for mesh in meshes:
        for axis in range(mesh.ndim):
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=mesh.get_group(axis))

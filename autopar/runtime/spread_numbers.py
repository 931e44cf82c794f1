"""Numbers that a user's own loop reads off spread tensors are one device's: clipping, loss scaling, `.item()`.

Gradients and parameters are DTensors, and torch's own functions take them. Four of DTensor's answers (torch 2.13) are
wrong or missing, and are replaced here for all DTensors of the process:

- `.item()`, `float()`: of a pending sum or maximum (a norm or mean of a cut tensor) the rank's own part, without a
  word. Here the whole; every rank must ask, as for `full_tensor()`.
- `torch.stack` of numbers, by which `clip_grad_norm_` joins norms: refuses spread beside plain ones, and leaves the
  maximum norm pending. Here a plain tensor of whole numbers, with one collective per mesh axis and kind of number
  instead of one per number.
- the flag of `GradScaler` that some gradient is not finite: joined over the axes that cut the first gradient only, so
  ranks disagree on whether to step. Here joined over all axes of all gradients' meshes.
- the largest or smallest entry, and the maximum norm, of a tensor of which a rank holds nothing: that rank raises, and
  the others wait for it. Here it has no say.

Gradients of a plan with pipeline stages are those of this rank's stage only: numbers of all cannot be had of them, so
joining them is an error that names what does it; the flag of `GradScaler` is joined over all stages.

`foreach=True` beside plain gradients is served one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.errors import UserError
from autopar.runtime.torch_private import op_handlers, pending_norm, reduced_over

_aten = torch.ops.aten
_OF_STAGES: dict[DeviceMesh, None] = {}
"""Meshes of pipeline stages: their tensors are a part of the model's."""


def is_of_a_stage(mesh: DeviceMesh) -> None:
    """From now on: what is on this mesh belongs to one stage of several."""
    _OF_STAGES[mesh] = None


def holds_a_stage(tensors: Iterable[Tensor]) -> bool:
    """True if some of these are a part of the model's, held by one stage of several."""
    return any(isinstance(x, DTensor) and x.device_mesh in _OF_STAGES for x in tensors)


def serve_whole_numbers() -> None:
    """Make it so, once for the process."""
    op_handlers().update(
        {
            _aten._local_scalar_dense.default: _item,
            _aten.stack.default: _stack,
            _aten._foreach_norm.Scalar: _foreach_norm,
            _aten._foreach_mul_.Tensor: _foreach_mul,
            _aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
            _aten.linalg_vector_norm.default: _vector_norm,
            _aten.max.default: _extreme,
            _aten.min.default: _extreme,
            _aten.amax.default: _extreme,
            _aten.amin.default: _extreme,
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
    if holds_a_stage(tensors):
        raise UserError(
            "numbers of this stage's tensors are joined as if they were the model's: clip gradients by "
            "module.clip_grad_norm_(max_norm), which knows all stages"
        )
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


def _vector_norm(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """A norm of a spread tensor, pending on the axes that cut what it runs over."""
    order = float(_argument(args, kwargs, 1, "ord", 2))
    nothing = float("inf") if order == -float("inf") else 0.0
    dtype = kwargs.get("dtype") or args[0].dtype
    return _over_pieces(op, args, kwargs, 2, torch.tensor(nothing, dtype=dtype), pending_norm(order))


def _extreme(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """max, min, amax, amin of a spread tensor."""
    dtype = args[0].dtype
    if "max" in op.overloadpacket.__name__:
        return _over_pieces(op, args, kwargs, 1, torch.tensor(_least(dtype), dtype=dtype), Partial("max"))
    return _over_pieces(op, args, kwargs, 1, torch.tensor(_most(dtype), dtype=dtype), Partial("min"))


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str, default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def _least(dtype: torch.dtype) -> Any:
    if dtype is torch.bool:
        return False
    return -float("inf") if dtype.is_floating_point else torch.iinfo(dtype).min


def _most(dtype: torch.dtype) -> Any:
    if dtype is torch.bool:
        return True
    return float("inf") if dtype.is_floating_point else torch.iinfo(dtype).max


def _over_pieces(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], position: int, nothing: Tensor, pending: Placement
) -> DTensor:
    """A reduction op on each rank's piece. `position`: of its dims among the arguments.

    `nothing`, of shape (): what an empty piece has to say.
    """
    x: DTensor = args[0]
    dims = _argument(args, kwargs, position, "dim", None)
    keep = _argument(args, kwargs, position + 1, "keepdim", False)
    over = {d % max(x.dim(), 1) for d in ([dims] if isinstance(dims, int) else dims or range(x.dim()))}

    def shape(of: Sequence[int]) -> list[int]:
        return [1 if d in over else n for d, n in enumerate(of) if keep or d not in over]

    def place(of: Placement) -> Placement:
        if type(of) is not Shard:
            return Replicate()
        cut = of.dim % x.dim()
        return pending if cut in over else Shard(cut if keep else cut - sum(d < cut for d in over))

    with torch.no_grad():
        known = [p if type(p) is Shard else Replicate() for p in x.placements]
        piece = x.redistribute(placements=known).to_local()
        made = op(piece, *args[1:], **kwargs) if piece.numel() else nothing.to(x.device).repeat(shape(piece.shape))
        whole = torch.empty(shape(x.shape), device="meta")
        return DTensor.from_local(
            made, x.device_mesh, [place(p) for p in known], run_check=False, shape=whole.shape, stride=whole.stride()
        )


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
    if any(mesh in _OF_STAGES for mesh in meshes):
        dist.all_reduce(found, op=dist.ReduceOp.MAX)

"""The private names of torch that the runtime uses, all of them here (torch 2.13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

__all__ = ["DTensor", "TorchDispatchMode"]

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def storage_key(tensor: Tensor) -> int:
    """The same for all tensors on one storage, as long as that lives."""
    return int(tensor.untyped_storage()._cdata)


def storage_uses(tensor: Tensor) -> int:
    """By how many tensors, here or inside torch, its storage is held; one more for asking."""
    return int(torch._C._storage_Use_Count(storage_key(tensor)))


def leave(mode: TorchDispatchMode) -> None:
    """Leave a mode that was entered, unless another one has been entered since and not left."""
    if _get_current_dispatch_mode() is mode:  # type: ignore[no-untyped-call]
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def keeps_graph() -> bool:
    """True inside a backward that was asked to keep the graph (retain_graph=True)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def default_store() -> Any:
    """The key-value store through which the ranks of the default process group found each other."""
    return torch.distributed.distributed_c10d._get_default_store()


def op_handlers() -> dict[Any, Handler]:
    """What DTensor calls for an op, as (op, args, kwargs), in place of its own dispatch."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    found: dict[Any, Handler] = handlers
    return found


def piece_of(x: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, starts) of this rank's piece in the whole."""
    return compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)


def pending_norm(order: float) -> Partial:
    """How norms of the pieces of a tensor become the norm of it."""
    if order == 0:
        return Partial("sum")
    if abs(order) == float("inf"):
        return Partial("max" if order > 0 else "min")
    return _NormPartial(order)


def reduced_over(values: Tensor, pending: Placement, mesh: DeviceMesh, axis: int) -> Tensor:
    """What pending values (sums, means, norms, maxima) come to over one axis of a mesh; NaN on any rank is NaN."""
    assert isinstance(pending, Partial)
    wait: Any = collectives.wait_tensor
    whole: Tensor = wait(pending._reduce_value(values, mesh, axis))
    if pending.reduce_op in ("max", "min"):  # gloo's maximum keeps a NaN of the first rank only
        lost = wait(Partial()._reduce_value(values.isnan().to(torch.int32), mesh, axis))
        whole = whole.masked_fill(lost > 0, float("nan")) if values.is_floating_point() else whole
    return whole

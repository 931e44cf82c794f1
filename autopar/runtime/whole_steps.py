"""Optimizers that mix the entries of a matrix update spread parameters as one device does: Muon and Adafactor of torch.

Muon's update is made of products of a whole matrix, Adafactor's of norms of its rows and columns. On DTensors torch
2.13 adds up such products in another order, in bfloat16, or raises. So where one of these steps, each parameter that is
cut is gathered, with its gradient and state, updated as a plain tensor on every rank, and cut again before the next one
comes: one whole parameter at a time. State of the parameter's own shape is kept cut like it.

The gathers are no part of a plan and of its predicted time: of each parameter that is cut, itself, its gradient and
each state of its shape, in the stored dtype, once a step.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import LBFGS, Adafactor, Muon, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.errors import UserError
from autopar.runtime.spread_numbers import holds_a_stage

MIXES = (Adafactor, Muon)
"""Optimizers whose update of an entry depends on others of its parameter, each parameter by itself."""


@cache
def serve_whole_steps() -> None:
    """Make it so, once for the process."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Steps in the optimizer's place; what it is left to do itself is nothing."""
    listed = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(isinstance(p, DTensor) for p in listed):
        return None
    if isinstance(optimizer, LBFGS) and holds_a_stage(listed):
        raise UserError(
            "LBFGS takes all parameters for one vector, and this rank has those of one stage: use an optimizer that "
            "updates each parameter by itself"
        )
    if not isinstance(optimizer, MIXES):
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    with torch.no_grad():
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    _update(optimizer, group, p)
    return (_alone(optimizer, []), None if closure is None else lambda: loss), {}


def _update(optimizer: Optimizer, group: dict[str, Any], p: Tensor) -> None:
    """One parameter's step."""
    assert p.grad is not None
    state = optimizer.state[p]
    like = [key for key, value in state.items() if isinstance(value, Tensor) and value.shape == p.shape]
    whole = nn.Parameter(_whole(p.detach()), requires_grad=False)
    whole.grad = _whole(p.grad)
    mine = _alone(optimizer, [{**group, "params": [whole]}])
    mine.state[whole] = {key: _whole(value) if key in like else value for key, value in state.items()}
    inspect.unwrap(type(optimizer).step)(mine)
    if isinstance(p, DTensor):
        _take(p.detach(), whole)
    for key, value in mine.state[whole].items():
        spread = isinstance(value, Tensor) and value.shape == p.shape and isinstance(p, DTensor)
        state[key] = _spread(value, p) if spread else value


def _alone(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """The same optimizer with these groups, and no state."""
    mine = object.__new__(type(optimizer))
    mine.__dict__ = {**optimizer.__dict__, "param_groups": groups, "state": defaultdict(dict)}
    return mine


def _whole(x: Tensor) -> Tensor:
    """The whole tensor, in memory of its own where this rank has a piece."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def _spread(whole: Tensor, like: Any) -> DTensor:
    """This rank's piece of what all ranks have, cut as another tensor of the shape."""
    return distribute_tensor(whole.detach(), like.device_mesh, like.placements, src_data_rank=None)


def _take(p: Any, whole: Tensor) -> None:
    """Write this rank's piece into a parameter."""
    p.to_local().copy_(_spread(whole, p).to_local())

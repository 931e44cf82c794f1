"""A model in half precision on one device: what a plan in bf16 or fp16 is compared with.

Its parameters and persistent buffers, and floating arguments, are cast anew in every call; gradients arrive at the
parameters as they are stored, where the optimizer works. So stored parameters are the master weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.ir.options import COMPUTE_DTYPE, Precision

WIDER = (torch.float32, torch.float64)


def stored(model: nn.Module) -> nn.Module:
    """A copy as a plan in half precision stores it: what trains is float32 where the model has less."""
    found = copy.deepcopy(model)
    for p in found.parameters():
        if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16):
            p.data = p.data.float()
    return found


def narrowed(model: nn.Module, precision: Precision) -> Callable[..., Any]:
    """The model's forward in a half precision."""
    return _cast(model, WIDER, getattr(torch, COMPUTE_DTYPE[precision]))


def widened(model: nn.Module) -> Callable[..., Any]:
    """The model's forward in float32, where a part of it is stored in half precision."""
    return _cast(model, (torch.bfloat16, torch.float16), torch.float32)


def _cast(model: nn.Module, kinds: tuple[torch.dtype, ...], used: torch.dtype) -> Callable[..., Any]:
    """The forward with tensors of `kinds` cast. What it writes into persistent buffers, the stored ones get."""

    def cast(tree: Any) -> Any:
        if isinstance(tree, Tensor):
            return tree.to(used) if tree.dtype in kinds else tree
        if isinstance(tree, Mapping):
            return {key: cast(value) for key, value in tree.items()}
        return type(tree)(map(cast, tree)) if type(tree) in (list, tuple) else tree

    def run(*args: Any, **kwargs: Any) -> Any:
        persistent = model.state_dict(keep_vars=True)
        stored = {name: b for name, b in model.named_buffers() if name in persistent and b.dtype in kinds}
        buffers = cast(stored)
        before = {name: b._version for name, b in buffers.items()}
        state = {**cast(dict(model.named_parameters())), **buffers}
        found = torch.func.functional_call(model, state, cast(args), cast(kwargs))
        with torch.no_grad():
            for name, buffer in stored.items():
                if buffers[name]._version != before[name]:
                    buffer.copy_(buffers[name])
        return found

    return run

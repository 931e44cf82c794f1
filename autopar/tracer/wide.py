"""float32 means float64: for proofs in double precision of models that cast to float32 by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Wide(TorchFunctionMode):
    """While entered, every call that names float32 is made with float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            return Tensor.double(*args)
        return func(*_widened(args), **_widened(dict(kwargs or {})))


def _widened(tree: Any) -> Any:
    if tree is torch.float32:
        return torch.float64
    if isinstance(tree, tuple) and type(tree) is tuple:
        return tuple(map(_widened, tree))
    if type(tree) is dict:
        return {k: _widened(v) for k, v in tree.items()}
    return tree

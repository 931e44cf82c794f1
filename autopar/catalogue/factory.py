"""`package.module:factory` -> the user's model and batch."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from autopar.errors import UserError

Inputs = Mapping[str, Any] | tuple[Any, ...]
"""A call's arguments, by keyword or by position."""


def call_factory(
    text: str, module: str, attribute: str, *, seq: int | None, global_batch: int | None, dtype: torch.dtype
) -> tuple[nn.Module, Inputs]:
    """The model, in training mode, and the global batch that the factory gives. `text` is what the user typed.

    `seq` and `global_batch` are handed on if the factory takes them. Raises UserError where anything is amiss.
    """
    factory = _find_factory(text, module, attribute)
    given = {k: v for k, v in (("seq", seq), ("global_batch", global_batch)) if v is not None}
    try:
        accepted = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        accepted = inspect.signature(lambda: None).parameters
    for name in given:
        if name not in accepted:
            option = "--" + name.replace("_", "-")
            raise UserError(f"{option}: {text} fixes its own inputs (the factory takes no argument {name!r})")
    try:
        made = factory(**given)
    except Exception as error:
        raise UserError(f"model {text}: the factory failed: {_where(error)}") from None
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise UserError(f"model {text}: the factory returned {type(model).__name__}; wanted a torch.nn.Module")
    if not isinstance(inputs, (Mapping, tuple)):
        raise UserError(
            f"model {text}: no example inputs; the factory must return (model, {{'name': tensor}}), the global batch"
        )
    if dtype == torch.float64:
        model = model.double()
        inputs = _map_tensors(inputs, lambda t: t.double() if t.is_floating_point() else t)
    return model.train(), inputs


def _find_factory(text: str, module: str, attribute: str) -> Any:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except Exception as error:
        raise UserError(f"model {text}: {module} cannot be imported: {_where(error)}") from None
    if not callable(found):
        raise UserError(f"model {text}: {module} has no callable {attribute}")
    return found


def _values(inputs: Inputs) -> list[Any]:
    return list(inputs.values() if isinstance(inputs, Mapping) else inputs)


def _map_tensors(inputs: Inputs, change: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
    def one(value: Any) -> Any:
        return change(value) if isinstance(value, torch.Tensor) else value

    if isinstance(inputs, Mapping):
        return {k: one(v) for k, v in inputs.items()}
    return tuple(one(v) for v in inputs)


def count_tokens(inputs: Inputs) -> int:
    """Elements of the largest integer matrix, else the first dim of the first tensor."""
    tensors = [v for v in _values(inputs) if isinstance(v, torch.Tensor)]
    ids = [t.numel() for t in tensors if t.dim() == 2 and not t.is_floating_point()]
    return max(ids) if ids else next((t.shape[0] for t in tensors if t.dim()), 1)


def _where(error: Exception) -> str:
    """The exception in one line, with the place it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {_one_line(error)}{place}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())

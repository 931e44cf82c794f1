"""What is known of a value before the run: a plain Python value, a tensor's shape and dtype, or nothing.

Each value has marks that say what it hangs on. They decide how much one rank's reading tells of the others'.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.ir.graph import TOKEN

RANK, ARGUMENT = 1, 2
"""RANK: hangs on which rank it is. ARGUMENT: on a plain argument of the function that is being read."""


class _Unknown:
    """The one thing that can't be known before the run."""

    def __repr__(self) -> str:
        return "unknown"


UNKNOWN = _Unknown()


@dataclass(slots=True)
class Value:
    """`data`: UNKNOWN, a tensor on "meta", a list or tuple of `Value`s, or any other Python value.

    `line`: where an UNKNOWN came to be.
    """

    data: Any
    marks: int = 0
    line: int = 0

    @property
    def known(self) -> bool:
        """True if a branch may hang on it."""
        return self.data is not UNKNOWN and not isinstance(self.data, Tensor)


def marks_of(value: Value) -> int:
    """Of a value and all in it."""
    found = value.marks
    if isinstance(value.data, (list, tuple)):
        for item in value.data:
            found |= marks_of(item)
    return found


def unknown_in(value: Value) -> Value | None:
    """The first UNKNOWN in a value, or None."""
    if value.data is UNKNOWN:
        return value
    if isinstance(value.data, (list, tuple)):
        return next((found for item in value.data if (found := unknown_in(item)) is not None), None)
    return None


def plain(value: Value) -> Any:
    """Without marks: what Python functions take."""
    if isinstance(value.data, list):
        return [plain(item) for item in value.data]
    if isinstance(value.data, tuple):
        return tuple(plain(item) for item in value.data)
    return value.data


def marked(data: Any, marks: int) -> Value:
    """The inverse of `plain`."""
    if isinstance(data, torch.Size):
        data = tuple(data)
    if type(data) in (list, tuple):
        return Value(type(data)(marked(item, marks) for item in data), marks)
    return Value(data, marks)


def copied(value: Value) -> Value:
    """With lists of its own."""
    if isinstance(value.data, (list, tuple)):
        return Value(type(value.data)(copied(item) for item in value.data), value.marks)
    return value


def pattern(value: Value) -> Any:
    """All of an argument that decides what a function does with it, plain values aside: they are marked instead."""
    data = value.data
    if isinstance(data, Tensor):
        return "tensor", tuple(data.shape), data.dtype, data.stride(), value.marks
    if isinstance(data, (list, tuple)):
        return type(data), value.marks, tuple(pattern(item) for item in data)
    return "unknown" if data is UNKNOWN else ("plain", value.marks)


def as_argument(value: Value) -> Value:
    """An argument as its function sees it: plain values marked."""
    if isinstance(value.data, (list, tuple)):
        return Value(type(value.data)(as_argument(item) for item in value.data), value.marks)
    if isinstance(value.data, Tensor) or value.data is UNKNOWN:
        return value
    return Value(value.data, value.marks | ARGUMENT)


_META = re.compile(r"\b([a-z]+[0-9_a-z]*)\[([0-9, ]*)\]")


def metas_in(comment: str) -> list[Tensor]:
    """The tensors that an emitted line's comment tells of: "float32[12, 4] dp:S(0)". What a region keeps is one too."""
    found = []
    for name, dims in _META.findall(comment):
        dtype = torch.uint8 if name == TOKEN else getattr(torch, name, None)
        if isinstance(dtype, torch.dtype):
            found.append(meta(dtype, [int(d) for d in dims.split(",") if d.strip()]))
    return found


def meta(dtype: torch.dtype, shape: Iterable[int]) -> Tensor:
    """A tensor without data."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")

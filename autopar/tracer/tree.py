"""Nested arguments and results as a list of leaves, for containers that torch's pytree does not know too.

Containers: dict and other mappings, list, tuple, named tuple, dataclass (Hugging Face outputs are both dict and
dataclass). Everything else is a leaf. `Spec.build` gives back the same types.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

PLAIN = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.layout,
    torch.memory_format, slice, range,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Spec:
    """How one container is made of its children; a leaf has `kind` None.

    Attributes:
        kind: the container's type.
        keys: of a mapping its keys, of a dataclass its field names, of a sequence empty.
        children: the specs of the items, in order.
        paths: what each item adds to a path (".x", "['x']", "[0]").
    """

    kind: type | None = None
    keys: tuple[Any, ...] = ()
    children: tuple[Spec, ...] = ()
    paths: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """How many leaves."""
        return 1 if self.kind is None else sum(c.size for c in self.children)

    def build(self, leaves: Sequence[Any]) -> Any:
        """The same container with these leaves."""
        if self.kind is None:
            return leaves[0]
        items, at = [], 0
        for child in self.children:
            items.append(child.build(leaves[at : at + child.size]))
            at += child.size
        return _make(self.kind, self.keys, items)


def flatten(tree: Any, path: str = "") -> tuple[list[tuple[str, Any]], Spec]:
    """The leaves with their paths, and the spec that builds the container again."""
    parts = _parts(tree, path)
    if parts is None:
        return [(path, tree)], Spec()
    keys, items, names = parts
    leaves: list[tuple[str, Any]] = []
    specs = []
    for name, item in zip(names, items, strict=True):
        inner, spec = flatten(item, path + name)
        leaves += inner
        specs.append(spec)
    return leaves, Spec(type(tree), keys, tuple(specs), tuple(names))


def _parts(tree: Any, path: str) -> tuple[tuple[Any, ...], list[Any], list[str]] | None:
    """(keys, items, path parts) of a container; None for a leaf. A path at the root of a result has no leading dot."""
    if isinstance(tree, (torch.Tensor, type)):
        return None
    dot = "." if path else ""
    if isinstance(tree, Mapping):
        keys = tuple(tree.keys())
        attribute = dataclasses.is_dataclass(tree) or not path
        names = [f"{dot}{k}" if attribute and isinstance(k, str) else f"[{k!r}]" for k in keys]
        return keys, [tree[k] for k in keys], names
    if dataclasses.is_dataclass(tree):
        keys = tuple(f.name for f in dataclasses.fields(tree) if hasattr(tree, f.name))
        return keys, [getattr(tree, k) for k in keys], [f"{dot}{k}" for k in keys]
    if isinstance(tree, (list, tuple)):
        return (), list(tree), [f"[{i}]" for i in range(len(tree))]
    return None


def _make(kind: Any, keys: tuple[Any, ...], items: list[Any]) -> Any:
    if issubclass(kind, Mapping):
        return _make_mapping(kind, dict(zip(keys, items, strict=True)))
    if dataclasses.is_dataclass(kind):
        made = _bare(kind)
        for key, item in zip(keys, items, strict=True):
            object.__setattr__(made, key, item)
        return made
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return kind(*items)
    return kind(items)


def _bare(kind: Any) -> Any:
    """An object of this type whose constructor was not called."""
    return kind.__new__(kind)


def _make_mapping(kind: type, items: dict[Any, Any]) -> Any:
    if kind is dict:
        return items
    made: Any
    if dataclasses.is_dataclass(kind):  # Hugging Face's ModelOutput: absent fields are None
        return kind(**items)
    try:
        made = kind(items)
    except TypeError:
        made = None
    if made is None or list(made.keys()) != list(items):
        made = _bare(kind)
        for key, item in items.items():
            made[key] = item
    return made

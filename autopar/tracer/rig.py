"""The model on the bench: its distinct parameters and buffers, other tensors put in their places for a while, and back.

Nothing is left behind: parameters, buffers and attributes of every module are as before when a `with` block ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from autopar.errors import CaptureError
from autopar.tracer.signature import NARROW, captured_dtype
from autopar.tracer.torch_private import fake_mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One distinct parameter or buffer.

    Attributes:
        name, aliases: its first name and the others.
        tensor: the model's own.
        places: (a module's dict of parameters or buffers, the name in it), one per name.
    """

    name: str
    aliases: tuple[str, ...]
    tensor: Tensor
    is_parameter: bool
    persistent: bool
    places: tuple[tuple[dict[str, Any], str], ...]


class Rig:
    """The distinct tensors of a module tree: parameters first, then buffers.

    Attributes:
        module: the root.
        slots: the distinct parameters, then the distinct buffers.
        count: how many of them are parameters.
        mode: the fake mode of the whole capture.
        names: id of each submodule -> its first path.
    """

    def __init__(self, module: nn.Module, precision: str) -> None:
        self.module = module
        self.precision = precision
        self.mode = fake_mode()
        self.names = {id(m): name for name, m in module.named_modules()}
        parameters = _slots(module, "_parameters")
        self.slots = [*parameters, *_slots(module, "_buffers")]
        self.count = len(parameters)
        self.slot_of = {(id(d), key): i for i, slot in enumerate(self.slots) for d, key in slot.places}

    def stand_in(self, index: int, *, device: str = "cpu") -> Tensor:
        """A tensor like a slot's, without data: under the fake mode, or on the meta device."""
        slot = self.slots[index]
        dtype = self.stored_dtype(slot)
        grad = slot.is_parameter and slot.tensor.requires_grad
        return torch.empty(slot.tensor.shape, dtype=dtype, device=device, requires_grad=grad)

    def stored_dtype(self, slot: Slot) -> torch.dtype:
        """What a slot's tensor is stored as. Under half precision a parameter that trains is so in float32 at least."""
        dtype = captured_dtype(slot.tensor.dtype, self.precision)
        trains = slot.is_parameter and slot.tensor.requires_grad and dtype in NARROW.values()
        return torch.float32 if trains and self.precision in NARROW else dtype

    def placeholders(self) -> list[Tensor]:
        """For every slot something of its shape and dtype in use, not to be computed with. Needs the fake mode."""
        made: dict[Any, Tensor] = {}
        found = []
        for i, slot in enumerate(self.slots):
            key = (tuple(slot.tensor.shape), slot.tensor.dtype, slot.is_parameter or slot.persistent)
            if key not in made:
                made[key] = self.used_form(i, self.stand_in(i).detach())
            found.append(made[key])
        return found

    def used_form(self, index: int, tensor: Tensor) -> Tensor:
        """What the forward computes with: under half precision, floating parameters and persistent buffers are cast."""
        slot = self.slots[index]
        return cast(tensor, self.precision) if slot.is_parameter or slot.persistent else tensor

    @contextmanager
    def installed(self, tensors: Sequence[Tensor | None]) -> Iterator[None]:
        """Put tensors in the slots' places (None leaves a slot alone); afterwards the model's own are back."""
        saved = [(d, key, d[key]) for slot in self.slots for d, key in slot.places]
        try:
            for slot, tensor in zip(self.slots, tensors, strict=True):
                if tensor is not None:
                    for d, key in slot.places:
                        d[key] = tensor
            yield
        finally:
            for d, key, value in saved:
                d[key] = value

    def replaced(self, tensors: Sequence[Tensor | None]) -> list[tuple[int, Tensor]]:
        """Slots whose place was assigned another tensor since `installed(tensors)`: (slot, the new one)."""
        found = []
        for i, slot in enumerate(self.slots):
            now = slot.places[0][0].get(slot.places[0][1])
            if tensors[i] is not None and now is not tensors[i] and isinstance(now, Tensor):
                found.append((i, now))
        return found


def cast(tensor: Tensor, precision: str) -> Tensor:
    """To what a half precision computes in if floating and wider; else itself."""
    half = NARROW.get(precision)
    return tensor.to(half) if half is not None and tensor.dtype in (torch.float32, torch.float64) else tensor


def _slots(module: nn.Module, which: str) -> list[Slot]:
    found: dict[int, list[tuple[str, dict[str, Any], str, bool]]] = {}
    tensors: dict[int, Tensor] = {}
    seen: set[int] = set()
    for path, sub in module.named_modules(remove_duplicate=False):
        d = getattr(sub, which)
        for key, tensor in d.items():
            if tensor is None:
                continue
            name = f"{path}.{key}" if path else key
            tensors[id(tensor)] = tensor
            persistent = key not in sub._non_persistent_buffers_set
            found.setdefault(id(tensor), []).append((name, d, key, persistent))
        seen.add(id(sub))
    slots = []
    for identity, uses in found.items():
        places = {(id(d), key): (d, key) for _, d, key, _ in uses}
        slots.append(
            Slot(
                name=uses[0][0],
                aliases=tuple(name for name, _, _, _ in uses[1:]),
                tensor=tensors[identity],
                is_parameter=which == "_parameters",
                persistent=any(p for _, _, _, p in uses),
                places=tuple(places.values()),
            )
        )
    return slots


Hook = Callable[[nn.Module, str, tuple[Any, ...], dict[str, Any], Callable[[], Any]], Any]
"""(module, path, args, kwargs, the call itself) -> result."""


@contextmanager
def routed(names: dict[int, str], hook: Hook, under: str = "") -> Iterator[None]:
    """Every call of a module in `names` goes through `hook`. An exception remembers the innermost of them.

    `under`: path that the names are relative to.
    """
    original = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        path = names.get(id(module))
        if path is None:
            return original(module, *args, **kwargs)
        try:
            return hook(module, path, args, kwargs, lambda: original(module, *args, **kwargs))
        except Exception as error:
            if failed_module(error) is None:
                error.autopar_module = ".".join(p for p in (under, path) if p)  # type: ignore[attr-defined]
            raise

    with mock.patch.object(nn.Module, "__call__", call):
        yield


def failed_module(error: Exception) -> str | None:
    """Path of the innermost module whose call raised `error`."""
    found: str | None = getattr(error, "autopar_module", None)
    return found


class Unknown(Tensor):
    """In the place of an attribute that a region's run changes: whoever computes with it fails, and must be a part of
    the region."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse."""
        raise ValueError("this attribute is set by a submodule that cannot be captured")


UNKNOWN = torch.empty(0).as_subclass(Unknown)
STANDARD = frozenset(nn.Module().__dict__) - {"training"}
SCALARS = (bool, int, float, str)


@contextmanager
def attributes_kept(module: nn.Module, changes: list[str]) -> Iterator[None]:
    """Attributes of all submodules are as before at the end; paths of those that changed are added to `changes`.

    A change is another plain value, another tensor, or a dict or list with other plain values in it. An attribute that
    appears, or that held None, is a by-product (a cache, a kept activation): it is put back and not a change. What
    appears among the registered parameters, buffers and modules is `Registered`.
    """
    saved = [(path, m, dict(m.__dict__), shallow(m.__dict__), registered(m)) for path, m in module.named_modules()]
    try:
        yield
    finally:
        for path, m, before, inner, known in saved:
            changes += [f"{path}.{k}" if path else k for k in _changed(m.__dict__, before, inner)]
            for d, names in zip(_registries(m), known, strict=True):
                for name in [n for n in d if n not in names]:
                    changes.append(Registered(f"{path}.{name}" if path else name))
                    del d[name]
            _restore(m, before, inner)


class Registered(str):
    """Path of a parameter, buffer or module that a forward registered."""


def _registries(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module._parameters, module._buffers, module._modules


def registered(module: nn.Module) -> tuple[frozenset[str], ...]:
    """Names of a module's own parameters, buffers and modules."""
    return tuple(frozenset(d) for d in _registries(module))


def shallow(attributes: dict[str, Any]) -> dict[str, Any]:
    """Shallow copies of the dict and list attributes."""
    plain = {k: v for k, v in attributes.items() if k not in STANDARD and type(v) in (dict, list)}
    return {k: (dict(v) if isinstance(v, dict) else list(v)) for k, v in plain.items()}


def _changed(now: dict[str, Any], before: dict[str, Any], inner: dict[str, Any]) -> list[str]:
    found = []
    for key, old in before.items():
        if key in STANDARD or key not in now:
            continue
        new = now[key]
        if isinstance(new, Unknown):
            continue
        if new is not old:
            plain = isinstance(old, SCALARS) and (type(new) is not type(old) or new != old)
            if plain or (isinstance(old, Tensor) and not key.startswith("_")):
                found.append(key)
        elif key in inner and _plain_part(new) != _plain_part(inner[key]):
            found.append(key)
    return found


def same_content(old: Any, new: Any, copy: Any) -> bool:
    """Whether an attribute is as it was. `copy`: of a dict or list, its content before."""
    if copy is not None:
        now = list(new.items()) if isinstance(new, dict) else list(new) if isinstance(new, list) else None
        was = list(copy.items()) if isinstance(copy, dict) else list(copy)
        return new is old and now is not None and len(now) == len(was) and all(map(_same, was, now))
    return _same(old, new)


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, tuple) and isinstance(new, tuple):
        return len(old) == len(new) and all(map(_same, old, new))
    return old is new or (isinstance(old, SCALARS) and type(old) is type(new) and bool(old == new))


def _plain_part(container: Any) -> Any:
    if isinstance(container, dict):
        return {k: v for k, v in container.items() if isinstance(v, SCALARS)}
    return [v for v in container if isinstance(v, SCALARS)]


def _restore(module: nn.Module, before: dict[str, Any], inner: dict[str, Any]) -> None:
    for key in [k for k in module.__dict__ if k not in before]:
        del module.__dict__[key]
    for key, value in before.items():
        module.__dict__[key] = value
    for key, copy in inner.items():
        value = before[key]
        value.clear()
        value.update(copy) if isinstance(value, dict) else value.extend(copy)


def refuse_changes(changes: list[str]) -> None:
    """Raise CaptureError if the forward changed Python attributes: a compiled step would keep their first values."""
    new = [c for c in changes if isinstance(c, Registered)]
    if new:
        raise CaptureError(
            f"the forward registers {str(new[0])!r}, which the model has not before its first call: call the model "
            "once before it is captured, or register it in the constructor"
        )
    if changes:
        raise CaptureError(
            f"the forward changes attribute {changes[0]!r} of the model: a compiled model would keep its value at "
            "capture. Keep it in a buffer (register_buffer) and change it in place, or change it outside forward"
        )

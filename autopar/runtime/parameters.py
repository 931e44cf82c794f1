"""A model's parameters and buffers as this rank holds them: local pieces under the original names and modules.

The tree of modules is rebuilt with the same names and order, so `state_dict()` has the model's own keys in its own
order, and names of tied weights give the same Parameter object.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from autopar.errors import PlanError, UserError
from autopar.ir.layout import Kind, Layout, local_piece, parse_layout, replicated
from autopar.ir.mesh import Mesh
from autopar.runtime.comm import Communicator


class Holder(nn.Module):
    """Stands where a submodule of the model stood; only holds its parameters and buffers."""

    def forward(self, *args: object, **kwargs: object) -> object:
        """A compiled model runs as a whole."""
        raise UserError("a submodule of a compiled model cannot be called: call the compiled module itself")


_CONTAINERS: dict[type[nn.Module], type[nn.Module]] = {
    nn.ModuleList: nn.ModuleList, nn.Sequential: nn.ModuleList, nn.ModuleDict: nn.ModuleDict
}  # fmt: skip
"""Containers stay what they are, so that `module.layers[3]` works."""


def placements(layout: Layout) -> tuple[TorchPlacement, ...]:
    """The layout as DTensor writes it."""
    kinds: list[TorchPlacement] = []
    for p in layout.placements:
        kinds.append(Shard(p.dim) if p.kind is Kind.SHARD else Replicate() if p.kind is Kind.REPLICATE else Partial())
    return tuple(kinds)


def wrap(local: Tensor, shape: tuple[int, ...], layout: Layout, rt: Communicator) -> Tensor:
    """This rank's piece as a DTensor; as it is where there is one device, or where ranks are threads."""
    if rt.device_mesh is None:
        return local
    return DTensor.from_local(
        local, rt.device_mesh, placements(layout), run_check=False, shape=torch.Size(shape), stride=_stride(shape)
    )


def unwrap(tensor: Tensor) -> Tensor:
    """This rank's piece of a parameter."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    found, step = [], 1
    for size in reversed(shape):
        found.append(step)
        step *= max(size, 1)
    return tuple(reversed(found))


def cut(whole: Tensor, layout: Layout, mesh: Mesh, rank: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """This rank's piece in its own contiguous memory. Reads no more of `whole` than the piece."""
    for dim, (start, size) in enumerate(zip(*local_piece(tuple(whole.shape), layout, mesh, rank), strict=True)):
        if size != whole.shape[dim]:
            whole = whole.narrow(dim, start, size)
    piece = torch.empty(whole.shape, dtype=dtype, device=device)
    return piece.copy_(whole.detach())


class Weights:
    """The parameters and buffers of one compiled module on one rank.

    Args:
        layouts: every parameter's storage layout, under each of its names.
        dtypes: what parameters and buffers are stored in, where it isn't the model's own dtype.

    `first` maps each name to the first name of the same tensor; `unloaded` has the first names without values yet.
    What no state dict has to hold (buffers that are not persistent) is taken from one where it is there. With `here`,
    other parameters are on other ranks: their names are known, and where they stand is nothing.
    """

    def __init__(
        self,
        root: nn.Module,
        model: nn.Module,
        layouts: Mapping[str, Layout],
        dtypes: Mapping[str, str],
        rt: Communicator,
        here: Container[str] | None = None,
    ) -> None:
        self.root = root
        self.here = here
        self.keys = tuple(model.state_dict())
        self.rt = rt
        self.dtypes = {name: getattr(torch, dtype) for name, dtype in dtypes.items()}
        self.layouts: dict[str, Layout] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, Tensor] = {}
        self.first: dict[str, str] = {}
        self.unloaded: set[str] = set()
        self._build(model, layouts)

    def _build(self, model: nn.Module, layouts: Mapping[str, Layout]) -> None:
        """Copy the model's tree with local pieces. A shared submodule is one Holder under all its names."""
        holders: dict[int, nn.Module] = {id(model): self.root}
        seen: dict[int, str] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            new = holders.get(id(module))
            if new is None:
                new = holders[id(module)] = _CONTAINERS.get(type(module), Holder)()
                new.training = module.training
            parent, _, name = path.rpartition(".")
            if path:
                holders[id(model.get_submodule(parent))]._modules[name] = new
            for own, parameter in module._parameters.items():
                new._parameters[own] = (
                    None if parameter is None else self._parameter(path, own, parameter, seen, layouts)
                )
            for own, buffer in module._buffers.items():
                new._buffers[own] = None if buffer is None else self._buffer(path, own, buffer, seen)
            new._non_persistent_buffers_set = set(module._non_persistent_buffers_set)

    def _parameter(
        self, path: str, own: str, parameter: nn.Parameter, seen: dict[int, str], layouts: Mapping[str, Layout]
    ) -> nn.Parameter | None:
        name = f"{path}.{own}" if path else own
        first = self.first[name] = seen.setdefault(id(parameter), name)
        if self.here is not None and first not in self.here:
            return None
        if first in self.parameters:
            return self.parameters[first]
        layout = self.layouts[first] = layouts.get(first, replicated(self.rt.mesh))
        dtype = self.dtypes.get(first, parameter.dtype)
        shape = self.shapes[first] = tuple(parameter.shape)
        if parameter.is_meta:
            piece = torch.empty(self._local_shape(shape, layout), dtype=dtype, device=self.rt.device)
            self.unloaded.add(first)
        else:
            piece = cut(parameter, layout, self.rt.mesh, self.rt.rank, self.rt.device, dtype)
        new = nn.Parameter(wrap(piece, shape, layout, self.rt), requires_grad=parameter.requires_grad)
        self.parameters[first] = new
        return new

    def _local_shape(self, shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
        return local_piece(shape, layout, self.rt.mesh, self.rt.rank)[1]

    def _buffer(self, path: str, own: str, buffer: Tensor, seen: dict[int, str]) -> Tensor:
        name = f"{path}.{own}" if path else own
        first = self.first[name] = seen.setdefault(id(buffer), name)
        dtype = self.dtypes.get(first, buffer.dtype)
        if first not in self.buffers:
            if buffer.is_meta:
                self.unloaded.add(first)
                self.buffers[first] = torch.empty(buffer.shape, dtype=dtype, device=self.rt.device)
            else:
                self.buffers[first] = buffer.detach().to(self.rt.device, dtype, copy=True).contiguous()
        return self.buffers[first]

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole model's state as plain tensors on every rank, with the model's own keys in order. Collective."""
        self.require_loaded()
        whole = replicated(self.rt.mesh)
        full: dict[str, Tensor] = {}
        found: dict[str, Tensor] = {}
        for key in self.root.state_dict():
            first = self.first[key]
            if first not in full:
                if first in self.parameters:
                    piece = unwrap(self.parameters[first].detach())
                    joined = self.rt.convert(piece, self.layouts[first], whole, self.shapes[first])
                    full[first] = joined.clone() if joined.data_ptr() == piece.data_ptr() else joined
                else:
                    full[first] = self.buffers[first].clone()
            found[key] = full[first]
        return found

    def of_copy(self, root: nn.Module) -> Weights:
        """The same for a deep copy of the module tree."""
        new = copy.copy(self)
        new.root = root
        new.parameters = {first: root.get_parameter(first) for first in self.parameters}
        new.buffers = {first: root.get_buffer(first) for first in self.buffers}
        new.unloaded = set(self.unloaded)
        return new

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        """Tensors in the form that `state_dict()` gives them, or whole: each as it comes."""
        beside = self.first.keys() - self.root.state_dict().keys()

        def whole(key: str, value: Any) -> bool:
            held = self.parameters.get(self.first.get(key, ""))
            if held is None or isinstance(value, DTensor):
                return held is None and key in beside
            return isinstance(held, DTensor) or tuple(value.shape) != tuple(held.shape)

        cut = {k: v for k, v in state.items() if not whole(k, v)}
        self.load_full_state_dict({k: v for k, v in state.items() if k not in cut}, strict=False)
        found = nn.Module.load_state_dict(self.root, cut, strict=False)
        missing = [k for k in found.missing_keys if k not in state]
        if strict and (missing or found.unexpected_keys):
            raise UserError(
                f"state does not fit the model: missing {missing[:5] or 'none'}, "
                f"unexpected {found.unexpected_keys[:5] or 'none'}"
            )
        self.unloaded -= {self.first[k] for k in cut if k in self.first}
        found.missing_keys[:] = missing
        return found

    def load_full_state_dict(self, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
        """Take this rank's pieces of a plain state dict. UserError naming missing, unexpected and misshapen keys."""
        self.load(lambda key: state[key], state.keys(), strict=strict)

    def load_safetensors(self, paths: Path | str | list[Path | str], *, strict: bool = True) -> None:
        """Take this rank's pieces from safetensors files, one tensor at a time, reading only the rows it needs."""
        listed = paths if isinstance(paths, list) else [paths]
        files = [_opened(str(p)) for p in listed]
        where: dict[str, Any] = {key: f for f in files for key in f.keys()}  # type: ignore[no-untyped-call] # noqa: SIM118
        self.load(lambda key: _Slice(where[key], key), where.keys(), strict=strict)

    def load(self, get: Callable[[str], Tensor | _Slice], given: Iterable[str], *, strict: bool) -> None:
        """Fill parameters and buffers by name."""
        keys = list(self.root.state_dict())
        names = set(given)
        loaded = {self.first[k] for k in keys if k in names}
        missing = [k for k in keys if k not in names and (strict and self.first[k] not in loaded)]
        known = [*keys, *(k for k in self.first if k not in keys)]
        extra = sorted(names - set(known))
        if strict and (missing or extra):
            raise UserError(
                f"state does not fit the model: missing {missing[:5] or 'none'}, unexpected {extra[:5] or 'none'}"
            )
        for key in known:
            if key in names and (self.first[key] in self.parameters or self.first[key] in self.buffers):
                self._fill(key, get(key))

    def _fill(self, key: str, given: Tensor | _Slice) -> None:
        first = self.first[key]
        target = self.parameters.get(first)
        shape = self.shapes[first] if target is not None else tuple(self.buffers[first].shape)
        if tuple(given.shape) != shape:
            raise UserError(f"state does not fit the model: {key} has shape {tuple(given.shape)}, wanted {shape}")
        layout = self.layouts[first] if target is not None else replicated(self.rt.mesh)
        here = unwrap(target.detach()) if target is not None else self.buffers[first]
        if isinstance(given, _Slice):
            given = given.piece(layout, self.rt.mesh, self.rt.rank)
            layout = replicated(self.rt.mesh)
        with torch.no_grad():
            here.copy_(cut(given, layout, self.rt.mesh, self.rt.rank, here.device, here.dtype))
        self.unloaded.discard(first)

    def require_loaded(self) -> None:
        """UserError if weights still wait for values."""
        if not self.unloaded:
            return
        beside = self.unloaded - {self.first[k] for k in self.root.state_dict()}
        if beside == self.unloaded:
            raise UserError(
                f"{len(beside)} buffers have no values yet, and no checkpoint has them since they are not persistent "
                f"(first: {min(beside)}): the model was built on the meta device; build it under "
                "autopar.without_weights(), which computes buffers, or give load_full_state_dict(...) these by name"
            )
        raise UserError(
            f"{len(self.unloaded)} tensors have no values yet (first: {min(self.unloaded - beside)}): the model was on "
            "the meta device; call load_full_state_dict(...) or load_safetensors(...) first"
        )


def _opened(path: str) -> Any:
    """A safetensors file. UserError naming it if it can't be read."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: no whole safetensors file: {str(error).splitlines()[0]}") from None


class _Slice:
    """A tensor in a safetensors file, read by rows."""

    def __init__(self, file: object, key: str) -> None:
        self._slice = file.get_slice(key)  # type: ignore[attr-defined]
        self.shape: tuple[int, ...] = tuple(self._slice.get_shape())

    def piece(self, layout: Layout, mesh: Mesh, rank: int) -> Tensor:
        """This rank's piece."""
        if not self.shape:
            whole: Tensor = self._slice[...]
            return whole
        start, size = local_piece(self.shape, layout, mesh, rank)
        if 0 in size:
            return torch.empty(size)
        found: Tensor = self._slice[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]
        return found


def storage_layouts(names: Mapping[str, str], mesh: Mesh) -> dict[str, Layout]:
    """Layouts by parameter name, from their text. PlanError if a parameter would be stored as a sum."""
    found = {name: parse_layout(text, mesh) for name, text in names.items()}
    for name, layout in found.items():
        if layout.partial:
            raise PlanError(f"plan stores parameter {name} as {layout}: a parameter cannot be stored as a sum")
    return found

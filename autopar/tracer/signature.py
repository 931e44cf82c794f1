"""How a call's arguments become leaves, by name in any order, and how output tensors become the model's own result."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import CaptureError, InputError
from autopar.ir.graph import CallSignature, InputLeaf, TensorMeta
from autopar.tracer.tree import PLAIN, Spec, flatten

WIDE = {"fp64": torch.float64}
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" of torch.float32."""
    return str(dtype).removeprefix("torch.")


def meta_of(tensor: Tensor) -> TensorMeta:
    """Shape and dtype name."""
    return TensorMeta(tuple(tensor.shape), dtype_name(tensor.dtype))


def captured_dtype(dtype: torch.dtype, precision: str) -> torch.dtype:
    """What a tensor of this dtype is stored as in a capture of this precision: fp64 widens floating tensors."""
    return WIDE.get(precision, dtype) if dtype.is_floating_point else dtype


def named_arguments(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Argument name -> value with defaults, in the signature's order; `*xs` under "xs[i]", `**kw` by name, sorted."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(f"the call does not fit the model's forward{signature}: {error}") from None
    bound.apply_defaults()
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            named.update({f"{name}[{i}]": item for i, item in enumerate(value)})
        elif kind is inspect.Parameter.VAR_KEYWORD:
            named.update(sorted(value.items()))
        else:
            named[name] = value
    return named


@dataclass(frozen=True, slots=True)
class Read:
    """(args, kwargs) -> every leaf of a call by its path, defaults included. InputError if the call does not fit."""

    signature: inspect.Signature

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in named_arguments(self.signature, args, kwargs).items():
            found.update(flatten(value, name)[0])
        return found


@dataclass(frozen=True, slots=True)
class AsCaptured:
    """The dtype that a tensor has in a capture of this precision."""

    precision: str

    def __call__(self, dtype: torch.dtype) -> torch.dtype:
        return captured_dtype(dtype, self.precision)


@dataclass(frozen=True, slots=True)
class Flatten:
    """(args, kwargs) -> leaves in the order of `leaves`; tensors and constants are compared with what was captured."""

    signature: inspect.Signature
    leaves: tuple[InputLeaf, ...]
    precision: str

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        found = Read(self.signature)(args, kwargs)
        known = {leaf.path for leaf in self.leaves}
        extra = [path for path in found if path not in known]
        missing = [leaf.path for leaf in self.leaves if leaf.path not in found]
        if missing:
            was = "" if not extra else f" ({', '.join(extra)} given instead)"
            raise InputError(
                f"input {missing[0]!r} is missing{was}: the model was captured with it; pass it, or capture again"
            )
        if extra:
            raise InputError(f"input {extra[0]!r} was not there at capture: leave it out, or capture again with it")
        return [self._checked(leaf, found[leaf.path]) for leaf in self.leaves]

    def _checked(self, leaf: InputLeaf, value: Any) -> Any:
        if leaf.meta is None:
            same = not isinstance(value, Tensor) and type(value) is type(leaf.constant) and value == leaf.constant
            if not same:
                shown = f"a tensor {meta_of(value)}" if isinstance(value, Tensor) else repr(value)
                raise InputError(
                    f"input {leaf.path!r} is {shown}, captured as {leaf.constant!r}: capture again for this value"
                )
            return value
        if not isinstance(value, Tensor):
            raise InputError(f"input {leaf.path!r} is {value!r}, wanted a tensor {leaf.meta}")
        if captured_dtype(value.dtype, self.precision) != value.dtype:
            value = value.to(captured_dtype(value.dtype, self.precision))
        if meta_of(value) != leaf.meta:
            raise InputError(
                f"input {leaf.path!r} is {meta_of(value)}, captured as {leaf.meta}: capture again for this one"
            )
        return value


@dataclass(frozen=True, slots=True)
class Rebuild:
    """Output tensors -> the model's own return value. `leaves`: an int (which tensor) or a `Constant` for each leaf."""

    spec: Spec
    leaves: tuple[int | Constant, ...]

    def __call__(self, tensors: Sequence[Any]) -> Any:
        return self.spec.build([tensors[x] if isinstance(x, int) else x.value for x in self.leaves])


@dataclass(frozen=True, slots=True)
class Constant:
    """A leaf of the result that is not a tensor."""

    value: Any


@dataclass(frozen=True, slots=True)
class Inputs:
    """The example call, taken apart.

    Attributes:
        args, kwargs: as the user gave them.
        leaves: every leaf, defaults included; its tensors in `tensors`, in this order.
        signature: of the model's forward.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: tuple[InputLeaf, ...]
    tensors: tuple[Tensor, ...]
    signature: inspect.Signature

    @property
    def tensor_paths(self) -> tuple[str, ...]:
        """Paths of the tensor leaves, in order."""
        return tuple(leaf.path for leaf in self.leaves if leaf.meta is not None)

    def call(self, forward: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
        """forward(...) as the user called it, with other tensors."""
        by_path = dict(zip(self.tensor_paths, tensors, strict=True))
        names = _positional_names(self.signature, len(self.args))
        args = [_swapped(value, name, by_path) for name, value in zip(names, self.args, strict=True)]
        kwargs = {name: _swapped(value, name, by_path) for name, value in self.kwargs.items()}
        return forward(*args, **kwargs)


def _positional_names(signature: inspect.Signature, count: int) -> list[str]:
    names: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}[{i}]" for i in range(count - len(names))]
        elif parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return names[:count]


def _swapped(value: Any, name: str, by_path: dict[str, Tensor]) -> Any:
    leaves, spec = flatten(value, name)
    return spec.build([by_path.get(path, leaf) for path, leaf in leaves])


def read_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], precision: str) -> Inputs:
    """The example call's leaves.

    Raises:
        CaptureError: an argument is neither a tensor, nor a container of tensors, nor a plain constant.
    """
    signature = inspect.signature(model.forward)
    leaves: list[InputLeaf] = []
    tensors: list[Tensor] = []
    for name, value in named_arguments(signature, args, kwargs).items():
        for path, leaf in flatten(value, name)[0]:
            if isinstance(leaf, Tensor):
                dtype = dtype_name(captured_dtype(leaf.dtype, precision))
                leaves.append(InputLeaf(path=path, meta=TensorMeta(tuple(leaf.shape), dtype)))
                tensors.append(leaf)
            elif isinstance(leaf, PLAIN):
                leaves.append(InputLeaf(path=path, meta=None, constant=leaf))
            else:
                raise CaptureError(
                    f"input {path!r} is a {type(leaf).__qualname__}: neither a tensor, nor a dict, list, tuple or "
                    "dataclass of tensors, nor a plain constant: pass its tensors themselves, or make it a dataclass"
                )
    return Inputs(args, kwargs, tuple(leaves), tuple(tensors), signature)


def read_outputs(result: Any) -> tuple[list[tuple[str, Tensor]], Rebuild]:
    """The result's tensors with their paths, and the way back.

    Raises:
        CaptureError: something in the result is neither a tensor, nor a container, nor a plain constant.
    """
    leaves, spec = flatten(result)
    tensors: list[tuple[str, Tensor]] = []
    template: list[int | Constant] = []
    for path, leaf in leaves:
        if isinstance(leaf, Tensor):
            template.append(len(tensors))
            tensors.append((path or "result", leaf))
        elif isinstance(leaf, PLAIN):
            template.append(Constant(leaf))
        else:
            remedy = "return its tensors instead"
            if "cache" in type(leaf).__name__.lower():
                remedy = "a training step needs no cache: pass use_cache=False"
            raise CaptureError(f"output {path!r} is a {type(leaf).__qualname__}, which cannot be given back: {remedy}")
    return tensors, Rebuild(spec, tuple(template))


def call_signature(
    inputs: Inputs,
    paths: Sequence[str],
    rebuild: Rebuild,
    differentiable: Sequence[bool],
    detached: Sequence[bool],
    precision: str,
) -> CallSignature:
    """The noun that other rooms use."""
    return CallSignature(
        inputs=inputs.leaves,
        outputs=tuple(paths),
        differentiable=tuple(differentiable),
        flatten=Flatten(inputs.signature, inputs.leaves, precision),
        rebuild=rebuild,
        detached=tuple(detached),
        read=Read(inputs.signature),
        as_captured=AsCaptured(precision),
    )

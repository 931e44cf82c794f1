"""Runs one call of a region: the user's own submodule, under autograd, on whole tensors.

A rank holds a copy of the submodule whose parameters and buffers are empty places; each call puts its arguments there.
Random numbers are drawn from a seed that all ranks share, so that replicas agree. One region runs at a time in a
process: ranks that are threads would otherwise draw from one generator in turns.
"""

from __future__ import annotations

import copy
import hashlib
import random
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import InputError
from autopar.tracer.signature import Constant
from autopar.tracer.tree import Spec, flatten
from autopar.tracer.wide import Wide

_ALONE = threading.RLock()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSpec:
    """How one call is made, as it was seen at capture. Arguments: its tensor inputs, then its parameters and buffers.

    Attributes:
        spec, leaves: of (args, kwargs); tensors are None in `leaves`, `inputs` are their positions.
        names: of the arguments, for messages.
        places: for each parameter and buffer, where it is in the submodule: (path, "_parameters" or "_buffers", name).
        grads: for each argument whether it needs a gradient; `gradients`: whether the backward gives one.
        updated: positions of the arguments that are buffers to which the call gives new values.
        results, result_spec: the result's leaves: an int is an output.
        outputs: shape and dtype of each; `differentiable`: whether it needs a gradient.
        grad_mode, autocast: at the call. `wide`: float32 means float64.
    """

    key: str
    spec: Spec
    leaves: tuple[Any, ...]
    inputs: tuple[int, ...]
    names: tuple[str, ...]
    places: tuple[tuple[tuple[str, str, str], ...], ...]
    grads: tuple[bool, ...]
    gradients: tuple[bool, ...]
    updated: tuple[int, ...]
    results: tuple[int | Constant, ...]
    result_spec: Spec
    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    differentiable: tuple[bool, ...]
    grad_mode: bool
    autocast: torch.dtype | None
    wide: bool


@dataclass(slots=True)
class Kept:
    """What a backward needs: the arguments as leaves of autograd, and the outputs."""

    arguments: list[Tensor]
    outputs: list[Tensor]


class Runner:
    """`module` is a copy for this runner, made by `copied`; calls of one module share it."""

    def __init__(self, spec: CallSpec, module: nn.Module) -> None:
        self.spec = spec
        self.module = module

    def forward(self, tensors: Sequence[Tensor], salt: str) -> list[Any]:
        """Outputs, new values of the updated buffers, and `Kept`.

        Raises:
            InputError: the result is not as it was at capture (another shape, dtype or structure), or something else
                than it was changed in place.
        """
        s = self.spec
        arguments = [x.detach() for x in tensors]
        for k in s.updated:
            arguments[k] = arguments[k].clone()
        for x, grad in zip(arguments, s.grads, strict=True):
            x.requires_grad_(grad)
        before = [x._version for x in tensors]
        first = len(s.inputs)
        fixed = [
            k for k in range(first, len(tensors)) if s.places[k - first][0][1] == "_buffers" and k not in s.updated
        ]
        values = [tensors[k].clone() for k in fixed]
        leaves = list(s.leaves)
        for at, x in zip(s.inputs, arguments, strict=False):
            leaves[at] = x
        args, kwargs = s.spec.build(leaves)
        with ExitStack() as stack:
            installed = self._entered(stack, arguments)
            stack.enter_context(drawing(salt, tensors))
            stack.enter_context(torch.set_grad_enabled(s.grad_mode))
            result = self.module(*args, **kwargs)
            now = [d[name] for d, name in installed]
        for name, x, version in zip(s.names, tensors, before, strict=True):
            if x._version != version:
                raise self._changed(f"it changes {name} in place, which it did not at capture")
        for k, value in zip(fixed, values, strict=True):
            if not same_values(value, tensors[k]):
                raise self._changed(f"it changes {s.names[k]}, which it did not at capture")
        for k, x in enumerate(now, first):
            if x is not arguments[k] and k not in s.updated:
                raise self._changed(f"it replaces {s.names[k]}, which it did not at capture")
        outputs = self._outputs(result)
        updates = [now[k - first].detach() for k in s.updated]
        for k, new in zip(s.updated, updates, strict=True):
            if new.shape != arguments[k].shape:
                raise self._changed(f"it gives {s.names[k]} shape {list(new.shape)}, was {list(arguments[k].shape)}")
        found = [x.detach().contiguous() for x in outputs]
        return [*found, *updates, Kept(arguments, outputs)]

    def backward(self, kept: Kept, tangents: Sequence[Tensor], again: bool) -> tuple[list[Tensor], frozenset[int]]:
        """Gradients of the arguments that have one, and which of them autograd gave none for: zeros there.

        `again`: the backward of the same call may come once more.
        """
        s = self.spec
        wanted = [x for x, flag in zip(kept.outputs, s.differentiable, strict=False) if flag]
        pairs = [(x, g) for x, g in zip(wanted, tangents, strict=True) if x.requires_grad]
        if pairs:
            with ExitStack() as stack:
                self._entered(stack, kept.arguments)
                torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs], retain_graph=again)
        found: list[Tensor] = []
        missing = set()
        for name, x, given in zip(s.names, kept.arguments, s.gradients, strict=True):
            gradient, x.grad = x.grad, None
            if not given:
                if gradient is not None:
                    raise self._changed(f"{name} gets a gradient, got none at capture")
                continue
            if gradient is None:
                missing.add(len(found))
                gradient = torch.zeros_like(x)
            found.append(gradient.detach().contiguous())
        return found, frozenset(missing)

    def _entered(self, stack: ExitStack, arguments: Sequence[Tensor]) -> list[tuple[dict[str, Any], str]]:
        """The arguments in their places, and the call's modes; the first place of each parameter and buffer."""
        s = self.spec
        stack.enter_context(_ALONE)
        first = []
        saved = []
        for places, x in zip(s.places, arguments[len(s.inputs) :], strict=True):
            found = [(getattr(self.module.get_submodule(path), which), name) for path, which, name in places]
            first.append(found[0])
            for d, name in found:
                saved.append((d, name, d[name]))
                d[name] = x
        stack.callback(_restore, saved)
        if s.wide:
            stack.enter_context(Wide())
        if s.autocast is not None:
            stack.enter_context(torch.autocast("cpu", dtype=s.autocast))
        return first

    def _outputs(self, result: Any) -> list[Tensor]:
        s = self.spec
        pairs, spec = flatten(result)
        if spec != s.result_spec:
            raise self._changed("its result has another structure than at capture")
        found: list[Tensor] = []
        for (path, leaf), was in zip(pairs, s.results, strict=True):
            place = f"output {path}" if path else "its output"
            if isinstance(was, Constant):
                if isinstance(leaf, Tensor) or leaf != was.value:
                    raise self._changed(f"{place} is {_shown(leaf)}, was {was.value!r} at capture")
                continue
            shape, dtype = s.outputs[was]
            if not isinstance(leaf, Tensor) or tuple(leaf.shape) != shape or leaf.dtype != dtype:
                raise self._changed(f"{place} is {_shown(leaf)}, was {_words(shape, dtype)} at capture")
            if leaf.requires_grad and not s.differentiable[was]:
                raise self._changed(f"{place} needs a gradient, needed none at capture")
            found.append(leaf)
        return found

    def _changed(self, what: str) -> InputError:
        return InputError(f"region {self.spec.key}: {what}: capture again with an example for which it does so")


def _words(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _shown(leaf: Any) -> str:
    return _words(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf)


def same_values(a: Tensor, b: Tensor) -> bool:
    """Of equal shapes; NaN is NaN."""
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _restore(saved: list[tuple[dict[str, Any], str, Any]]) -> None:
    for d, name, value in saved:
        d[name] = value


@contextmanager
def drawing(salt: str, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Torch's, Python's and numpy's global generators start from `salt`; afterwards they are as before."""
    seed = int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=4).digest(), "little")
    numpy = sys.modules.get("numpy")
    devices = sorted({x.device.index or 0 for x in tensors if x.is_cuda})
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        for device in devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        python = random.getstate()
        arrays = numpy.random.get_state() if numpy is not None else None
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(arrays)


def generators() -> tuple[Any, ...]:
    """What the global CPU generators stand at; compare with ==."""
    numpy = sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()
    arrays = () if state is None else (state[1].tobytes(), state[2])
    return bytes(torch.get_rng_state().tolist()), random.getstate(), arrays


def copied(module: nn.Module, stored: Sequence[Tensor]) -> nn.Module:
    """A copy of a submodule in which the model's parameters and buffers, `stored`, are empty."""
    memo: dict[int, Any] = {}
    for x in stored:
        empty = torch.empty_like(x, device="meta")
        memo[id(x)] = nn.Parameter(empty, x.requires_grad) if isinstance(x, nn.Parameter) else empty
    for sub in module.modules():
        for x in _made(sub.__dict__):
            memo.setdefault(id(x), x.detach().clone())
    return copy.deepcopy(module, memo)


def _made(tree: Any) -> Iterator[Tensor]:
    """Tensors with a history among attributes: left over from an earlier call; deepcopy refuses them."""
    if isinstance(tree, Tensor):
        if not tree.is_leaf:
            yield tree
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _made(item)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _made(item)

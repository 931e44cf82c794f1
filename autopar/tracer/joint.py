"""One joint capture: a function of flat tensors (parameters, buffers, inputs) -> its forward-and-backward `Graph`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopar.tracer.decompositions import table
from autopar.tracer.source import line_of_frame
from autopar.tracer.torch_private import Joint, export_joint, outer_frame


@dataclass(slots=True)
class Position:
    """Where the forward is: the stack of module paths."""

    paths: list[str] = field(default_factory=lambda: [""])

    def __call__(self) -> tuple[str, str]:
        return self.paths[-1], line_of_frame(outer_frame())


class Harness(nn.Module):
    """A module with no parameters of its own around a function of flat tensors: what AOT autograd is given."""

    def __init__(self, run: Callable[..., tuple[Tensor, ...]]) -> None:
        super().__init__()
        object.__setattr__(self, "run", run)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Flat tensors -> flat outputs."""
        result: tuple[Tensor, ...] = object.__getattribute__(self, "run")(*tensors)
        return result


def trace(run: Callable[..., tuple[Tensor, ...]], arguments: Sequence[Tensor], position: Position) -> Joint:
    """The joint graph of `run(*arguments)`. Arguments are leaves; outputs that need a gradient get a tangent.

    Every output is cloned and contiguous: none shares memory with an argument or another output; `convert` takes
    out the clones that only copy.
    """

    def cloned(*tensors: Tensor) -> tuple[Tensor, ...]:
        position.paths[:] = [""]
        return tuple(x.clone(memory_format=torch.contiguous_format) for x in run(*tensors))

    def lifted(*tensors: Tensor) -> tuple[Tensor, ...]:
        with Lifted():
            return cloned(*tensors)

    try:
        return export_joint(Harness(cloned), tuple(arguments), table(), position)
    except AssertionError as error:
        if "entirely functional" not in str(error):
            raise
    return export_joint(Harness(lifted), tuple(arguments), table(), position)


class Lifted(TorchFunctionMode):
    """While entered, tensors with data that the forward meets (neither weights nor inputs) are values of the trace.

    Otherwise what is made of such tensors alone is unknown to AOT autograd, which then meets in-place ops on it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*self._lifted(args), **self._lifted(dict(kwargs or {})))

    def _lifted(self, tree: Any) -> Any:
        if type(tree) is Tensor and not tree.requires_grad:
            if id(tree) not in self.known:
                self.known[id(tree)] = tree, torch.ops.aten.lift_fresh.default(tree)
            return self.known[id(tree)][1]
        if type(tree) in (tuple, list):
            return type(tree)(map(self._lifted, tree))
        return {k: self._lifted(v) for k, v in tree.items()} if type(tree) is dict else tree

"""One joint capture: a function of flat tensors (parameters, buffers, inputs) -> its forward-and-backward `Graph`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

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

    return export_joint(Harness(cloned), tuple(arguments), table(), position)

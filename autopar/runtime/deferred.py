"""A module that is compiled at its first call, when its inputs are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from autopar.errors import InputError
from autopar.runtime.module import ParallelModule

Build = Callable[[Mapping[str, Any] | tuple[Any, ...]], ParallelModule]


class DeferredModule(nn.Module):
    """Stands for the compiled module until it is called. Asking for parameters before that is an error that says so."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self._build = build
        self._built: list[ParallelModule] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compiles with these inputs at the first call; then as `ParallelModule.forward`."""
        if not self._built:
            if args and kwargs:
                raise InputError(
                    "the first call of a module compiled without example_inputs: give all arguments by name"
                )
            self._built.append(self._build(kwargs or args))
        return self._built[0](*args, **kwargs)

    @property
    def compiled(self) -> ParallelModule:
        """The compiled module. InputError before the first call."""
        if not self._built:
            raise InputError(
                "this module has no parameters yet: it is compiled at its first call, since compile() got no "
                "example_inputs. Pass example_inputs=batch to compile(), or call the module once first"
            )
        return self._built[0]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Of the compiled module."""
        return self.compiled.named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Of the compiled module."""
        return self.compiled.state_dict(*args, **kwargs)

    def train(self, mode: bool = True) -> DeferredModule:
        """Of the compiled module, once there is one."""
        super().train(mode)
        for built in self.__dict__.get("_built", []):
            built.train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        if name in ("plan", "source", "full_state_dict", "load_full_state_dict", "communicator"):
            return getattr(self.compiled, name)
        return super().__getattr__(name)

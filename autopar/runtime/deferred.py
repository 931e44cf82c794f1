"""A module that is compiled at its first call, when its inputs are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from autopar.errors import InputError
from autopar.runtime.compiled import CompiledModule
from autopar.runtime.module import ParallelModule
from autopar.runtime.staged import StagedModule

Build = Callable[[tuple[Any, ...], dict[str, Any]], CompiledModule]


class TooEarlyError(InputError, AttributeError):
    """Something of a compiled module was asked for before there is one."""


class DeferredModule(nn.Module):
    """Stands for the compiled module until it is called, and becomes it then (as torch's lazy modules do).

    Asking for parameters before that is an error that says so: an optimizer would silently get none.
    """

    def __init__(self, build: Build, *, training: bool = True) -> None:
        super().__init__()
        self._build = build
        self.training = training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compiles with these inputs and becomes the compiled module."""
        with torch.inference_mode(False):
            built = self._build(args, kwargs)
        if built.training != self.training:
            built.train(self.training)
        for key, hooks in self.__dict__.items():
            if key.endswith("_hooks") or "_hooks_" in key:
                built.__dict__[key].update(hooks)
        built.become(self)
        return self.forward(*args, **kwargs)

    def _early(self, *_: Any, **__: Any) -> NoReturn:
        raise TooEarlyError(
            "this module has no parameters yet: it is compiled at its first call, since compile() got no "
            "example_inputs. Pass example_inputs=batch to compile(), or call the module once first"
        )

    parameters = named_parameters = buffers = named_buffers = modules = named_modules = _early  # type: ignore[assignment]
    state_dict = load_state_dict = _apply = __deepcopy__ = __reduce_ex__ = _early  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        if hasattr(ParallelModule, name) or hasattr(StagedModule, name):
            self._early()
        return super().__getattr__(name)

"""A model built without memory for its weights, which are loaded into the compiled module later."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary


@contextmanager
def without_weights() -> Iterator[None]:
    """Models built inside have their parameters on the meta device, one after the other, and all else as it is.

    `torch.device("meta")` would also take the values of buffers and of plain tensors that a model computes when it is
    built (frequencies, masks); those that no checkpoint holds would be lost. Holds for this thread.
    """
    thread = threading.get_ident()
    known = WeakIdKeyDictionary()  # one parameter registered twice stays one

    def emptied(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or threading.get_ident() != thread:
            return None
        if parameter not in known:
            made = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            made.__dict__.update(parameter.__dict__)
            known[parameter] = made
        found: nn.Parameter = known[parameter]
        return found

    hook = register_module_parameter_registration_hook(emptied)  # type: ignore[arg-type]  # torch says None only
    try:
        yield
    finally:
        hook.remove()

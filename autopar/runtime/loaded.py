"""Emitted source as a module: compiled, visible to tracebacks, and with errors that point to the user's own line."""

from __future__ import annotations

import linecache
import types
from collections.abc import Callable, Mapping
from typing import Any

from autopar.errors import AutoparError, UserError
from autopar.ir.program import Place, Source
from autopar.runtime.comm import Communicator


class EmittedError(AutoparError, RuntimeError):
    """An op of the compiled model failed. Says which line of the user's model; `__cause__` is what the op raised."""


class Executable:
    """The emitted functions and tables of one source."""

    def __init__(self, source: Source, name: str) -> None:
        self.source = source
        digest = f"{hash(source.text) & 0xFFFFFFFF:08x}"
        self.filename = f"<autopar {name} {digest}>"
        linecache.cache[self.filename] = (len(source.text), None, source.text.splitlines(keepends=True), self.filename)
        module = types.ModuleType("autopar_emitted")
        exec(compile(source.text, self.filename, "exec"), module.__dict__)
        self._forward: Callable[..., Any] = module.forward
        self._backward: Callable[..., Any] = module.backward
        self._weights: Callable[..., Any] | None = module.__dict__.get("backward_weights")
        self._names: dict[str, Any] = module.__dict__
        self.axes: tuple[tuple[str, int], ...] = module.AXES
        self.parameters: Mapping[str, str] = module.PARAMETERS
        self.buffers: Mapping[str, str] = module.BUFFERS
        self.constants: Mapping[str, str] = module.CONSTANTS
        self.inputs: Mapping[str, str] = module.INPUTS
        self.outputs: Mapping[str, str] = module.OUTPUTS
        self.tangents: Mapping[str, str] = module.TANGENTS
        self.updates: tuple[str, ...] = module.UPDATES
        self.differentiated: tuple[str, ...] = module.__dict__.get("DIFFERENTIATED", ())
        self.draws: bool = module.__dict__.get("DRAWS", False)

    def forward(
        self, rt: Communicator, parameters: list[Any], buffers: list[Any], constants: list[Any], inputs: list[Any]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """(outputs, new values of buffers, saved)."""
        outputs, updates, saved = self._called(self._forward, rt, parameters, buffers, constants, inputs)
        return outputs, updates, saved

    def backward(
        self, rt: Communicator, parameters: list[Any], buffers: list[Any], constants: list[Any], saved: list[Any],
        tangents: list[Any],
    ) -> Any:  # fmt: skip
        """Gradients of the parameters, then of the inputs in `differentiated`, None where none. Empties `saved`.

        Of a backward in halves: (the latter alone, what `weights` needs).
        """
        return self._called(self._backward, rt, parameters, buffers, constants, saved, tangents)

    def weights(
        self, rt: Communicator, parameters: list[Any], buffers: list[Any], constants: list[Any], saved: list[Any]
    ) -> list[Any]:  # fmt: skip
        """The second half of a backward: what `backward` gives of a whole one, None of what the first gave."""
        assert self._weights is not None
        found: list[Any] = self._called(self._weights, rt, parameters, buffers, constants, saved)
        return found

    def _called(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except UserError:
            raise
        except Exception as error:
            raise self._told(error) from error

    def _told(self, error: Exception) -> Exception:
        """The error with the innermost emitted line and where it comes from."""
        frame, line = None, 0
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == self.filename:
                frame, line = trace.tb_frame, trace.tb_lineno
            trace = trace.tb_next
        if frame is None:
            return EmittedError(f"{type(error).__name__}: {error}")
        place = self.source.lines.get(line)
        text = linecache.getline(self.filename, line).strip().split("  # ")[0]
        where = self._where(place, frame) if place is not None else f"in {frame.f_code.co_name}"
        return EmittedError(
            f"{type(error).__name__}: {error}\n  {where}\n  emitted line {line} ({frame.f_code.co_name}): {text}"
        )

    def _where(self, place: Place, frame: types.FrameType) -> str:
        stem = frame.f_code.co_name.rpartition("_")[0]
        instances = self._names.get(f"{stem}_INSTANCES")
        path = place.module_path
        if instances is not None and "i" in frame.f_locals:
            path = ".".join(p for p in (instances[frame.f_locals["i"]], path) if p)
        return f"{place.source or 'unknown source'}, in module {path or '(top)'}"

"""torch's errors during a capture -> one readable `CaptureError` with the user's line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from autopar.errors import AutoparError, CaptureError
from autopar.tracer.rig import failed_module
from autopar.tracer.source import failing_line
from autopar.tracer.torch_private import DATA_DEPENDENT

INTO_SUBMODULE = "; or move it into a submodule, which then runs whole on every rank"


@dataclass(frozen=True, slots=True)
class Refusal:
    """What could not be captured, in words.

    Attributes:
        where, expression: "file.py:12" and its source text, "" if unknown.
        what: "... needs the value of a tensor, unknown at capture"; `remedy`: what to do, "" if unknown.
        module: path of the module whose forward it happened in, None if unknown.
    """

    where: str
    expression: str
    what: str
    remedy: str
    module: str | None

    @property
    def place(self) -> str:
        """The line and its text."""
        return f"{self.where}: `{self.expression}`" if self.where else "the forward"

    def __str__(self) -> str:
        return f"{self.place} {self.what}" + (f": {self.remedy}" if self.remedy else "")


class UncapturableError(CaptureError):
    """Something that cannot be captured, but may run as it is inside a region."""

    def __init__(self, refusal: Refusal, more: str = "") -> None:
        super().__init__(f"{refusal}{more}")
        self.refusal = refusal


def refusal_of(error: Exception) -> Refusal:
    """An exception of torch's or of the user's forward, in words."""
    where, expression = failing_line(error.__traceback__)
    module = failed_module(error)
    if _is_data_dependent(error):
        remedy = (
            "use torch.where or a mask instead of a Python condition, keep shapes independent of values, or decide "
            "it outside forward" + _hint(where)
        )
        return Refusal(where, expression, "needs the value of a tensor, unknown at capture", remedy, module)
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    if "DeviceMismatch" in type(error).__name__ and "meta" in first:
        remedy = (
            "build the model under autopar.without_weights(), which leaves only parameters without values; or register "
            "it as a buffer"
        )
        return Refusal(where, expression, "meets a plain tensor on the meta device, which has no values", remedy, None)
    return Refusal(where, expression, f"failed at capture: {type(error).__name__}: {first}", "", module)


@contextmanager
def readable_errors() -> Iterator[None]:
    """Whatever the body raises, but for our own errors, becomes an `UncapturableError`."""
    try:
        yield
    except AutoparError:
        raise
    except Exception as error:
        raise UncapturableError(refusal_of(error)) from None


def _is_data_dependent(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, DATA_DEPENDENT):
            return True
        error = error.__cause__ or error.__context__
    return False


def _hint(where: str) -> str:
    if "moe" in where or "modeling_" in where:
        return "; for a mixture of experts: torch.ops.autopar.route, spread, grouped_mm and collect (docs/experts.md)"
    return ""

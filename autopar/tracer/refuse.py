"""torch's errors during a capture -> one readable `CaptureError` with the user's line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from autopar.errors import AutoparError, CaptureError
from autopar.tracer.source import failing_line
from autopar.tracer.torch_private import DATA_DEPENDENT


@contextmanager
def readable_errors() -> Iterator[None]:
    """Whatever the body raises, but for our own errors, becomes a CaptureError."""
    try:
        yield
    except AutoparError:
        raise
    except Exception as error:
        where, expression = failing_line(error.__traceback__)
        place = f"{where}: `{expression}`" if where else "the forward"
        if _is_data_dependent(error):
            raise CaptureError(
                f"{place} needs the value of a tensor, unknown at capture: use torch.where or a mask instead of "
                "a Python condition, keep shapes independent of values, or decide it outside forward" + _hint(where)
            ) from None
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CaptureError(f"{place} failed at capture: {type(error).__name__}: {first}") from None


def _is_data_dependent(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, DATA_DEPENDENT):
            return True
        error = error.__cause__ or error.__context__
    return False


def _hint(where: str) -> str:
    if "moe" in where or "modeling_" in where:
        return "; for a Hugging Face mixture of experts: model.set_experts_implementation('batched_mm') or 'grouped_mm'"
    return ""

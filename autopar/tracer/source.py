"""Which line of the user's code runs now, or failed: the innermost frame that is neither torch's nor autopar's."""

from __future__ import annotations

import linecache
import os
from functools import lru_cache
from types import CodeType, FrameType, TracebackType

import torch
from torch import nn

import autopar

_OURS = os.path.dirname(os.path.abspath(autopar.__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_PYTHON = os.path.dirname(os.path.abspath(os.__file__)) + os.sep


@lru_cache(maxsize=4096)
def _is_users(filename: str) -> bool:
    if filename.startswith("<") or filename.startswith((_OURS, _TORCH)):
        return False
    return not filename.startswith(_PYTHON) or "site-packages" in filename


@lru_cache(maxsize=4096)
def _short(filename: str) -> str:
    """Relative to the working directory if below it, else the file's base name."""
    here = os.getcwd() + os.sep
    inside = filename.startswith(here) and "site-packages" not in filename
    return filename[len(here) :] if inside else os.path.basename(filename)


def line_of_frame(frame: FrameType | None) -> str:
    """ "file.py:12" of the innermost user frame at or above `frame`, "" if there is none."""
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def failing_line(trace: TracebackType | None) -> tuple[str, str]:
    """("file.py:12", expression text) of the innermost user frame in a traceback, ("", "") if there is none."""
    found = None
    while trace is not None:
        if _is_users(trace.tb_frame.f_code.co_filename):
            found = trace
        trace = trace.tb_next
    if found is None:
        return "", ""
    filename = found.tb_frame.f_code.co_filename
    return f"{_short(filename)}:{found.tb_lineno}", _expression(found.tb_frame.f_code, found.tb_lasti, found.tb_lineno)


def _expression(code: CodeType, instruction: int, lineno: int) -> str:
    """The source text that the instruction belongs to; its whole line where Python does not know the columns."""
    line = linecache.getline(code.co_filename, lineno)
    positions = list(code.co_positions())
    if instruction // 2 < len(positions):
        first, last, start, end = positions[instruction // 2]
        if first == last == lineno and start is not None and end is not None and end > start:
            return line.encode()[start:end].decode(errors="replace")
    return line.strip()


def source_of(module: nn.Module) -> str:
    """ "file.py:12" of a module's forward, "" if unknown."""
    code = getattr(getattr(type(module).forward, "__func__", type(module).forward), "__code__", None)
    return f"{_short(code.co_filename)}:{code.co_firstlineno}" if code is not None else ""

"""The inside of a rank that `launch` starts: find the function, run it, hand its result or its error over."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import faulthandler
import importlib
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from autopar.errors import UserError
from autopar.runtime.groups import init_ranks

STACK_SIGNAL = signal.SIGUSR1
"""Asks a rank to write down where its main thread is, also while that waits inside a collective."""


class NestedLaunch(BaseException):
    """`launch` called inside a rank: the script that is run again there has come to its own call, so it stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What ranks run. `script`: file to run as the main module; `cells`: source of a notebook's definitions."""

    module: str
    name: str
    path: tuple[str, ...]
    script: str | None
    package: str | None
    cells: str | None
    arguments: bytes


def in_rank() -> bool:
    """True in a process that `launch` started."""
    return "AUTOPAR_LAUNCH" in os.environ


def stop_or_refuse() -> NoReturn:
    """What `launch` does in a rank: stops the script that is run again, or refuses the rank's function."""
    if "AUTOPAR_FOUND" in os.environ:
        raise UserError("launch: a launched rank cannot launch ranks itself")
    raise NestedLaunch


def locate(fn: Callable[..., Any], args: tuple[Any, ...]) -> Task:
    """How a rank finds `fn`. UserError for what has no name there: lambdas, nested functions, a bare prompt."""
    module, name = getattr(fn, "__module__", None), getattr(fn, "__qualname__", "<unnamed>")
    if module is None or "<" in name:
        raise UserError(f"launch: {name} has no name that a rank can find; define the function at the top of a module")
    script = cells = package = None
    if module in ("__main__", "__mp_main__"):
        main = sys.modules["__main__"]
        package = main.__package__
        file = getattr(main, "__file__", None)
        if file is not None and Path(file).is_file():
            script = str(Path(file).resolve())
        else:
            cells = _notebook(main)
    try:
        arguments = pickle.dumps(args)
    except Exception as error:
        raise UserError(f"launch: the arguments of {name} cannot be pickled: {error}") from error
    return Task(
        module=module, name=name, path=tuple(sys.path), script=script, package=package, cells=cells, arguments=arguments
    )


def _notebook(main: types.ModuleType) -> str:
    """Imports, functions, classes and constants of the cells that ran. UserError at a bare prompt."""
    history = getattr(main, "In", None)
    if not isinstance(history, list):
        raise UserError("launch: the function is in no file (python -c, a pipe or a bare prompt); put it into a module")
    kept: list[str] = []
    for cell in history:
        try:
            tree = ast.parse(str(cell))
        except SyntaxError:
            continue
        kept += [ast.unparse(s) for s in tree.body if _defines(s)]
    return "\n".join(kept)


def _defines(statement: ast.stmt) -> bool:
    """True for statements that only define: imports, functions, classes, names for literals."""
    if isinstance(statement, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return True
    if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or statement.value is None:
        return False
    try:
        ast.literal_eval(statement.value)
    except ValueError:
        return False
    return True


def find(task: Task) -> Callable[..., Any]:
    """The function, in this process."""
    if task.script is not None or task.cells is not None:
        return _from_main(task)
    return _attribute(importlib.import_module(task.module), task.name)


def _from_main(task: Task) -> Callable[..., Any]:
    """Run the script, or a notebook's definitions, as the main module, up to its call of `launch`.

    It goes by "__mp_main__", as in multiprocessing, so that what stands behind a guard does not run.
    """
    main = types.ModuleType("__mp_main__")
    text = task.cells if task.cells is not None else Path(task.script or "").read_text()
    main.__file__ = task.script
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    main.__package__ = task.package
    with contextlib.suppress(NestedLaunch):
        exec(compile(text, task.script or "<notebook>", "exec"), main.__dict__)
    return _attribute(main, task.name)


def _attribute(module: types.ModuleType, name: str) -> Callable[..., Any]:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    result: Callable[..., Any] = found
    return result


def main() -> None:
    """Entry of a rank's process."""
    folder, rank = Path(os.environ["AUTOPAR_LAUNCH"]), int(os.environ["RANK"])
    _follow_parent(int(os.environ["AUTOPAR_LIFELINE"]))
    stack = (folder / f"{rank}.stack").open("w")
    faulthandler.register(STACK_SIGNAL, stack, all_threads=False)
    try:
        task: Task = pickle.loads((folder / "task").read_bytes())
        sys.path[:] = list(task.path)
        fn = find(task)
        os.environ["AUTOPAR_FOUND"] = "1"
        args = pickle.loads(task.arguments)
        init_ranks()
        result = fn(*args)
        _write(folder / f"{rank}.result", pickle.dumps(result if rank == 0 else None))
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            error = RuntimeError("the function called sys.exit before it returned")
        _write(folder / f"{rank}.error", pickle.dumps(_told(error)))
        _leave(1)
    _wait_for_others(folder, int(os.environ["WORLD_SIZE"]))
    _leave(0)


def _wait_for_others(folder: Path, ranks: int) -> None:
    """A rank that goes closes its connections, which others may still read from."""
    while not all((folder / f"{r}.result").exists() for r in range(ranks)):
        time.sleep(0.02)


LOST = ("DistBackendError", "DistNetworkError", "DistStoreError", "BrokenPipeError", "LostRankError")
"""Errors of a rank that follow from another's."""


def _told(error: BaseException) -> tuple[float, str, str, bool]:
    """(time, one line, traceback, True if it looks like a lost connection to a rank that failed before)."""
    text = str(error)
    lost = type(error).__name__ in LOST
    chain: BaseException | None = error
    while chain is not None:
        words = str(chain)
        lost = lost or any(
            w in words for w in ("Connection closed by peer", "Connection reset by peer", "gloo/transport")
        )
        chain = chain.__cause__ or chain.__context__
    return time.time(), f"{type(error).__name__}: {text}", "".join(traceback.format_exception(error)), lost


def _write(path: Path, data: bytes) -> None:
    """The file appears whole or not at all."""
    scratch = path.with_suffix(".partial")
    scratch.write_bytes(data)
    scratch.replace(path)


def _leave(code: int) -> None:
    """End without running destructors: a process group's can hang, and the result is handed over already."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _follow_parent(lifeline: int) -> None:
    """End, with all that this process started, when the parent is gone, however it went."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    def watch() -> None:
        os.read(lifeline, 1)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()

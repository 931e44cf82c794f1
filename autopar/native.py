"""Our C++ kernels (`native/`), opened through ctypes. The only file that knows their names and arguments
(but for the search of large problems, solver/pairwise/native.py, and the ranks of one host, runtime/shared.py).

The library is optional: everything that it does is done in PyTorch too, with the same bits. It is looked for beside the
package, then where autopar is installed. A library that was built from other sources than those beside the package is
not used, so a source tree runs the code that it shows. AUTOPAR_NATIVE=off leaves it out.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from autopar.errors import CompilerError

PACKAGE = Path(__file__).parent
NAME = "libautopar_kernels.so"

_POINTER, _I32, _I64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_U64, _F64 = ctypes.c_uint64, ctypes.c_double
_SPACE = (_POINTER, _I64)
_STREAM = (_U64, _U64)
_UPDATE = (_POINTER, _I64, _POINTER, _I32, _I32, _I32)

SIGNATURES: dict[str, tuple[Any, ...]] = {
    "words": (_POINTER, _I32, *_SPACE, *_STREAM, _I32),
    "uniform": (_POINTER, _I32, *_SPACE, *_STREAM, _I32),
    "normal": (_POINTER, _I32, *_SPACE, *_STREAM, _I32),
    "dropout": (_POINTER, _POINTER, _POINTER, _I32, _U64, _F64, *_SPACE, *_STREAM, _I32),
    "dropout_backward": (_POINTER, _POINTER, _POINTER, _I32, _F64, _I64, _I32),
    "combine": (_POINTER, _POINTER, _I32, _I64, _I32, _I32),
    "adamw": _UPDATE,
    "sgd": _UPDATE,
}
"""Kernel -> argument types, as in native/kernels. Each returns a Status of native/kernel.h, 0 if done."""


class OptimizerItem(ctypes.Structure):
    """One tensor that an optimizer updates: `Item` of native/kernels/optimizer.cpp."""

    _fields_ = (
        ("parameter", _POINTER), ("gradient", _POINTER), ("first", _POINTER), ("second", _POINTER), ("copy", _POINTER),
        ("count", _I64), ("rate", _F64), ("root", _F64), ("space", _POINTER), ("key", _U64), ("step", _U64),
    )  # fmt: skip


class OptimizerRule(ctypes.Structure):
    """What is the same for all tensors: `Rule` of native/kernels/optimizer.cpp."""

    _fields_ = (("factor", _F64), ("keep", _F64), ("a", _F64), ("b", _F64), ("c", _F64), ("eps", _F64))


STATUS = {1: "a dtype that it doesn't know", 2: "too many dims"}


@dataclass(frozen=True, slots=True)
class Kernels:
    """The library, compiled for `target` ("avx512", "avx2", "generic")."""

    path: Path
    target: str
    functions: dict[str, Any]

    def __call__(self, kernel: str, *arguments: Any) -> None:
        """Run a kernel. The GIL is released meanwhile."""
        status = self.functions[kernel](*arguments)
        if status:
            raise CompilerError(f"kernel {kernel}: {STATUS.get(status, f'status {status}')}")


@dataclass(frozen=True, slots=True)
class Found:
    """`kernels`, or None and `reason`, for people."""

    kernels: Kernels | None
    reason: str


@cache
def found() -> Found:
    """The library of this process, opened at the first call."""
    if os.environ.get("AUTOPAR_NATIVE", "").lower() in ("off", "0", "no"):
        return Found(None, "left out by AUTOPAR_NATIVE")
    reasons = []
    for path in _places():
        try:
            kernels = opened(path)
        except (OSError, AttributeError, ValueError) as error:
            reasons.append(f"{path}: {error}")
        else:
            return Found(kernels, f"{kernels.target}, {path}")
    return Found(None, "; ".join(reasons) or "not built: there was no C++ compiler at install")


def kernels() -> Kernels | None:
    """The library, or None."""
    return found().kernels


def _places() -> Iterator[Path]:
    """Libraries that are there, the one beside the package first."""
    beside = PACKAGE / "lib" / NAME
    if beside.exists():
        yield beside
    try:
        installed = Path(str(importlib.metadata.distribution("autopar").locate_file(f"autopar/lib/{NAME}")))
    except importlib.metadata.PackageNotFoundError:
        return
    if installed.exists() and installed.resolve() != beside.resolve():
        yield installed


def opened(path: Path, target: str | None = None) -> Kernels:
    """The library at `path`, for a target or for the best that this machine runs.

    Raises:
        OSError, AttributeError: it cannot be opened or lacks a kernel.
        ValueError: it is of other sources, doesn't run here, or gives wrong numbers.
    """
    library = ctypes.CDLL(str(path))
    library.autopar_compiled.restype = library.autopar_sources.restype = ctypes.c_char_p
    sources = source_digest()
    if sources is not None and library.autopar_sources().decode() != sources:
        raise ValueError("built from other sources; pip install again to build it anew")
    compiled = [t for t in library.autopar_compiled().decode().split() if library.autopar_runs(t.encode())]
    for name in reversed(compiled) if target is None else [t for t in compiled if t == target]:
        candidate = Kernels(path, name, {k: _function(library, k, name) for k in SIGNATURES})
        if draws_right(candidate):
            return candidate
    raise ValueError(f"no target of it runs right here ({target or ' '.join(compiled)})")


def _function(library: ctypes.CDLL, kernel: str, target: str) -> Any:
    function = getattr(library, f"autopar_{kernel}_{target}")
    function.argtypes, function.restype = SIGNATURES[kernel], ctypes.c_int32
    return function


def source_digest() -> str | None:
    """SHA-256 over the kernel sources beside the package, as native/CMakeLists.txt takes it; None if there are none."""
    folder = PACKAGE.parent / "native"
    files = [*folder.glob("*.cpp"), *folder.glob("*.h"), *folder.glob("kernels/*.cpp"), *folder.glob("CMakeLists.txt")]
    files += [f for room in ("pairwise", "shared") for kind in ("cpp", "h") for f in folder.glob(f"{room}/*.{kind}")]
    if not files:
        return None
    names = sorted(f.relative_to(folder).as_posix() for f in files)
    lines = (f"{name} {hashlib.sha256((folder / name).read_bytes()).hexdigest()}\n" for name in names)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """One block of Philox 4x32-10 in plain Python."""
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (q >> 32) ^ b ^ k, q & 0xFFFFFFFF, (p >> 32) ^ d ^ m, p & 0xFFFFFFFF
        k, m = (k + 0x9E3779B9) & 0xFFFFFFFF, (m + 0xBB67AE85) & 0xFFFFFFFF
    return a, b, c, d


def draws_right(kernels: Kernels) -> bool:
    """True if words come out as in plain Python: one long run, and runs of three."""
    key, step, blocks = 0x0123456789ABCDEF, 0xFEDCBA9876543210, 40
    split = [(x & 0xFFFFFFFF, x >> 32) for x in (key, step)]
    start = 2**34 - 20  # counters cross 32 bits
    words = [w for c in range(blocks) for w in philox((*_halves(start // 4 + c), *split[1]), split[0])]
    for sizes, strides in (((4 * blocks - 1,), (1,)), ((32, 3), (5, 1))):
        count = sizes[0] * (sizes[1] if len(sizes) > 1 else 1)
        space = (ctypes.c_int64 * (2 + 2 * len(sizes)))(start + 1, len(sizes), *sizes, *strides)
        made = (ctypes.c_uint32 * count)()
        kernels("words", made, 1, space, count, key, step, 1)
        at = [1 + i * strides[0] for i in range(sizes[0])]
        wanted = [words[i + j] for i in at for j in range(sizes[-1] if len(sizes) > 1 else 1)]
        if list(made) != wanted:
            return False
    return True


def _halves(x: int) -> tuple[int, int]:
    return x & 0xFFFFFFFF, x >> 32 & 0xFFFFFFFF

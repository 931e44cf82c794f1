"""Bytes of tensors that are alive, counted by the life of their storages.

Torch's own record of a CPU's allocations is a thread's: what gloo's threads let go after a collective stays on it for
ever. A storage's end is seen wherever it happens. What a kernel or a backend takes for itself is not.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from autopar.runtime.torch_private import DTensor, TorchDispatchMode, storage_key

UNIT_BYTES = 64
"""To which torch aligns what it allocates on a CPU."""


class Held(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that it is shown, and while it is entered those of all results, until they go.

    Attributes:
        now_bytes, peak_bytes: in whole units, each storage once; of a spread tensor the piece that is here.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now_bytes = self.peak_bytes = 0
        self._known: dict[int, int] = {}
        """Storage -> its bytes, 0 where they are left out."""

    def see(self, tensors: Iterable[object]) -> None:
        """Count the storages of these tensors, those left out before as well."""
        for storage, key in _storages(tensors):
            self._count(storage, key, _units(storage))

    def leave_out(self, tensors: Iterable[object]) -> None:
        """What others hold, and views of it, is not counted, unless it is shown to `see`."""
        for storage, key in _storages(tensors):
            if key not in self._known:
                self._count(storage, key, 0)

    def _count(self, storage: Any, key: int, nbytes: int) -> None:
        if key not in self._known:
            weakref.finalize(storage, self._gone, key).atexit = False
        self.now_bytes += nbytes - self._known.get(key, 0)
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        self._known[key] = nbytes

    def _gone(self, key: int) -> None:
        self.now_bytes -= self._known.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for storage, key in _storages(tree_leaves(out)):
            if key not in self._known:
                self._count(storage, key, _units(storage))
        return out


def _units(storage: Any) -> int:
    """Its bytes in whole units."""
    return -(-int(storage.nbytes()) // UNIT_BYTES) * UNIT_BYTES


def _storages(tensors: Iterable[object]) -> Iterator[tuple[Any, int]]:
    for tensor in tensors:
        own = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if isinstance(own, Tensor) and own.device.type != "meta" and own.untyped_storage().nbytes():
            yield own.untyped_storage(), storage_key(own)

"""Bytes of tensors that are alive, counted by the life of their storages.

Torch's own record of a CPU's allocations is a thread's: what gloo's threads let go after a collective stays on it for
ever. A storage's end is seen wherever it happens. What a kernel or a backend takes for itself is not.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
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
        self._known: set[int] = set()

    def see(self, tensors: Iterable[object]) -> None:
        """Count the storages of these tensors."""
        for tensor in tensors:
            own = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            if not isinstance(own, Tensor) or own.device.type == "meta":
                continue
            storage, key = own.untyped_storage(), storage_key(own)
            if key not in self._known and storage.nbytes():
                nbytes = -(-storage.nbytes() // UNIT_BYTES) * UNIT_BYTES
                self._known.add(key)
                self.now_bytes += nbytes
                self.peak_bytes = max(self.peak_bytes, self.now_bytes)
                weakref.finalize(storage, self._gone, key, nbytes).atexit = False

    def _gone(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now_bytes -= nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.see(tree_leaves(out))
        return out

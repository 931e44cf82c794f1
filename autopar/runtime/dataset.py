"""A dataset from which each rank loads only its part of every global batch, in the layout that a plan gives the inputs.

Batch k of a dataset of N samples is samples kB to (k+1)B of its order, B being the batch that the plan was made for. A
rank takes the rows of it that the plan's input layout puts there: ranks that differ only on tp take the same ones. The
pieces become DTensors, which the compiled module takes as they are. What is left at the end (N mod B samples) is a
smaller batch, loaded whole by every rank and given as plain tensors, of which the module takes each rank's part itself;
or it is left out, with `drop_last`. All ranks see equally many batches, so none waits for another.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from autopar.errors import InputError, PlanError, UserError
from autopar.ir.layout import Layout, local_piece, parse_layout
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan, PlanInput, mesh_of
from autopar.runtime.comm import Alone, Communicator
from autopar.runtime.groups import communicator, init_ranks
from autopar.runtime.parameters import wrap

Collate = Callable[[list[Any]], Any]


class ShardedDataset(IterableDataset[Any]):
    """Iterates over this rank's part of each global batch; see the module and `shard_dataset`.

    Attributes:
        batch_size: samples in a global batch.
        epoch: how many passes were started; with `shuffle` it decides the order, on all ranks alike. Set it to resume.
    """

    def __init__(self, batches: LocalBatches, rt: Communicator, layouts: Mapping[str, Layout], workers: int) -> None:
        self._batches = batches
        self._rt = rt
        self._layouts = layouts
        self._workers = workers
        self.epoch = 0

    @property
    def batch_size(self) -> int:
        """Samples in a global batch."""
        return self._batches.batch_size

    def __len__(self) -> int:
        """Batches in an epoch. TypeError for a dataset without a length."""
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            raise UserError(
                "a dataset of shard_dataset makes DTensors, which a DataLoader's worker processes can't: iterate over "
                "it directly, and give their number to shard_dataset(..., workers=N)"
            )
        self._batches.epoch = self.epoch
        self.epoch += 1
        # Workers only load and collate; a batch that is loaded already needs no batching.
        loader = DataLoader(self._batches, batch_size=None, num_workers=self._workers)
        for whole, batch in loader:
            yield batch if whole else self._laid_out(batch)

    def _laid_out(self, batch: Any) -> Any:
        def place(path: str, piece: Any) -> Any:
            if path not in self._layouts:
                return piece
            layout, shape = self._layouts[path], self._batches.inputs[path].shape
            return wrap(piece.to(self._rt.device).contiguous(), shape, layout, self._rt)

        return _mapped(batch, place, self._batches.arguments)


class LocalBatches(IterableDataset[Any]):
    """(True, a whole batch) or (False, this rank's pieces of one), as plain tensors. Travels to worker processes."""

    def __init__(
        self,
        dataset: Dataset[Any],
        inputs: Mapping[str, PlanInput],
        layouts: Mapping[str, Layout],
        mesh: Mesh,
        rank: int,
        collate: Collate,
        shuffle: bool,
        seed: int,
        drop_last: bool,
    ) -> None:
        self.inputs = inputs
        self.arguments = list(dict.fromkeys(re.split(r"[\[.]", path)[0] for path in inputs))
        self.batch_size = inputs[next(iter(layouts))].shape[0]
        self.epoch = 0
        self._dataset: Any = dataset
        self._layouts = layouts
        self._mesh, self._rank = mesh, rank
        self._collate = collate
        self._shuffle, self._seed = shuffle, seed
        self._drop_last = drop_last
        spans = [self._rows(path) for path in layouts]
        self.first, self.end = min(a for a, _ in spans), max(b for _, b in spans)

    def __len__(self) -> int:
        whole, rest = divmod(len(self._dataset), self.batch_size)
        return whole + (rest > 0 and not self._drop_last)

    def _rows(self, path: str) -> tuple[int, int]:
        """This rank's rows of an input: from, to."""
        first, size = self._piece(path)
        return first[0], first[0] + size[0]

    def _piece(self, path: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Where this rank's piece of an input begins in each dim, and its shape."""
        shape, layout = self.inputs[path].shape, self._layouts[path]
        return local_piece(shape, layout, self._mesh, self._rank)

    def __iter__(self) -> Iterator[tuple[bool, Any]]:
        worker = get_worker_info()
        mine, of = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        for k, (whole, samples) in enumerate(self._samples()):
            # Workers take turns, as DataLoader asks them in turn: the order stays.
            if k % of == mine:
                batch = self._collate(samples())
                yield whole, batch if whole else self._cut(batch)

    def _samples(self) -> Iterator[tuple[bool, Callable[[], list[Any]]]]:
        """(True: a smaller batch, whole; what loads the samples)."""
        if not hasattr(self._dataset, "__getitem__") or isinstance(self._dataset, IterableDataset):
            yield from self._streamed()
            return
        order = self._order()
        for start in range(0, len(order), self.batch_size):
            numbers = order[start : start + self.batch_size]
            whole = len(numbers) < self.batch_size
            if whole and self._drop_last:
                return
            yield whole, partial(self._load, numbers if whole else numbers[self.first : self.end])

    def _load(self, numbers: Sequence[int]) -> list[Any]:
        return [self._dataset[i] for i in numbers]

    def _order(self) -> Sequence[int]:
        count = len(self._dataset)
        if not self._shuffle:
            return range(count)
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self.epoch)
        return [int(i) for i in torch.randperm(count, generator=generator)]

    def _streamed(self) -> Iterator[tuple[bool, Callable[[], list[Any]]]]:
        """A stream can't be entered in the middle: every rank reads all of it and keeps its part."""
        held: list[Any] = []
        for sample in self._dataset:
            held.append(sample)
            if len(held) == self.batch_size:
                yield False, partial(list, held[self.first : self.end])
                held = []
        if held and not self._drop_last:
            yield True, partial(list, held)

    def _cut(self, batch: Any) -> Any:
        def piece(path: str, given: Any) -> Any:
            if path not in self._layouts:
                return given
            self._check(path, given)
            first, size = self._piece(path)
            for dim, (at, count) in enumerate(zip(first, size, strict=True)):
                given = given.narrow(dim, at if dim else at - self.first, count)
            return given

        return _mapped(batch, piece, self.arguments)

    def _check(self, path: str, given: Any) -> None:
        wanted = self.inputs[path].shape[1:]
        if not isinstance(given, Tensor) or tuple(given.shape[1:]) != tuple(wanted):
            shown = f"shape {list(given.shape[1:])}" if isinstance(given, Tensor) else type(given).__name__
            raise InputError(f"a sample's {path!r} is {shown}; the plan is for samples of shape {list(wanted)}")


def shard_dataset(
    dataset: Dataset[Any],
    plan: Plan,
    *,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    batch_size: int | None = None,
    collate: Collate = default_collate,
    workers: int = 0,
) -> ShardedDataset:
    """This rank's view of `dataset`: iterate over it and call the compiled module with what it yields.

        for batch in autopar.shard_dataset(dataset, module.plan, shuffle=True):
            loss = module(**batch).loss

    Collective where there are several ranks: call it on every rank, with the same arguments.

    Args:
        dataset: single samples: mappings by argument name, or tuples in the order of the plan's inputs. One with an
            index loads only this rank's samples; an iterable one is read whole by every rank, in the same order.
            Arguments that are no part of a sample are for the caller to add.
        shuffle: a new order in each epoch, drawn from `seed` and the epoch, the same on all ranks.
        drop_last: leave out the last, smaller batch.
        batch_size: samples of a global batch, as the plan was made for; needed only where its inputs differ in their
            first dim.
        collate: list of samples -> batch.
        workers: processes that load; don't put the result into a DataLoader.

    Raises:
        PlanError: the plan doesn't say what its inputs are, or is for another number of ranks.
        UserError: `shuffle` of a dataset without an index.
    """
    mesh = mesh_of(plan)
    inputs = plan.request.inputs if plan.request is not None else {}
    if not inputs:
        raise PlanError(f"the plan for {plan.model.name} doesn't say what its inputs are: search again")
    if shuffle and (not hasattr(dataset, "__getitem__") or isinstance(dataset, IterableDataset)):
        raise UserError("shuffle: the dataset has no index to draw from; shuffle its stream, alike on all ranks")
    rt = _ranks(mesh)
    texts = {name.removeprefix("input:"): text for name, text in plan.inputs["top"].items()}
    layouts = {p: parse_layout(texts[p], mesh) for p in _shared(inputs, batch_size) if p in texts}
    batches = LocalBatches(dataset, inputs, layouts, mesh, rt.rank, collate, shuffle, seed, drop_last)
    return ShardedDataset(batches, rt, layouts, workers)


def _ranks(mesh: Mesh) -> Communicator:
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != mesh.size:
        raise PlanError(f"the plan describes {mesh.size} ranks, {started} were launched")
    if mesh.size == 1:
        return Alone(mesh, torch.device("cpu"))
    if not dist.is_initialized():
        init_ranks()
    return communicator(mesh)


def _shared(inputs: Mapping[str, PlanInput], batch_size: int | None) -> dict[str, PlanInput]:
    """The inputs that samples give: those whose first dim is the batch."""
    sizes = {tensor.shape[0] for tensor in inputs.values() if tensor.shape}
    if batch_size is None and len(sizes) != 1:
        listed = ", ".join(f"{path} {list(t.shape)}" for path, t in inputs.items())
        raise UserError(f"the plan's inputs share no first dim ({listed}): pass batch_size=, the samples of a batch")
    size = batch_size if batch_size is not None else sizes.pop()
    found = {path: t for path, t in inputs.items() if t.shape and t.shape[0] == size}
    if not found:
        raise UserError(f"batch_size={size}: no input of the plan is so long; it has {sorted(sizes)}")
    return found


def _mapped(batch: Any, change: Callable[[str, Any], Any], arguments: Sequence[str]) -> Any:
    """The batch with its leaves changed; `change` gets the path of the argument that a leaf is given for.

    The parts of a tuple are given for `arguments` in order, a batch that is one tensor for the first of them.
    """
    if isinstance(batch, Mapping):
        return {k: _walk(v, change, str(k)) for k, v in batch.items()}
    if not isinstance(batch, (tuple, list)):
        return _walk(batch, change, arguments[0])
    if len(batch) > len(arguments):
        raise InputError(f"samples have {len(batch)} parts, the plan's inputs are {', '.join(arguments)}")
    return tuple(_walk(v, change, name) for v, name in zip(batch, arguments, strict=False))


def _walk(tree: Any, change: Callable[[str, Any], Any], path: str) -> Any:
    if isinstance(tree, Mapping):
        return {k: _walk(v, change, f"{path}[{k!r}]") for k, v in tree.items()}
    if isinstance(tree, (tuple, list)):
        return [_walk(v, change, f"{path}[{i}]") for i, v in enumerate(tree)]
    return change(path, tree)

"""What the model computes: the joint forward-and-backward graph, with repeated blocks as single nodes.

Values are named; a node's arguments are plain Python literals, `Ref`s to values and `TorchConst`s. No torch here.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

ITEM_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1, "token": 1,
}  # fmt: skip
TOKEN = "token"
"""dtype of what a region's forward keeps for its backward: no tensor; its size is an estimate of the bytes kept."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Global shape and dtype name ("float32").

    `units`: per dim the rows that a cut keeps together (`autopar.ir.cuts`); () means 1 throughout.
    `unordered`: dims in an order that is a rank's own (rows by expert): no conversion changes how they are cut.
    `experts`: the dim that counts experts, of their weights, of what these give their gradients, and of counts; or -1.
    """

    shape: tuple[int, ...]
    dtype: str
    units: tuple[int, ...] = field(default=(), repr=False)
    unordered: tuple[int, ...] = field(default=(), repr=False)
    experts: int = field(default=-1, repr=False)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is the value of this name."""

    name: str


@dataclass(frozen=True, slots=True)
class TorchConst:
    """An argument that torch knows by name: kind "dtype" ("float32"), "device", "layout", "memory_format"."""

    kind: str
    name: str


REGION, REGION_BACKWARD = "autopar.region.default", "autopar.region_backward.default"


class Phase(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the graph."""

    name: str
    meta: TensorMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCall:
    """Which distinct block a node runs (`Block.key`) and which instance of it (`instance` = its module path)."""

    key: str
    instance: str


@dataclass(frozen=True, slots=True)
class Measured:
    """What an opaque op was seen to cost on one run: floating point operations, and bytes read and written."""

    flops: int
    moved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One op, or one call of a block.

    Attributes:
        name: unique in its graph, a Python identifier.
        op: e.g. "aten.mm.default"; "autopar.block" and "autopar.block_backward" for blocks; REGION and
            REGION_BACKWARD for one call of a region (`Region`), whose first argument is the region's key.
        args, kwargs: nested tuples of literals, `Ref`, `TorchConst`. Of a block's forward call: one Ref per non-tangent
            input of the block's graph, in order; of its backward call: the same, then one Ref per TANGENT input.
        outputs: one per output, None where the op gives None; empty of an op that only checks values. Of a block's
            forward call: the block's OUTPUT outputs in order; of its backward call: its GRADIENT outputs in order.
        key: stable address, "module path/op/phase#k": same in every capture of the same model.
        module_path: e.g. "model.layers.0.mlp.up_proj"; inside a block, relative to the block.
        source: "file.py:123" of the user's line, "" if unknown.
        measured: of opaque ops, which have no formula; no part of `CapturedGraph.hash`.
        refs: names of the tensor arguments in flattened order, repeats included: the order of `Strategy.inputs`.
    """

    name: str
    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    outputs: tuple[Value | None, ...]
    phase: Phase
    key: str
    module_path: str = ""
    source: str = ""
    block: BlockCall | None = None
    measured: Measured | None = None
    refs: tuple[str, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "refs", tuple(_refs((self.args, tuple(v for _, v in self.kwargs)))))

    @property
    def first(self) -> Value | None:
        """The first output."""
        return self.outputs[0] if self.outputs else None


def _refs(tree: Any) -> Iterator[str]:
    if isinstance(tree, Ref):
        yield tree.name
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _refs(item)


class InputKind(Enum):
    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    CONSTANT = "constant"
    TANGENT = "tangent"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphInput:
    """A placeholder.

    `target`: of a parameter or buffer its name (inside a block, relative to the block); of an input its path
    ("input_ids", "args[0]"; inside a block "0", "1", ...); of a constant its name in `CapturedGraph.constants`; of a
    tangent the
    `target` of the output that it is the gradient of.
    """

    value: Value
    kind: InputKind
    target: str
    requires_grad: bool = False


class OutputKind(Enum):
    OUTPUT = "output"
    BUFFER_UPDATE = "buffer_update"
    GRADIENT = "gradient"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOutput:
    """A result. `value` is None for a gradient that is None.

    `target`: of an output its position as text ("0", "1", ...); of a buffer update the buffer's name; of a gradient the
    *value name* of the graph input that it belongs to.
    """

    kind: OutputKind
    target: str
    value: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A joint graph: forward nodes, then backward nodes, each list in execution order."""

    name: str
    inputs: tuple[GraphInput, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[GraphOutput, ...]

    def values(self) -> dict[str, Value]:
        """All values by name."""
        found = {i.value.name: i.value for i in self.inputs}
        for node in self.nodes:
            found.update({o.name: o for o in node.outputs if o is not None})
        return found

    def __str__(self) -> str:
        lines = [f"graph {self.name}"]
        lines += [f"  {i.kind.value} {i.value.name}: {i.value.meta}  <- {i.target}" for i in self.inputs]
        for n in self.nodes:
            outs = ", ".join("None" if o is None else f"{o.name}: {o.meta}" for o in n.outputs)
            where = f"  # {n.module_path} {n.source}".rstrip() if n.module_path or n.source else ""
            kwargs = "".join(f", {k}={_show(v)}" for k, v in n.kwargs)
            called = f"{n.op}<{n.block.key}>" if n.block else n.op
            lines.append(f"  {outs} = {called}({', '.join(map(_show, n.args))}{kwargs})  [{n.phase.value}]{where}")
        lines += [f"  {o.kind.value} {o.target} = {o.value}" for o in self.outputs]
        return "\n".join(lines)


def tensor_keys(graph: Graph) -> dict[str, str]:
    """Value name -> its address, the same in every capture: "input:0" of an input, else its op's key.

    A further output of an op has its position behind that: "[1]".
    """
    found = {i.value.name: f"{i.kind.value}:{i.target}" for i in graph.inputs}
    for node in graph.nodes:
        for position, out in enumerate(node.outputs):
            if out is not None:
                found[out.name] = f"{node.key}[{position}]" if position else node.key
    return found


def _unmeasured(outputs: tuple[Value | None, ...]) -> tuple[Value | None, ...]:
    """Without the size of a token, which is measured and not the same for every batch."""
    return tuple(
        Value(o.name, TensorMeta((), TOKEN)) if o is not None and o.meta.dtype == TOKEN else o for o in outputs
    )


def _show(arg: Any) -> str:
    match arg:
        case Ref():
            return f"%{arg.name}"
        case TorchConst():
            return arg.name
        case tuple() | list():
            return "[" + ", ".join(map(_show, arg)) + "]"
        case _:
            return repr(arg)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A distinct repeated block: its joint graph and the module paths of all its instances."""

    key: str
    graph: Graph
    instances: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """One call of a submodule that runs as the user wrote it, whole on every rank, because it could not be captured.

    Attributes:
        key: unique: the module's path, and "#k" of its k-th further call in one forward.
        source, message: of what could not be captured: "file.py:12", and why, with what to do.
        build: {} -> runner with `forward(tensors, salt)` and `backward(kept, tangents, again)` (opaque here). Runners
            made with one dict share state, as several calls of one module do.
    """

    key: str
    module_path: str
    source: str
    message: str
    build: Any = field(compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterInfo:
    """A parameter of the model. `aliases` are its other names (tied weights)."""

    name: str
    meta: TensorMeta
    requires_grad: bool
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferInfo:
    """A buffer of the model."""

    name: str
    meta: TensorMeta
    persistent: bool
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class InputLeaf:
    """One leaf of the call's arguments. `meta` is None for a non-tensor, whose `constant` is then guarded."""

    path: str
    meta: TensorMeta | None
    constant: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSignature:
    """How a call's arguments become leaves and how leaves become the result.

    Attributes:
        inputs: leaves in the order that `flatten` gives them.
        flatten: (args, kwargs) -> list of leaves in the order of `inputs`; binds by name, raises InputError.
        rebuild: list of output tensors (OUTPUT outputs in order) -> the model's own return type.
        outputs: path of each OUTPUT in the return value ("loss", "logits", "[0]").
        differentiable: whether each OUTPUT has a TANGENT.
        detached: outputs that need a gradient in the model, and have no TANGENT here.
        read: (args, kwargs) of any call -> its leaves by path; None: only the captured call is known.
        as_captured: dtype of a tensor -> dtype that it has in the capture; None: the same.
    """

    inputs: tuple[InputLeaf, ...]
    outputs: tuple[str, ...]
    differentiable: tuple[bool, ...]
    flatten: Any = field(compare=False)
    rebuild: Any = field(compare=False)
    detached: tuple[bool, ...] = ()
    read: Any = field(compare=False, default=None)
    as_captured: Any = field(compare=False, default=None)


@dataclass(frozen=True, kw_only=True)
class CapturedGraph:
    """The whole model. `constants` maps names to tensors (opaque here). `notes` are (kind, where, message)."""

    model_name: str
    top: Graph
    blocks: tuple[Block, ...]
    parameters: tuple[ParameterInfo, ...]
    buffers: tuple[BufferInfo, ...]
    signature: CallSignature
    training: bool = True
    constants: dict[str, Any] = field(default_factory=dict, compare=False)
    regions: tuple[Region, ...] = ()
    notes: tuple[tuple[str, str, str], ...] = ()

    def block(self, key: str) -> Block:
        """The distinct block of this key."""
        return next(b for b in self.blocks if b.key == key)

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """The top graph, then each distinct block's."""
        return (self.top, *(b.graph for b in self.blocks))

    @cached_property
    def hash(self) -> str:
        """Digest of ops, shapes, parameters and blocks: equal for equal models, independent of source lines."""
        digest = hashlib.sha256()
        for graph in self.graphs:
            for node in graph.nodes:
                outputs = _unmeasured(node.outputs)
                digest.update(f"{node.key}|{node.op}|{node.args}|{node.kwargs}|{outputs}\n".encode())
            digest.update(f"{[(i.kind.value, i.target, i.value) for i in graph.inputs]}{graph.outputs}\n".encode())
        digest.update(f"{self.parameters}{self.buffers}{[b.instances for b in self.blocks]}".encode())
        return digest.hexdigest()[:16]

    def __str__(self) -> str:
        head = [f"model {self.model_name}: {len(self.parameters)} parameters, {len(self.top.nodes)} top nodes"]
        head += [f"block {b.key}: {len(b.instances)} instances, {len(b.graph.nodes)} nodes" for b in self.blocks]
        return "\n".join([*head, *map(str, self.graphs)])

"""FX joint graph -> `Graph`: named values, plain arguments, no getitem, no dead code, forward nodes before backward nodes."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.errors import CaptureError, CompilerError
from autopar.ir.graph import (
    BlockCall,
    Graph,
    GraphInput,
    GraphOutput,
    InputKind,
    Node,
    OutputKind,
    Phase,
    Ref,
    TorchConst,
    Value,
)
from autopar.tracer.signature import dtype_name, meta_of
from autopar.tracer.torch_private import Joint

aten = torch.ops.aten
IDENTITIES = (aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift_fresh_copy.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """What argument number i of the traced function is. `keep`: stays an input even if nothing reads it."""

    kind: InputKind
    target: str
    requires_grad: bool = False
    keep: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockUse:
    """What the converter needs of a block that a node may call.

    Attributes:
        key: the block's.
        constants: names of its CONSTANT inputs in the global table, which become arguments of each call.
        gradients: for each GRADIENT output of its graph whether it is a tensor.
    """

    key: str
    constants: tuple[str, ...]
    gradients: tuple[bool, ...]


class Converter:
    """One use: `Converter(...).graph()`; then `constants` has the lifted tensors by name."""

    def __init__(
        self,
        name: str,
        joint: Joint,
        arguments: Sequence[Argument],
        blocks: dict[str, BlockUse],
        instances: dict[int, str],
    ) -> None:
        self.name = name
        self.joint = joint
        self.arguments = arguments
        self.blocks = blocks
        self.instances = instances
        self.constants: dict[str, Tensor] = {}
        self.shared_constants: list[str] = []
        self.value_of: dict[Any, str] = {}
        self.same: dict[Any, Any] = {}
        self.taken: set[str] = {n.name for n in joint.module.graph.nodes if n.op == "call_function"}

    def graph(self) -> Graph:
        """The converted graph."""
        fx_nodes = list(self.joint.module.graph.nodes)
        self._resolve_identities(fx_nodes)
        live = self._live()
        inputs = self._inputs(fx_nodes, live)
        backward = self._backward_nodes(fx_nodes)
        places = _places(fx_nodes)
        body = [n for n in fx_nodes if n in live and n.op == "call_function" and n.target is not operator.getitem]
        self._name_outputs(body, live)
        ordered = [n for n in body if n not in backward] + [n for n in body if n in backward]
        count: Counter[str] = Counter()
        nodes = []
        for n in ordered:
            phase = Phase.BACKWARD if n in backward else Phase.FORWARD
            nodes.append(self._node(n, phase, places.get(n, ("", "")), count))
        inputs += [self._constant_input(name) for name in self.shared_constants]
        return Graph(name=self.name, inputs=tuple(inputs), nodes=tuple(nodes), outputs=tuple(self._outputs()))

    def _resolve_identities(self, fx_nodes: list[Any]) -> None:
        """Detach and alias are their argument; so is a clone that is only there to be an output."""
        for node in fx_nodes:
            if node.op == "call_function" and node.target in IDENTITIES:
                self.same[node] = self._root(node.args[0])
        for position, node in self.joint.outputs.items():
            root = self._root(node)
            if root.op == "call_function" and root.target is aten.clone.default:
                made = self._root(root.args[0])
                if made.op == "call_function":
                    self.joint.outputs[position] = made
        for position, node in self.joint.mutations.items():
            self.joint.mutations[position] = self._root(node)

    def _root(self, node: Any) -> Any:
        while node in self.same:
            node = self.same[node]
        return node

    def _results(self) -> list[Any]:
        gradients = [g for g in self.joint.gradients.values() if g is not None]
        found = [*self.joint.outputs.values(), *self.joint.mutations.values(), *gradients]
        return [self._root(n) for n in found]

    def _live(self) -> set[Any]:
        live: set[Any] = set()
        todo = self._results()
        while todo:
            node = self._root(todo.pop())
            if node not in live:
                live.add(node)
                todo += node.all_input_nodes
        return live

    def _inputs(self, fx_nodes: list[Any], live: set[Any]) -> list[GraphInput]:
        found: list[tuple[int, int, GraphInput]] = []
        for node, position in self.joint.inputs.items():
            argument = self.arguments[position]
            if node in live or argument.keep:
                prefix = {InputKind.PARAMETER: "p", InputKind.BUFFER: "b", InputKind.INPUT: "x"}[argument.kind]
                value = self._value(node, f"{prefix}_{argument.target}")
                made = GraphInput(
                    value=value, kind=argument.kind, target=argument.target, requires_grad=argument.requires_grad
                )
                found.append((0, position, made))
        for node, position in self.joint.tangents.items():
            value = self._value(node, f"t_{position}")
            found.append((2, position, GraphInput(value=value, kind=InputKind.TANGENT, target=str(position))))
        for order, node in enumerate(n for n in fx_nodes if n.op == "get_attr" and n in live):
            found.append((1, order, self._lifted(node)))
        return [made for _, _, made in sorted(found, key=lambda item: item[:2])]

    def _lifted(self, node: Any) -> GraphInput:
        tensor = getattr(self.joint.module, node.target)
        if not isinstance(tensor, Tensor):
            raise CaptureError(
                f"the forward uses {node.target} ({type(tensor).__name__}), which the capture does not know"
            )
        if tensor.requires_grad:
            raise CaptureError(
                f"the forward reads a tensor of shape {list(tensor.shape)} that needs a gradient but is not a parameter of "
                "the model: register it as an nn.Parameter of the module"
            )
        name = f"{self.name}.c{len(self.constants)}"
        self.constants[name] = tensor.detach()
        value = Value(self._fresh(f"c_{name}"), meta_of(tensor))
        self.value_of[node] = value.name
        return GraphInput(value=value, kind=InputKind.CONSTANT, target=name)

    def _constant_input(self, name: str) -> GraphInput:
        return GraphInput(
            value=Value(_identifier(f"c_{name}"), self.block_metas[name]), kind=InputKind.CONSTANT, target=name
        )

    def _value(self, node: Any, wanted: str) -> Value:
        value = Value(self._fresh(wanted), meta_of(node.meta["val"]))
        self.value_of[node] = value.name
        return value

    def _fresh(self, wanted: str) -> str:
        base = _identifier(wanted)
        name, k = base, 1
        while name in self.taken:
            name, k = f"{base}_{k}", k + 1
        self.taken.add(name)
        return name

    def _backward_nodes(self, fx_nodes: list[Any]) -> set[Any]:
        backward = set(self.joint.tangents)
        for node in fx_nodes:
            tagged = node.meta.get("partitioner_tag") == "is_backward"
            if node.op == "call_function" and (tagged or any(i in backward for i in node.all_input_nodes)):
                backward.add(node)
        todo = [self._root(n) for n in (*self.joint.outputs.values(), *self.joint.mutations.values())]
        needed: set[Any] = set()
        while todo:  # what a forward result is made of is forward, whatever its tag
            node = todo.pop()
            if node not in needed:
                needed.add(node)
                todo += [self._root(i) for i in node.all_input_nodes]
        return backward - needed

    def _name_outputs(self, body: list[Any], live: set[Any]) -> None:
        self.outputs_of: dict[Any, tuple[Value | None, ...]] = {}
        for node in body:
            val = node.meta["val"]
            if isinstance(val, Tensor):
                self.outputs_of[node] = (Value(node.name, meta_of(val)),)
                self.value_of[node] = node.name
                continue
            items: list[Value | None] = []
            for k, item in enumerate(val):
                items.append(
                    Value(self._fresh(f"{node.name}_{k}"), meta_of(item)) if isinstance(item, Tensor) else None
                )
            for user in node.users:
                made = items[user.args[1]] if user.target is operator.getitem else None
                if made is not None:
                    self.value_of[user] = made.name
            self.outputs_of[node] = tuple(items)

    def _node(self, node: Any, phase: Phase, place: tuple[str, str], count: Counter[str]) -> Node:
        path, source = place
        op = str(node.target)
        args, outputs, block = tuple(map(self._arg, node.args)), self.outputs_of[node], None
        if op in ("autopar.block.default", "autopar.block_backward.default"):
            op = op.removesuffix(".default")
            use = self.blocks[node.args[0]]
            path = self.instances[node.args[1]]
            block = BlockCall(key=use.key, instance=path)
            constants = tuple(Ref(self._shared(name)) for name in use.constants)
            args = (*args[2], *constants, *(args[3] if len(args) > 3 else ()))
            if op == "autopar.block_backward":
                given = iter(outputs)
                outputs = tuple(next(given) if there else None for there in use.gradients)
        base = f"{path}/{op}/{phase.value}"
        count[base] += 1
        return Node(
            name=node.name,
            op=op,
            args=args,
            kwargs=tuple((k, self._arg(v)) for k, v in node.kwargs.items()),
            outputs=outputs,
            phase=phase,
            key=f"{base}#{count[base] - 1}",
            module_path=path,
            source=source,
            block=block,
        )

    def _shared(self, name: str) -> str:
        if name not in self.shared_constants:
            self.shared_constants.append(name)
        return _identifier(f"c_{name}")

    block_metas: dict[str, Any] = {}  # noqa: RUF012 (set by the caller)

    def _arg(self, arg: Any) -> Any:
        match arg:
            case torch.fx.Node():
                return Ref(self.value_of[self._root(arg)])
            case list() | tuple():
                return tuple(map(self._arg, arg))
            case torch.dtype():
                return TorchConst("dtype", dtype_name(arg))
            case torch.device():
                return TorchConst("device", arg.type)
            case torch.layout():
                return TorchConst("layout", str(arg).removeprefix("torch."))
            case torch.memory_format():
                return TorchConst("memory_format", str(arg).removeprefix("torch."))
            case None | bool() | int() | float() | complex() | str():
                return arg
        raise CompilerError(f"an FX argument of type {type(arg).__qualname__}: {arg!r}")

    def _outputs(self) -> list[GraphOutput]:
        def name(node: Any) -> str | None:
            return None if node is None else self.value_of[self._root(node)]

        found = [
            GraphOutput(kind=OutputKind.OUTPUT, target=str(i), value=name(n))
            for i, n in sorted(self.joint.outputs.items())
        ]
        for i, n in sorted(self.joint.mutations.items()):
            found.append(GraphOutput(kind=OutputKind.BUFFER_UPDATE, target=self.arguments[i].target, value=name(n)))
        positions = {position: node for node, position in self.joint.inputs.items()}
        for i, argument in enumerate(self.arguments):
            if argument.requires_grad and positions[i] in self.value_of:
                gradient = self.joint.gradients.get(i)
                found.append(
                    GraphOutput(kind=OutputKind.GRADIENT, target=self.value_of[positions[i]], value=name(gradient))
                )
        return found


def _places(fx_nodes: list[Any]) -> dict[Any, tuple[str, str]]:
    """(module path, source line) of each node: noted in the forward; a backward node has that of its forward node."""
    places: dict[Any, tuple[str, str]] = {}
    by_sequence: dict[int, tuple[str, str]] = {}
    for node in fx_nodes:
        place = node.meta.get("autopar")
        if place is not None:
            places[node] = place
            by_sequence.setdefault(node.meta.get("seq_nr", -1), place)
    for node in fx_nodes:
        if node not in places and node.op == "call_function":
            places[node] = by_sequence.get(node.meta.get("seq_nr", -2), ("", ""))
    return places


def _identifier(text: str) -> str:
    return re.sub(r"\W+", "_", text).strip("_")

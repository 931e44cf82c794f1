"""FX joint graph -> `Graph`: named values, plain arguments, no getitem, no dead code, forward before backward nodes."""

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
    REGION,
    BlockCall,
    Graph,
    GraphInput,
    GraphOutput,
    InputKind,
    Node,
    OutputKind,
    Phase,
    Ref,
    TensorMeta,
    TorchConst,
    Value,
)
from autopar.tracer.signature import dtype_name, meta_of
from autopar.tracer.torch_private import CHECKS, Joint

aten = torch.ops.aten
BLOCK, BLOCK_BACKWARD = "autopar.block.default", "autopar.block_backward.default"
PREFIX = {InputKind.PARAMETER: "p", InputKind.BUFFER: "b", InputKind.INPUT: "x"}
IDENTITIES = (aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift_fresh_copy.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """An input of the graph to be, parameters and buffers first, by slot number.

    Attributes:
        keep: it stays an input even if nothing reads it.
        traced: its position among the traced function's arguments; None for one that only blocks use.
        meta: needed of those that are not traced.
    """

    kind: InputKind
    target: str
    requires_grad: bool = False
    keep: bool = False
    traced: int | None = None
    meta: TensorMeta | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockUse:
    """What the converter needs of a block that a node may call.

    Attributes:
        key: the block's.
        constants: names of its CONSTANT inputs in the global table, which become arguments of each call.
        slots: instance number -> the slots that are its parameters and buffers.
        rows: instance number -> the (instance, fed input) that its op stands for besides: a row of instances.
        slot_gradients: for each of them whether it needs a gradient, and that gradient (None: it gets none).
        updates: positions among them of the buffers whose new values are further outputs, and those values.
        input_gradients: for each tensor input whether it needs a gradient, and whether it gets one.
    """

    key: str
    constants: tuple[str, ...]
    slots: dict[int, tuple[int, ...]]
    rows: dict[int, tuple[tuple[int, int], ...]]
    slot_gradients: tuple[tuple[bool, TensorMeta | None], ...]
    updates: tuple[tuple[int, TensorMeta], ...]
    input_gradients: tuple[tuple[bool, bool], ...]


class Converter:
    """One use: `convert()`, then `converted` is the graph and `constants` has the lifted tensors by name.

    Parameters that only blocks use are no arguments of the traced function: they are put into the block calls here, and
    a parameter's gradients from several calls are summed by aten.add nodes.
    """

    def __init__(
        self,
        name: str,
        joint: Joint,
        arguments: Sequence[Argument],
        blocks: Sequence[BlockUse],
        constant_metas: dict[str, TensorMeta],
    ) -> None:
        self.name = name
        self.joint = joint
        self.arguments = arguments
        self.blocks = {b.key: b for b in blocks}
        self.instances: dict[int, str] = {}
        self.constant_metas = constant_metas
        self.constants: dict[str, Tensor] = {}
        self.shared_constants: list[str] = []
        self.value_of: dict[Any, str] = {}
        self.value_of_argument: dict[int, str] = {}
        self.gradient_of: dict[int, Value] = {}
        self.same: dict[Any, Any] = {}
        self.count: Counter[str] = Counter()
        self.nodes: list[Node] = []
        self.updates: dict[int, str] = {}
        self.inputs_of_row: dict[int, list[tuple[Any, ...]]] = {}
        self.taken: set[str] = {n.name for n in joint.module.graph.nodes if n.op == "call_function"}

    def convert(self) -> Graph:
        """The converted graph."""
        fx_nodes = list(self.joint.module.graph.nodes)
        traced = {a.traced for a in self.arguments}
        self.joint.gradients = {i: g for i, g in self.joint.gradients.items() if i in traced}
        self._resolve_identities(fx_nodes)
        live = self._live(fx_nodes)
        inputs = self._inputs(fx_nodes, live)
        backward = self._backward_nodes(fx_nodes)
        places = _places(fx_nodes)
        body = [n for n in fx_nodes if n in live and n.op == "call_function" and n.target is not operator.getitem]
        self._name_outputs(body)
        for n in [n for n in body if n not in backward] + [n for n in body if n in backward]:
            self._add(n, Phase.BACKWARD if n in backward else Phase.FORWARD, places.get(n, ("", "")))
        self._add_direct_gradients()
        constants = [self._constant_input(name) for name in self.shared_constants]
        last = [i for i in inputs if i.kind is InputKind.TANGENT]
        first = [i for i in inputs if i.kind is not InputKind.TANGENT]
        self.converted = Graph(
            name=self.name, inputs=(*first, *constants, *last), nodes=tuple(self.nodes), outputs=tuple(self._outputs())
        )
        return self.converted

    def _resolve_identities(self, fx_nodes: list[Any]) -> None:
        """Detach and alias are their argument; so is a clone that is only there to be an output."""
        for node in fx_nodes:
            if node.op == "call_function" and node.target in IDENTITIES:
                self.same[node] = self._root(node.args[0])
        for position, node in self.joint.outputs.items():
            root = self._root(node)
            if root.op == "call_function" and root.target is aten.clone.default:
                made = self._root(root.args[0])
                if made.op == "call_function" and made.meta["val"].is_contiguous():
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

    def _live(self, fx_nodes: list[Any]) -> set[Any]:
        live: set[Any] = set()
        todo = self._results() + [n for n in fx_nodes if n.target in CHECKS or str(n.target) == BLOCK_BACKWARD]
        while todo:
            node = self._root(todo.pop())
            if node not in live:
                live.add(node)
                todo += node.all_input_nodes
        return live

    def _inputs(self, fx_nodes: list[Any], live: set[Any]) -> list[GraphInput]:
        """Parameters, buffers and inputs in the order of the arguments, then constants, then tangents."""
        by_position = {position: node for node, position in self.joint.inputs.items()}
        in_blocks = {s for b in self.blocks.values() for slots in b.slots.values() for s in slots}
        found: list[GraphInput] = []
        for i, a in enumerate(self.arguments):
            node = None if a.traced is None else by_position[a.traced]
            if not (a.keep or i in in_blocks or node in live):
                continue
            wanted = f"{PREFIX[a.kind]}_{a.target}"
            if node is None:
                assert a.meta is not None
                value = Value(self._fresh(wanted), a.meta)
            else:
                value = self._value(node, wanted)
            self.value_of_argument[i] = value.name
            found.append(GraphInput(value=value, kind=a.kind, target=a.target, requires_grad=a.requires_grad))
        found += [self._lifted(n) for n in fx_nodes if n.op == "get_attr" and n in live]
        for node, position in sorted(self.joint.tangents.items(), key=lambda item: item[1]):
            value = self._value(node, f"t_{position}")
            found.append(GraphInput(value=value, kind=InputKind.TANGENT, target=str(position)))
        return found

    def _lifted(self, node: Any) -> GraphInput:
        tensor = getattr(self.joint.module, node.target)
        if "Generator" in type(tensor).__name__:
            raise CaptureError(
                "the forward draws from a torch.Generator of its own, whose numbers no other rank has: leave out "
                "generator=; Options(seed=...) seeds the compiled module's random ops"
            )
        if not isinstance(tensor, Tensor):
            raise CaptureError(
                f"the forward uses {node.target} ({type(tensor).__name__}), which the capture does not know"
            )
        if tensor.requires_grad:
            raise CaptureError(
                f"the forward reads a tensor of shape {list(tensor.shape)} that needs a gradient but is no weight of "
                "the model: register it as an nn.Parameter of the module"
            )
        name = f"{self.name}.c{len(self.constants)}"
        self.constants[name] = tensor.detach()
        value = Value(self._fresh(f"c_{name}"), meta_of(tensor))
        self.value_of[node] = value.name
        return GraphInput(value=value, kind=InputKind.CONSTANT, target=name)

    def _constant_input(self, name: str) -> GraphInput:
        return GraphInput(
            value=Value(_identifier(f"c_{name}"), self.constant_metas[name]), kind=InputKind.CONSTANT, target=name
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

    def _name_outputs(self, body: list[Any]) -> None:
        self.outputs_of: dict[Any, tuple[Value | None, ...]] = {}
        for node in body:
            val = node.meta.get("val")  # None of an op that only checks
            if isinstance(val, Tensor):
                self.outputs_of[node] = (Value(node.name, meta_of(val)),)
                self.value_of[node] = node.name
                continue
            items: list[Value | None] = []
            made_of = val or ()
            for k, item in enumerate(made_of):
                last = str(node.target) == REGION and k == len(made_of) - 1
                name = f"{node.name}_kept" if last else f"{node.name}_{k}"
                items.append(Value(self._fresh(name), meta_of(item)) if isinstance(item, Tensor) else None)
            for user in node.users:
                made = items[user.args[1]] if user.target is operator.getitem else None
                if made is not None:
                    self.value_of[user] = made.name
            self.outputs_of[node] = tuple(items)

    def _add(self, node: Any, phase: Phase, place: tuple[str, str]) -> None:
        """Append the node of an FX node."""
        if str(node.target) in (BLOCK, BLOCK_BACKWARD):
            self._add_block(node, phase, place[1])
            return
        args = tuple(map(self._arg, node.args))
        kwargs = tuple((k, self._arg(v)) for k, v in node.kwargs.items())
        self._append(node.name, str(node.target), args, self.outputs_of[node], phase, place, kwargs)

    def _append(
        self,
        name: str,
        op: str,
        args: tuple[Any, ...],
        outputs: tuple[Value | None, ...],
        phase: Phase,
        place: tuple[str, str],
        kwargs: tuple[tuple[str, Any], ...] = (),
        block: BlockCall | None = None,
    ) -> None:
        base = f"{place[0]}/{op}/{phase.value}"
        self.nodes.append(
            Node(
                name=name,
                op=op,
                args=args,
                kwargs=kwargs,
                outputs=outputs,
                phase=phase,
                key=f"{base}#{self.count[base]}",
                module_path=place[0],
                source=place[1],
                block=block,
            )
        )
        self.count[base] += 1

    def _add_block(self, node: Any, phase: Phase, source: str) -> None:
        """The calls of the row of instances that a block's op stands for: forward in order, backward in reverse."""
        use, first = self.blocks[node.args[0]], node.args[1]
        row = use.rows.get(first, ())
        numbers = [first, *(n for n, _ in row)]
        if phase is Phase.FORWARD:
            last = self.outputs_of[node]
            inputs: list[tuple[Any, ...]] = [self._arg(node.args[3])]
            outputs: list[tuple[Value | None, ...]] = []
            for _, fed in row:
                assert last[0] is not None
                made = Value(self._fresh(f"out_{self.instances[numbers[len(outputs)]]}"), last[0].meta)
                outputs.append((made,))
                inputs.append((*inputs[-1][:fed], Ref(made.name), *inputs[-1][fed + 1 :]))
            self.inputs_of_row[first] = inputs
            for number, given, results in zip(numbers, inputs, [*outputs, last], strict=True):
                self._add_call(use, number, node, (*given, *self._constants_of(use)), results, source)
            return
        tangents = self._arg(node.args[3])
        for number, given in zip(reversed(numbers), reversed(self.inputs_of_row[first]), strict=True):
            gradients = self.outputs_of[node][1:]
            if number != first:
                wanted = f"grad_{self.instances[number]}"
                gradients = tuple(Value(self._fresh(wanted), g.meta) for g in gradients if g is not None)
            args = (*given, *self._constants_of(use), *tangents)
            self._add_call(use, number, node, args, self._with_slots(use, number, gradients), source)
            tangents = tuple(Ref(g.name) for g in gradients if g is not None)

    def _constants_of(self, use: BlockUse) -> list[Ref]:
        return [Ref(self._shared(name)) for name in use.constants]

    def _with_slots(self, use: BlockUse, number: int, gradients: tuple[Value | None, ...]) -> tuple[Value | None, ...]:
        """Gradients of the tensor inputs -> of the instance's parameters and of its inputs, None where none is."""
        given = iter(gradients)
        outputs: list[Value | None] = []
        for slot, (wanted, meta) in zip(use.slots[number], use.slot_gradients, strict=True):
            if wanted:
                name = f"g_{self.arguments[slot].target}"
                outputs.append(None if meta is None else Value(self._fresh(name), meta))
        return (*outputs, *(next(given) if there else None for wanted, there in use.input_gradients if wanted))

    def _add_call(
        self, use: BlockUse, number: int, node: Any, args: tuple[Any, ...], outputs: tuple[Value | None, ...],
        source: str,
    ) -> None:  # fmt: skip
        """One instance's call: its parameters and buffers, then `args` -> outputs or gradients."""
        backward = str(node.target) == BLOCK_BACKWARD
        own = [Ref(self.value_of_argument[s]) for s in use.slots[number]]
        path = self.instances[number]
        op = str(node.target).removesuffix(".default")
        if not backward:
            for k, meta in use.updates:
                slot = use.slots[number][k]
                made = Value(self._fresh(f"new_{self.arguments[slot].target}"), meta)
                outputs = (*outputs, made)
                self.updates[slot] = made.name
        name = node.name if number == node.args[1] else self._fresh(f"{node.name}_{number}")
        self._append(
            name, op, (*own, *args), outputs, Phase.BACKWARD if backward else Phase.FORWARD, (path, source),
            block=BlockCall(key=use.key, instance=path),
        )  # fmt: skip
        if backward:
            wanted = [s for s, (grad, _) in zip(use.slots[number], use.slot_gradients, strict=True) if grad]
            for slot, value in zip(wanted, outputs, strict=False):
                if value is not None:
                    self._sum_gradient(slot, value)

    def _sum_gradient(self, slot: int, value: Value) -> None:
        """One more part of a parameter's gradient."""
        before = self.gradient_of.get(slot)
        if before is not None:
            path = self.arguments[slot].target.rpartition(".")[0]
            total = Value(self._fresh(f"g_{self.arguments[slot].target}_sum"), value.meta)
            args = (Ref(before.name), Ref(value.name))
            self._append(total.name, "aten.add.Tensor", args, (total,), Phase.BACKWARD, (path, ""))
            value = total
        self.gradient_of[slot] = value

    def _add_direct_gradients(self) -> None:
        """Gradients that autograd found at the top level, added to those from blocks."""
        for i, a in enumerate(self.arguments):
            node = None if a.traced is None else self.joint.gradients.get(a.traced)
            if node is not None:
                root = self._root(node)
                self._sum_gradient(i, Value(self.value_of[root], meta_of(root.meta["val"])))

    def _shared(self, name: str) -> str:
        if name not in self.shared_constants:
            self.shared_constants.append(name)
        return _identifier(f"c_{name}")

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
        by_traced = {a.traced: a.target for a in self.arguments if a.traced is not None}
        found = [
            GraphOutput(kind=OutputKind.OUTPUT, target=str(i), value=self.value_of[self._root(n)])
            for i, n in sorted(self.joint.outputs.items())
        ]
        for i, n in sorted(self.joint.mutations.items()):
            value = self.value_of[self._root(n)]
            found.append(GraphOutput(kind=OutputKind.BUFFER_UPDATE, target=by_traced[i], value=value))
        for slot, name in sorted(self.updates.items()):
            target = self.arguments[slot].target
            found.append(GraphOutput(kind=OutputKind.BUFFER_UPDATE, target=target, value=name))
        for i, a in enumerate(self.arguments):
            if a.requires_grad and i in self.value_of_argument:
                gradient = self.gradient_of.get(i)
                target, value_name = self.value_of_argument[i], None if gradient is None else gradient.name
                found.append(GraphOutput(kind=OutputKind.GRADIENT, target=target, value=value_name))
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

"""Every private torch name that the tracer uses, tried with torch 2.13. Nothing else under `tracer/` names one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch._library.simple_registry
import torch.fx.node
import torch.fx.traceback
from torch import Tensor, nn
from torch._decomp import decomposition_table
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import PythonKeyTracer
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from autopar.ir.graph import Measured

__all__ = ["TorchDispatchMode", "enable_python_dispatcher"]

DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
"""What torch raises where Python asks for a tensor's value, or a shape depends on it."""


def fake_mode() -> Any:
    """Tensors made under it have shapes and no data; real tensors that it meets become constants."""
    return FakeTensorMode(allow_non_fake_inputs=True)


CHECKS = (torch.ops.aten._linalg_check_errors.default, torch.ops.aten._assert_async.msg)
"""Ops that give nothing and raise where a value is bad. They stay in the graph."""


@contextmanager
def capture_flags() -> Iterator[None]:
    """While capturing, models are told that they are compiled, and LSTM is made of ATen ops, not of one oneDNN op.

    `CHECKS` are traced like any op: without tokens that order them, and never as dead code.
    """
    compiler = torch.compiler
    effect = torch._library.simple_registry.singleton.find("aten::_linalg_check_errors").effect
    lasting = torch.fx.node._side_effectful_functions | set(CHECKS)
    with (
        mock.patch.object(compiler, "_is_compiling_flag", True),
        mock.patch.object(compiler, "_is_exporting_flag", True),
        mock.patch.object(effect, "_effect", None),
        mock.patch.object(torch.fx.node, "_side_effectful_functions", lasting),
    ):
        was = torch._C._get_mkldnn_enabled()
        torch._C._set_mkldnn_enabled(False)
        try:
            yield
        finally:
            torch._C._set_mkldnn_enabled(was)


def torch_decompositions(names: Sequence[str]) -> dict[Any, Callable[..., Any]]:
    """torch's own decompositions of all overloads of these ATen ops, those with an `out` argument excepted."""
    wanted = set(names)
    return {
        op: function
        for op, function in decomposition_table.items()
        if isinstance(op, torch._ops.OpOverload)
        and op.namespace == "aten"
        and op._schema.name.split("::")[1] in wanted
        and not op._schema.is_mutable * any(a.is_out for a in op._schema.arguments)
    }


@cache
def is_pointwise(name: str) -> bool:
    """Whether torch says that an op ("aten.add.Tensor") works element by element."""
    op: Any = torch.ops
    for part in name.split("."):
        op = getattr(op, part, None)
    return torch.Tag.pointwise in getattr(op, "tags", ())


def storage_key(tensor: Tensor) -> int:
    """Equal for tensors that share memory."""
    return int(tensor.untyped_storage()._cdata)


def constant_of(tensor: Tensor) -> Tensor | None:
    """The known value of a fake tensor that stands for a literal, if it has one."""
    return getattr(tensor, "constant", None)


BATCH_NORMS = frozenset({"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"})
"""In training they write into arguments 3 and 4 (running mean and variance), which their schemas do not say."""


def written_arguments(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an op writes into."""
    schema = op._schema
    if schema.name in BATCH_NORMS:
        return list(args[3:5]) if args[5] else []
    if not schema.is_mutable:
        return []
    found = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += list(value) if isinstance(value, (list, tuple)) else [value]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class OpFacts:
    """What an op's schema says; `makes_new`: all its results are new tensors, none a view."""

    name: str
    overload: str
    prim: bool
    mutable: bool
    makes_new: bool
    takes_device: bool


@cache
def op_facts(op: Any) -> OpFacts:
    """Read from the op's schema once."""
    schema = op._schema
    return OpFacts(
        name=schema.name,
        overload=op._overloadname,
        prim=op.namespace == "prim",
        mutable=schema.is_mutable or schema.name in BATCH_NORMS,
        makes_new=not schema.is_mutable and all(r.alias_info is None for r in schema.returns),
        takes_device=any(a.name == "device" for a in schema.arguments),
    )


@dataclass(slots=True, kw_only=True)
class Joint:
    """What AOT autograd gives, without its descriptors.

    Attributes:
        module: the joint FX graph.
        inputs: placeholder -> position of the argument.
        tangents: placeholder -> position of the output that it is the gradient of.
        outputs: position of the output -> FX node.
        mutations: position of an argument -> FX node of its new value.
        gradients: position of an argument -> FX node of its gradient, absent if it has none.
    """

    module: Any
    inputs: dict[Any, int]
    tangents: dict[Any, int]
    outputs: dict[int, Any]
    mutations: dict[int, Any]
    gradients: dict[int, Any]


def export_joint(
    module: nn.Module,
    arguments: tuple[Tensor, ...],
    decompositions: dict[Any, Callable[..., Any]],
    where: Callable[[], Any],
) -> Joint:
    """Joint graph of `module(*arguments)`, a tuple of tensors; no two arguments or outputs may share memory.

    `where()` is asked once for each forward node; its answer is in `node.meta["autopar"]`.
    """
    with ExitStack() as stack:
        stack.enter_context(_annotating(where))
        exported = aot_export_joint_with_descriptors(stack, module, arguments, decompositions=decompositions)
        return _without_descriptors(exported.graph_module)


def _without_descriptors(module: Any) -> Joint:
    inputs: dict[Any, int] = {}
    tangents: dict[Any, int] = {}
    for node in module.graph.find_nodes(op="placeholder"):
        match node.meta["desc"]:
            case PlainAOTInput(idx=index):
                inputs[node] = index
            case TangentAOTInput(output=PlainAOTOutput(idx=index)):
                tangents[node] = index
            case other:
                raise AssertionError(f"placeholder of an unknown kind: {other}")
    output = next(iter(module.graph.find_nodes(op="output")))
    outputs: dict[int, Any] = {}
    mutations: dict[int, Any] = {}
    gradients: dict[int, Any] = {}
    for node, desc in zip(output.args[0], output.meta["desc"], strict=True):
        if node is None:
            continue
        match desc:
            case PlainAOTOutput(idx=index):
                outputs[index] = node
            case InputMutationAOTOutput(mutated_input=PlainAOTInput(idx=index)):
                mutations[index] = node
            case GradAOTOutput(grad_of=PlainAOTInput(idx=index)):
                gradients[index] = node
            case other:
                raise AssertionError(f"output of an unknown kind: {other}")
    return Joint(
        module=module, inputs=inputs, tangents=tangents, outputs=outputs, mutations=mutations, gradients=gradients
    )


@contextmanager
def _annotating(where: Callable[[], Any]) -> Iterator[None]:
    """Every FX node made in the forward remembers `where()`. Backward nodes find theirs by `seq_nr` afterwards."""
    original = PythonKeyTracer.create_node

    def create_node(self: Any, *args: Any, **kwargs: Any) -> Any:
        node = original(self, *args, **kwargs)
        if node.meta.get("partitioner_tag") != "is_backward" and node.op == "call_function":
            node.meta["autopar"] = where()
        return node

    with mock.patch.object(PythonKeyTracer, "create_node", create_node):
        yield


def outer_frame() -> Any:
    """The frame that called the caller of this function."""
    return sys._getframe(2)


@contextmanager
def eager_flags() -> Iterator[None]:
    """Inside `capture_flags`: models are told that they run as they are."""
    compiler = torch.compiler
    with (
        mock.patch.object(compiler, "_is_compiling_flag", False),
        mock.patch.object(compiler, "_is_exporting_flag", False),
    ):
        was = torch._C._get_mkldnn_enabled()
        torch._C._set_mkldnn_enabled(True)
        try:
            yield
        finally:
            torch._C._set_mkldnn_enabled(was)


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts floating point operations, and bytes that ops read and write (views move none)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = FlopCounterMode(display=False)
        self.moved = 0

    def __enter__(self) -> Counter:
        self.flops.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.flops.__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if all(r.alias_info is None for r in func._schema.returns) or func._schema.is_mutable:
            seen = tree_leaves((args, kwargs, result))
            self.moved += sum(x.numel() * x.element_size() for x in seen if isinstance(x, Tensor))
        return result

    @property
    def measured(self) -> Measured:
        """So far; an op that is no matrix product counts one operation for each element it moves."""
        return Measured(self.flops.get_total_flops() + self.moved // 8, self.moved)


def leaves_behind(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The leaves that autograd would give gradients of these tensors to."""
    todo = [x.grad_fn if x.grad_fn is not None else x for x in outputs if x.requires_grad]
    seen: set[Any] = set()
    found: list[Tensor] = []
    while todo:
        at = todo.pop()
        if isinstance(at, Tensor):
            found.append(at)
            continue
        if at in seen:
            continue
        seen.add(at)
        if hasattr(at, "variable"):
            found.append(at.variable)
        todo += [f for f, _ in at.next_functions if f is not None]
    return found

"""One fake forward, written down: every op that is dispatched, and every module call with its inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError, CaptureError
from autopar.tracer.regions import Regions, Where
from autopar.tracer.rig import SCALARS, STANDARD, Hook, Rig, attributes_kept, cast, refuse_changes, routed
from autopar.tracer.signature import Inputs, Rebuild, captured_dtype, read_outputs
from autopar.tracer.source import line_of_frame
from autopar.tracer.torch_private import (
    TorchDispatchMode,
    constant_of,
    enable_python_dispatcher,
    op_facts,
    outer_frame,
    storage_key,
    written_arguments,
)
from autopar.tracer.tree import Spec, flatten

HEAVY = frozenset(
    {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution", "aten::_grouped_mm", "aten::linear"}
    | {"aten::_scaled_dot_product_flash_attention_for_cpu", "aten::native_batch_norm"}
)


RANDOM = ("aten::rand", "aten::normal", "aten::bernoulli", "aten::uniform", "aten::native_dropout", "aten::multinomial")
"""How the names of ops that draw random numbers begin."""


@dataclass(slots=True)
class Op:
    """One dispatched op. `text`: its name and literals; `ins`, `outs`: numbers of tensors; `writes`: their memory."""

    text: str
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    heavy: bool
    writes: tuple[int, ...] = ()


@dataclass(slots=True)
class Call:
    """One call of a module: ops `start` to `stop` of the record.

    Attributes:
        count: how often the same path was called before.
        leaves, spec: of (args, kwargs); `result`, `result_spec` likewise.
        grads: requires_grad of the input tensors at the time of the call, by tensor number; likewise `result_grads`.
        autocast: (dtype, enabled) of CPU autocast at the call; None if off.
    """

    path: str
    count: int
    module: nn.Module
    leaves: list[Any]
    spec: Spec
    start: int
    stop: int = -1
    result: list[Any] = field(default_factory=list)
    result_spec: Spec = field(default_factory=Spec)
    grads: dict[int, bool] = field(default_factory=dict)
    children: list[Call] = field(default_factory=list)
    grad_mode: bool = True
    autocast: torch.dtype | None = None


class Record(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Filled by `record_forward`.

    Attributes:
        ops, root: all ops, and the tree of calls.
        slot_of: tensor number -> slot that it is (as stored or as used). `given`: numbers of the inputs.
        literals: tensor number -> the real tensor that it stands for.
        outputs, rebuild: of the whole model.
        replaced: slots that the forward assigned another tensor to.
    """

    def __init__(self, slot_names: list[tuple[str, bool]], *, on_meta: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.slot_names = slot_names
        self.on_meta = on_meta
        self.literals: dict[int, Tensor] = {}
        self.stands_for: dict[int, Tensor] = {}
        self.seen: dict[Any, tuple[bool, list[Any]]] = {}
        self.replaced: list[int] = []
        self.ops: list[Op] = []
        self.root: Call | None = None
        self.stack: list[Call] = []
        self.numbers: dict[int, int] = {}
        self.tensors: list[Tensor] = []
        self.slot_of: dict[int, int] = {}
        self.given: set[int] = set()
        self.memory_of_slot: dict[int, int] = {}
        self.outputs: list[tuple[str, Tensor]] = []
        self.rebuild: Rebuild
        self.counts: dict[str, int] = {}
        self.users: dict[int, list[int]] = {}

    def users_of_slot(self, slot: int) -> list[int]:
        """Indices of the ops that read a slot or write into its memory. For a finished record."""
        if not self.users:
            for index, op in enumerate(self.ops):
                slots = {self.slot_of[n] for n in op.ins if n in self.slot_of}
                for s in slots | {self.memory_of_slot[w] for w in op.writes if w in self.memory_of_slot}:
                    self.users.setdefault(s, []).append(index)
        return self.users.get(slot, [])

    def number(self, tensor: Tensor) -> int:
        """The tensor's number; it is kept alive so that no other gets it."""
        found = self.numbers.get(id(tensor))
        if found is None:
            found = self.numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        facts = op_facts(func)
        if facts.prim:
            return func(*args, **kwargs)
        ins: list[int] = []
        text = [facts.name, facts.overload, "1" if torch.is_grad_enabled() else "0"]
        args = tuple([self._read(x, text, ins) for x in args])
        if self.on_meta and facts.takes_device and ("device" in kwargs or not ins):
            kwargs = {**kwargs, "device": torch.device("meta")}
        if kwargs:
            kwargs = {k: self._read(v, text, ins, k) for k, v in kwargs.items()}
        writes: tuple[int, ...] = ()
        if facts.mutable:
            writes = tuple(storage_key(x) for x in written_arguments(func, args, kwargs) if isinstance(x, Tensor))
            self._refuse_parameter_writes(writes)
        joined = " ".join(text)
        known = self.on_meta and facts.makes_new
        result = self._result(func, args, kwargs, joined, ins) if known else func(*args, **kwargs)
        outs = result if isinstance(result, (tuple, list)) else (result,)
        numbers = tuple([self.number(x) for x in outs if isinstance(x, Tensor)])
        self.ops.append(Op(joined, tuple(ins), numbers, facts.name in HEAVY, writes))
        return result

    def _read(self, tree: Any, text: list[str], ins: list[int], name: str = "") -> Any:
        """The argument as it is run: on meta, real tensors become meta tensors that stand for them.

        Its literals are appended to `text`, the numbers of its tensors to `ins`.
        """
        if name:
            text.append(name)
        if isinstance(tree, Tensor):
            if self.on_meta and tree.device.type != "meta":
                tree = self._stand_in(tree)
            ins.append(self.number(tree))
            text.append("#")
            return tree
        if isinstance(tree, (tuple, list)):
            text.append("(")
            found = [self._read(item, text, ins) for item in tree]
            text.append(")")
            return type(tree)(found) if type(tree) in (tuple, list) else tree
        text.append(repr(tree))
        return tree

    def _result(self, func: Any, args: Any, kwargs: Any, text: str, ins: list[int]) -> Any:
        """func(*args, **kwargs); of an op that was seen on such arguments before, just tensors like its results."""
        key = (text, tuple((x.shape, x.stride(), x.dtype) for x in map(self.tensors.__getitem__, ins)))
        known = self.seen.get(key)
        if known is None:
            result = func(*args, **kwargs)
            flat = result if isinstance(result, (tuple, list)) else (result,)
            shapes = [(x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in flat]
            self.seen[key] = (isinstance(result, (tuple, list)), shapes)
            return result
        made = [
            torch.empty_strided(s[0], s[1], dtype=s[2], device="meta") if isinstance(s, tuple) else s for s in known[1]
        ]
        return tuple(made) if known[0] else made[0]

    def _stand_in(self, real: Tensor) -> Tensor:
        """The meta tensor that stands for a real one."""
        known = self.stands_for.get(id(real))
        if known is None:
            known = real.detach().to("meta")
            self.stands_for[id(real)] = known
            self.literals[self.number(known)] = real
        return known

    def _refuse_parameter_writes(self, writes: tuple[int, ...]) -> None:
        for key in writes:
            slot = self.memory_of_slot.get(key)
            if slot is not None and self.slot_names[slot][1]:
                raise CaptureError(
                    f"{line_of_frame(outer_frame())}: parameter {self.slot_names[slot][0]!r} is changed in place: "
                    "change it between steps instead (after optimizer.step()), or keep it in a buffer"
                )

    def hanging(self) -> set[int]:
        """Numbers of tensors that hang on inputs, parameters or random numbers."""
        found = {n for n, slot in self.slot_of.items() if self.slot_names[slot][1]} | self.given
        for op in self.ops:
            if any(n in found for n in op.ins) or op.text.startswith(RANDOM):
                found.update(op.outs)
        return found

    def hook(self, module: nn.Module, path: str, args: Any, kwargs: Any, proceed: Any) -> Any:
        """Called for each module call."""
        pairs, spec = flatten((args, kwargs))
        leaves = [leaf for _, leaf in pairs]
        count = self.counts[path] = self.counts.get(path, -1) + 1
        call = Call(path, count, module, leaves, spec, len(self.ops), grad_mode=torch.is_grad_enabled())
        if torch.is_autocast_enabled("cpu"):
            call.autocast = torch.get_autocast_dtype("cpu")
        call.grads = {self.number(x): x.requires_grad for x in leaves if isinstance(x, Tensor)}
        if self.stack:
            self.stack[-1].children.append(call)
        else:
            self.root = self.root or call
        self.stack.append(call)
        try:
            result = proceed()
        finally:
            self.stack.pop()
        call.stop = len(self.ops)
        pairs, call.result_spec = flatten(result)
        call.result = [leaf for _, leaf in pairs]
        for x in call.result:
            if isinstance(x, Tensor):
                self.number(x)
        return result


MadeGood = Callable[[Where, Exception], Any]
"""(a call, what it raised) -> a result like the call's, or raises."""


def record_forward(
    rig: Rig, inputs: Inputs, changes: list[str], regions: Regions, made_good: MadeGood | None = None
) -> Record:
    """Run the model once on tensors without data. Attributes that it changes are put back, and named in `changes`.

    On meta tensors, which is fast; if that fails, on fake CPU tensors, which know more and whose errors say more.
    """
    found: list[str] = []
    if not regions.calls and made_good is None:
        try:
            with attributes_kept(rig.module, found):
                record = _recorded(rig, inputs, "meta", regions)
            changes += found
            return record
        except CaptureError:
            raise
        except Exception:
            found = []
    with attributes_kept(rig.module, found), rig.mode, enable_python_dispatcher():
        if made_good is None:
            record = _recorded(rig, inputs, "cpu", regions)
        else:
            record = _record(rig, inputs, "cpu", regions, made_good)
    changes += found
    return record


def _recorded(rig: Rig, inputs: Inputs, device: str, regions: Regions) -> Record:
    """The first call's record. Raises CaptureError if a second call would go on from what the first left behind.

    What is left in an attribute that did not exist, or held None, may be made again in every step (a table), or be read
    by nobody (a kept activation); not so a running mean or a count.
    """
    before = {id(m): dict(m.__dict__) for m in rig.module.modules()}
    record = _record(rig, inputs, device, regions, None)
    tensors, plain = _left(rig, before, record)
    if tensors or plain:
        again = _record(rig, inputs, device, regions, None)
        read = {id(again.tensors[n]) for op in again.ops for n in op.ins}
        _, then = _left(rig, before, record)
        kept = [path for path, held in tensors.items() if any(id(x) in read for x in held)]
        kept += [path for path, value in plain.items() if then.get(path, value) != value]
        refuse_changes(kept)
    return record


def _left(
    rig: Rig, before: dict[int, dict[str, Any]], record: Record
) -> tuple[dict[str, list[Tensor]], dict[str, Any]]:
    """New attributes by path: tensors that hang on inputs, weights or random numbers; plain values."""
    tensors: dict[str, list[Tensor]] = {}
    plain: dict[str, Any] = {}
    hanging: set[int] | None = None
    for path, m in rig.module.named_modules():
        was = before.get(id(m), {})
        for name, value in m.__dict__.items():
            if name in STANDARD or was.get(name) is not None:
                continue
            where = f"{path}.{name}" if path else name
            if isinstance(value, SCALARS):
                plain[where] = value
                continue
            held = [x for _, x in flatten(value)[0] if isinstance(x, Tensor) and id(x) in record.numbers]
            if held and hanging is None:
                hanging = record.hanging()
            found = [x for x in held if record.numbers[id(x)] in (hanging or ())]
            if found:
                tensors[where] = found
    return tensors, plain


def _record(rig: Rig, inputs: Inputs, device: str, regions: Regions, made_good: MadeGood | None) -> Record:
    record = Record([(slot.name, slot.is_parameter) for slot in rig.slots], on_meta=device == "meta")
    slots = [rig.stand_in(i, device=device) for i in range(len(rig.slots))]
    installed = [rig.used_form(i, x) for i, x in enumerate(slots)]
    given = [cast(x, rig.precision) for x in stand_ins(inputs, rig.precision, device)]
    for i, x in enumerate(installed):
        record.slot_of[record.number(x)] = i
        record.memory_of_slot[storage_key(x)] = i
    record.given = {record.number(x) for x in given}
    hook = regions.around(rig, record.hook)
    if made_good is not None:
        hook = _forgiving(hook, made_good)
    with regions.entered(), record, rig.installed(installed), routed(rig.names, hook):
        result = inputs.call(rig.module, given)
        record.replaced = [i for i, _ in rig.replaced(installed)]
    record.outputs, record.rebuild = read_outputs(result)
    return record


def _forgiving(hook: Hook, made_good: MadeGood) -> Hook:
    counts: dict[str, int] = {}

    def outer(module: nn.Module, path: str, args: Any, kwargs: Any, proceed: Any) -> Any:
        counts[path] = counts.get(path, -1) + 1
        where = path, counts[path]
        try:
            return hook(module, path, args, kwargs, proceed)
        except AutoparError:
            raise
        except Exception as error:
            return made_good(where, error)

    return outer


def stand_ins(inputs: Inputs, precision: str, device: str) -> list[Tensor]:
    """Contiguous tensors without data like the tensor leaves: under the fake mode, or on the meta device."""
    return [
        torch.empty(x.shape, dtype=captured_dtype(x.dtype, precision), device=device, requires_grad=x.requires_grad)
        for x in inputs.tensors
    ]


def literal_digest(tensor: Tensor) -> str | None:
    """The value of a real tensor, or of a fake one that stands for a literal, as text; None if unknown."""
    value = constant_of(tensor) if constant_of(tensor) is not None else tensor
    if value is None or type(value) not in (Tensor, nn.Parameter) or value.device.type == "meta":
        return None
    data = value.detach().cpu().contiguous()
    return f"{data.dtype}{tuple(data.shape)}{data.flatten().tolist() if data.numel() <= 64 else _hashed(data)}"


def _hashed(data: Tensor) -> str:
    import hashlib

    return hashlib.sha256(data.view(torch.uint8).numpy().tobytes() if data.dim() else b"").hexdigest()

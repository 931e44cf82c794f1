"""Which submodules become regions: run as they are, on whole tensors, because something in them cannot be captured.

The innermost module whose forward has the failing line becomes one opaque op. Its outputs' shapes are learned by
running the model once as it is, with its real weights and the example inputs; a trial of the submodule by itself must
then give the same outputs, so that nothing hidden is missed. Where that cannot be (a number in the result, an argument
changed in place, a result whose shape depends on values, a value handed on in an attribute), the module that calls it
is taken instead. The whole model is never a region: then nothing would be spread.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from autopar.errors import CaptureError, InputError
from autopar.ir.graph import (
    REGION,
    REGION_BACKWARD,
    TOKEN,
    Graph,
    Measured,
    Region,
    TensorMeta,
    Value,
)
from autopar.tracer.leaf_ops import Likeness
from autopar.tracer.refuse import INTO_SUBMODULE, Refusal, UncapturableError, readable_errors, refusal_of
from autopar.tracer.region_ops import RegionFunction, RegionShapes, regions_known
from autopar.tracer.region_run import CallSpec, Runner, copied, drawing, generators, same_values
from autopar.tracer.rig import (
    STANDARD,
    UNKNOWN,
    Hook,
    Registered,
    Rig,
    attributes_kept,
    cast,
    refuse_changes,
    registered,
    routed,
    same_content,
    shallow,
)
from autopar.tracer.signature import Constant, Inputs, captured_dtype
from autopar.tracer.source import source_of
from autopar.tracer.torch_private import Counter, eager_flags, leaves_behind, storage_key
from autopar.tracer.tree import PLAIN, flatten

NUMBERS = (bool, int, float, complex)
Where = tuple[str, int]
"""A module's path and how often it was called before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionCall:
    """One call of a region.

    Attributes:
        modes: whether each module in it is in training mode.
        slots: the rig's slots that are its parameters and buffers.
        touched: attributes, by module, that its run changes.
        forward, backward: what a run cost; `kept_bytes`: what waits for the backward, its arguments among it: gathered
            parameters too (where a parameter is stored whole, that counts it twice).
    """

    spec: CallSpec
    module: nn.Module
    shapes: RegionShapes
    modes: tuple[tuple[str, bool], ...]
    slots: tuple[int, ...]
    touched: tuple[tuple[nn.Module, str], ...]
    forward: Measured
    backward: Measured
    kept_bytes: int
    refusal: Refusal
    path: str
    because: str

    @property
    def key(self) -> str:
        """As in `Region`."""
        return self.spec.key


@dataclass(frozen=True, slots=True)
class Regions:
    """Those of one capture."""

    calls: Mapping[Where, RegionCall] = field(default_factory=dict)

    @property
    def by_key(self) -> dict[str, RegionCall]:
        """By region key."""
        return {c.key: c for c in self.calls.values()}

    def around(self, rig: Rig, hook: Hook) -> Hook:
        """`hook`, but a region's call is one op."""
        paths = {path for path, _ in self.calls}
        counts: dict[str, int] = {}

        def outer(module: nn.Module, path: str, args: Any, kwargs: Any, proceed: Any) -> Any:
            if path not in paths:
                return hook(module, path, args, kwargs, proceed)
            counts[path] = counts.get(path, -1) + 1
            region = self.calls.get((path, counts[path]))
            if region is None:
                raise CaptureError(f"region {path} is called more often at capture than when the model runs")
            return hook(module, path, args, kwargs, lambda: _call(region, rig, args, kwargs))

        return outer if paths else hook

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The ops know the regions, and attributes that they change are unknown. Inside `attributes_kept`."""
        for region in self.calls.values():
            for module, name in region.touched:
                module.__dict__[name] = UNKNOWN
        with regions_known({c.key: c.shapes for c in self.calls.values()}):
            yield

    def records(self, rig: Rig) -> tuple[Region, ...]:
        """As other rooms see them."""
        stored = [slot.tensor for slot in rig.slots]
        return tuple(
            Region(key=c.key, module_path=c.path, source=c.refusal.where, message=_message(c), build=_Build(c, stored))
            for c in self.calls.values()
        )


@dataclass(frozen=True, slots=True)
class _Build:
    """Makes runners. `shared`: module path -> its copy."""

    region: RegionCall
    stored: Sequence[Tensor]

    def __call__(self, shared: dict[str, nn.Module]) -> Runner:
        path = self.region.path
        if path not in shared:
            shared[path] = copied(self.region.module, self.stored)
            for name, training in self.region.modes:
                shared[path].get_submodule(name).training = training
        return Runner(self.region.spec, shared[path])


def _message(region: RegionCall) -> str:
    refusal = region.refusal
    what = f"`{refusal.expression}` {refusal.what}" if refusal.expression else refusal.what
    because = f" ({region.because})" if region.because else ""
    flops = region.forward.flops + region.backward.flops
    cost = f"about {_rough(flops, 'FLOP')} and {_rough(region.kept_bytes, 'B')} kept for the backward, measured once"
    remedy = f"; to have it split: {refusal.remedy}" if refusal.remedy else ""
    kind = type(region.module).__name__
    return f"{what}{because}: {kind} runs as it is, whole on every rank, {cost}{remedy}"


def _rough(amount: int, unit: str) -> str:
    """One digit: runs differ."""
    for factor, prefix in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if amount >= factor:
            return f"{float(f'{amount / factor:.0e}'):.0f} {prefix}{unit}"
    return f"{float(f'{amount:.0e}'):.0f} {unit}"


def measured(graph: Graph, regions: Regions) -> Graph:
    """The graph with each region's cost, the size of what it keeps, and the line for which it is one."""
    if not regions.calls:
        return graph
    calls = regions.by_key
    nodes = []
    for node in graph.nodes:
        if node.op in (REGION, REGION_BACKWARD):
            call = calls[node.args[0]]
            node = replace(node, source=call.refusal.where, module_path=call.path)
            if node.op == REGION:
                token = node.outputs[-1]
                outputs = node.outputs
                if token is not None:
                    outputs = (*outputs[:-1], Value(token.name, TensorMeta((call.kept_bytes,), TOKEN)))
                node = replace(node, outputs=outputs, measured=call.forward)
            else:
                node = replace(node, measured=call.backward)
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def _call(region: RegionCall, rig: Rig, args: Any, kwargs: Any) -> Any:
    """In a trace: the op instead of the module's call, with the same result structure."""
    s = region.spec
    pairs, spec = flatten((args, kwargs))
    leaves = [leaf for _, leaf in pairs]
    plain = tuple(None if isinstance(x, Tensor) else x for x in leaves)
    if spec != s.spec or plain != s.leaves:
        raise CaptureError(f"region {region.key} is called with other arguments at capture than when the model runs")
    own = [rig.slots[i].places[0] for i in region.slots]
    tensors = [*(leaves[at] for at in s.inputs), *(d[name] for d, name in own)]
    made = RegionFunction.apply(region.key, *tensors)  # type: ignore[no-untyped-call]
    for k, new in zip(s.updated, made[len(s.outputs) :], strict=False):
        for d, name in rig.slots[region.slots[k - len(s.inputs)]].places:
            d[name] = new
    return s.result_spec.build([x.value if isinstance(x, Constant) else made[x] for x in s.results])


# Finding them --------------------------------------------------------------------------------------------------------


def find_regions(rig: Rig, inputs: Inputs, failed: UncapturableError, known: Regions, attempt: Any) -> Regions:
    """The regions without which the model cannot be recorded, `known` among them.

    Args:
        attempt: (regions, made_good) -> None: a fake forward; a call that fails goes to `made_good`, which gives
            tensors like its result, so that one forward finds all such calls.

    Raises:
        CaptureError: what failed is not in a submodule, or the model cannot be run.
    """
    _require_values(rig, inputs, failed)
    wanted = {c.path: (c.refusal, c.because) for c in known.calls.values()}
    assert failed.refusal.module is not None
    if failed.refusal.module in wanted:
        raise failed
    wanted[failed.refusal.module] = failed.refusal, ""
    while True:
        regions, seen = _settled(rig, inputs, wanted, failed)
        news: dict[str, Refusal] = {}

        with readable_errors():
            attempt(regions, partial(_made_good, seen, wanted, news))
        if not news:
            return regions
        wanted |= {path: (refusal, "") for path, refusal in news.items()}


def _made_good(
    seen: Mapping[Where, Any], wanted: Container[str], news: dict[str, Refusal], where: Where, error: Exception
) -> Any:
    """Tensors like the result of a call that failed; notes that it did."""
    if where not in seen or not where[0] or where[0] in wanted:
        raise error
    news.setdefault(where[0], replace(refusal_of(error), module=where[0]))
    return seen[where]()


def _require_values(rig: Rig, inputs: Inputs, failed: UncapturableError) -> None:
    path = failed.refusal.module
    if not path:
        raise UncapturableError(failed.refusal, INTO_SUBMODULE if path == "" else "") from None
    if any(s.tensor.is_meta for s in rig.slots) or any(x.is_meta for x in inputs.tensors):
        more = f"; {path} could run as a region, whole on every rank, if the weights and example inputs were real"
        raise UncapturableError(
            failed.refusal, f"{more} (they are on the meta device: its outputs' shapes are not known)"
        )


def _settled(
    rig: Rig, inputs: Inputs, wanted: dict[str, tuple[Refusal, str]], failed: UncapturableError
) -> tuple[Regions, Mapping[Where, Any]]:
    """The calls of the wanted modules, or of those that call them where these cannot be regions; and all calls seen."""
    while True:
        run = _RealRun(rig, inputs, wanted, failed).run()
        if not run.wider:
            return Regions(run.found), run.seen
        for path, (parent, reason) in run.wider.items():
            refusal, _ = wanted.pop(path)
            if not parent:
                told = f"; {path} cannot run as a region either: {reason}"
                raise UncapturableError(refusal, told)
            wanted.setdefault(parent, (refusal, f"{path} alone won't do: {reason}"))


class _RealRun:
    """One forward of the model as it is, on copies of its weights: how each call's result looks, and the wanted ones.

    Attributes:
        seen: of each call, a function that makes tensors like its result.
        found: the wanted calls. `wider`: wanted path -> (the path that calls it, why that must be taken instead).
    """

    def __init__(
        self, rig: Rig, inputs: Inputs, wanted: Mapping[str, tuple[Refusal, str]], failed: UncapturableError
    ) -> None:
        self.rig, self.inputs, self.wanted, self.failed = rig, inputs, wanted, failed
        self.seen: dict[Where, Any] = {}
        self.found: dict[Where, RegionCall] = {}
        self.wider: dict[str, tuple[str, str]] = {}
        self.counts: dict[str, int] = {}
        self.stack: list[str] = []
        self.inside = 0
        self.stored = [s.tensor for s in rig.slots]
        self.copies: dict[str, nn.Module] = {}

    def run(self) -> _RealRun:
        """Raises `failed` if the model does not run."""
        rig, precision = self.rig, self.rig.precision
        for path in self.wanted:
            try:
                self.copies[path] = copied(rig.module.get_submodule(path), self.stored)
            except Exception as error:
                raise UncapturableError(self.failed.refusal, f"; {path} cannot be copied: {error}") from None
        slots = [
            s.tensor.detach()
            .to(rig.stored_dtype(s), copy=True)
            .requires_grad_(s.is_parameter and s.tensor.requires_grad)
            for s in rig.slots
        ]
        given = [cast(self._stored(x).requires_grad_(x.requires_grad), precision) for x in self.inputs.tensors]
        used = [rig.used_form(i, x) for i, x in enumerate(slots)]
        modes = attributes_kept(rig.module, []), eager_flags(), drawing("region", given), rig.installed(used)
        with ExitStack() as stack:
            for mode in (*modes, routed(rig.names, self._hook)):
                stack.enter_context(mode)
            try:
                self.inputs.call(rig.module, given)
            except CaptureError:
                raise
            except Exception as error:
                first = (str(error).strip() or type(error).__name__).splitlines()[0]
                told = f"; the model as it is fails too: {type(error).__name__}: {first}"
                raise UncapturableError(self.failed.refusal, told) from None
        return self

    def _stored(self, x: Tensor) -> Tensor:
        return x.detach().to(captured_dtype(x.dtype, self.rig.precision), copy=True)

    def _hook(self, module: nn.Module, path: str, args: Any, kwargs: Any, proceed: Any) -> Any:
        count = self.counts[path] = self.counts.get(path, -1) + 1
        parent = self.stack[-1] if self.stack else ""
        wanted = path in self.wanted and not self.inside
        self.inside += wanted
        self.stack.append(path)
        try:
            make = self._wanted if wanted else _proceeded
            result = make(module, (path, count), parent, args, kwargs, proceed)
        finally:
            self.stack.pop()
            self.inside -= wanted
        self.seen[path, count] = _alike(result)
        return result

    def _wanted(self, module: nn.Module, where: Where, parent: str, args: Any, kwargs: Any, proceed: Any) -> Any:
        watch = _Watch(self.rig, module, args, kwargs)
        result = proceed()
        try:
            spec, touched = watch.spec(where, result)
            trial = _Trial(spec, Runner(spec, copied(self.copies[where[0]], self.stored)), watch)
            region = trial.region(result, module, where[0], *self.wanted[where[0]], touched)
        except _WiderError as error:
            self.wider.setdefault(where[0], (parent, str(error)))
        else:
            self.found[where] = region
        return result


def _proceeded(module: nn.Module, where: Where, parent: str, args: Any, kwargs: Any, proceed: Any) -> Any:
    return proceed()


def _alike(result: Any) -> Any:
    """A function that makes empty tensors like those of a result."""
    pairs, spec = flatten(result)
    leaves = [(Likeness.at_border(x), x.requires_grad) if isinstance(x, Tensor) else Constant(x) for _, x in pairs]

    def make() -> Any:
        return spec.build([x.value if isinstance(x, Constant) else x[0].empty(requires_grad=x[1]) for x in leaves])

    return make


class _WiderError(Exception):
    """This call cannot be a region; says why."""


class _Watch:
    """What a real call changes besides its result."""

    def __init__(self, rig: Rig, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.rig, self.module, self.args, self.kwargs = rig, module, args, kwargs
        pairs, self.spec_ = flatten((args, kwargs))
        self.leaves = [leaf for _, leaf in pairs]
        self.at = [i for i, x in enumerate(self.leaves) if isinstance(x, Tensor)]
        self.given = [self.leaves[i] for i in self.at]
        self.versions = [x._version for x in self.given]
        self.own = _own_places(rig, module)
        self.installed: list[Any] = [d[name] for d, name in (s.places[0] for s in rig.slots)]
        self.stored_versions: list[int] = [x._version for x in self.installed]
        own = [self.installed[i] for i in self.own]
        self.values = [x.detach().clone() for x in (*self.given, *own)]
        self.buffers = {i: self.installed[i].detach().clone() for i in range(rig.count, len(rig.slots))}
        self.flags = [x.requires_grad for x in (*self.given, *own)]
        self.before = {id(m): (dict(m.__dict__), shallow(m.__dict__)) for m in rig.module.modules()}
        self.registered = {id(m): registered(m) for m in rig.module.modules()}
        self.drawn = generators()
        self.grad_mode = torch.is_grad_enabled()
        self.autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None

    def spec(self, where: Where, result: Any) -> tuple[CallSpec, tuple[tuple[nn.Module, str], ...]]:
        """After the call. Raises _WiderError, and CaptureError for a changed parameter."""
        self.drew = generators() != self.drawn
        self._check_arguments()
        updated = self._updated()
        outputs, results, result_spec = _result(result)
        key = where[0] + (f"#{where[1]}" if where[1] else "")
        count = len(self.given)
        spec = CallSpec(
            key=key,
            spec=self.spec_,
            leaves=tuple(None if isinstance(x, Tensor) else x for x in self.leaves),
            inputs=tuple(self.at),
            names=(*(f"argument {i}" for i in range(count)), *(self.rig.slots[i].name for i in self.own)),
            places=tuple(self.own.values()),
            grads=tuple(self.flags),
            gradients=tuple(self.flags),
            updated=tuple(count + k for k, i in enumerate(self.own) if i in updated),
            results=results,
            result_spec=result_spec,
            outputs=tuple((tuple(x.shape), x.dtype) for x in outputs),
            differentiable=tuple(x.requires_grad for x in outputs),
            grad_mode=self.grad_mode,
            autocast=self.autocast,
            wide=self.rig.precision == "fp64",
        )
        return spec, self._touched()

    def _check_arguments(self) -> None:
        for x in self.leaves:
            if not isinstance(x, (Tensor, *PLAIN)):
                raise _WiderError(f"an argument is a {type(x).__qualname__}, no tensor")
        now = [leaf for _, leaf in flatten((self.args, self.kwargs))[0]]
        same = len(now) == len(self.leaves) and all(a is b for a, b in zip(now, self.leaves, strict=True))
        if not same or any(x._version != v for x, v in zip(self.given, self.versions, strict=True)):
            raise _WiderError("it changes an argument in place")

    def _updated(self) -> set[int]:
        """Own buffers that the call changed. Some of torch's kernels don't say that they write: values count."""
        updated = set()
        for i, slot in enumerate(self.rig.slots):
            x, version = self.installed[i], self.stored_versions[i]
            d, name = slot.places[0]
            same = d[name] is x and x._version == version
            if same and (slot.is_parameter or same_values(x, self.buffers[i])):
                continue
            if slot.is_parameter:
                raise CaptureError(
                    f"parameter {slot.name!r} is changed in place while the model runs: change it between steps "
                    "instead (after optimizer.step()), or keep it in a buffer"
                )
            now = d.get(name)
            if i not in self.own:
                raise _WiderError(f"it changes buffer {slot.name}, which is not its own")
            if not isinstance(now, Tensor) or (now.shape, now.dtype) != (x.shape, x.dtype):
                raise _WiderError(f"it gives buffer {slot.name} another shape or dtype")
            updated.add(i)
        return updated

    def _touched(self) -> tuple[tuple[nn.Module, str], ...]:
        found = []
        for path, m in self.rig.module.named_modules():
            known = self.registered.get(id(m), registered(m))
            news = [n for now, names in zip(registered(m), known, strict=True) for n in sorted(now - names)]
            refuse_changes([Registered(f"{path}.{n}" if path else n) for n in news])
            before, inner = self.before.get(id(m), ({}, {}))
            for name, value in m.__dict__.items():
                if name in STANDARD or name == "training":
                    continue
                if name not in before or not same_content(before[name], value, inner.get(name)):
                    found.append((m, name))
        return tuple(found)


def _own_places(rig: Rig, module: nn.Module) -> dict[int, tuple[tuple[str, str, str], ...]]:
    """Slot -> its places in a submodule."""
    own: dict[int, list[tuple[str, str, str]]] = {}
    for path, sub in module.named_modules():
        for which in ("_parameters", "_buffers"):
            d = getattr(sub, which)
            for name in d:
                slot = rig.slot_of.get((id(d), name))
                if slot is not None:
                    own.setdefault(slot, []).append((path, which, name))
    return {slot: tuple(places) for slot, places in sorted(own.items())}


def _result(result: Any) -> tuple[list[Tensor], tuple[int | Constant, ...], Any]:
    pairs, spec = flatten(result)
    outputs: list[Tensor] = []
    results: list[int | Constant] = []
    for path, leaf in pairs:
        if isinstance(leaf, Tensor):
            results.append(len(outputs))
            outputs.append(leaf)
        elif isinstance(leaf, PLAIN) and not isinstance(leaf, NUMBERS):
            results.append(Constant(leaf))
        else:
            place = f"output {path}" if path else "its output"
            raise _WiderError(f"{place} is a {type(leaf).__qualname__}, not a tensor of fixed shape")
    return outputs, tuple(results), spec


class _Trial:
    """The call once more, by itself, as a rank will make it: same outputs; what it costs; which gradients it gives."""

    def __init__(self, spec: CallSpec, runner: Runner, watch: _Watch) -> None:
        self.spec, self.runner, self.watch = spec, runner, watch

    def region(
        self, result: Any, module: nn.Module, path: str, refusal: Refusal, because: str,
        touched: tuple[tuple[nn.Module, str], ...],
    ) -> RegionCall:  # fmt: skip
        """Raises _WiderError."""
        values = self.watch.values
        arguments = {storage_key(x) for x in values}
        kept: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            if storage_key(x) not in arguments:
                kept[storage_key(x)] = x.untyped_storage().nbytes()
            return x

        try:
            with Counter() as forward, saved_tensors_hooks(pack, lambda x: x):
                *made, run = self.runner.forward(values, "trial")
            self._compare(made, result)
            ours = {id(x) for x in run.arguments}
            if any(id(x) not in ours for x in leaves_behind(run.outputs)):
                raise _WiderError("it uses a tensor that needs a gradient and is neither its parameter nor an argument")
            flags = zip(made, self.spec.differentiable, strict=False)
            tangents = [torch.ones_like(x) for x, flag in flags if flag]
            with Counter() as backward:
                gradients, missing = self.runner.backward(run, tangents, again=False)
        except _WiderError:
            raise
        except Exception as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise _WiderError(f"it does not run by itself: {type(error).__name__}: {first}") from None
        self._probe()
        spec = self._without(missing)
        given = iter(gradients)
        likenesses = [Likeness.at_border(next(given)) if flag else None for flag in self.spec.grads]
        return RegionCall(
            spec=spec, module=module, path=path, slots=tuple(self.watch.own), touched=touched,
            modes=tuple((n, m.training) for n, m in module.named_modules()),
            shapes=RegionShapes(
                outputs=tuple(map(Likeness.at_border, made)),
                differentiable=(*spec.differentiable, *(False for _ in spec.updated)),
                gradients=tuple(x if flag else None for x, flag in zip(likenesses, spec.gradients, strict=True)),
            ),
            forward=forward.measured, backward=backward.measured,
            kept_bytes=sum(kept.values()) + sum(x.untyped_storage().nbytes() for x in values),
            refusal=replace(refusal, where=refusal.where or source_of(module)), because=because,
        )  # fmt: skip

    def _compare(self, made: Sequence[Tensor], result: Any) -> None:
        """The outputs and updates are those of the call in its place, unless it drew random numbers."""
        if self.watch.drew:
            return
        wanted = [x for _, x in flatten(result)[0] if isinstance(x, Tensor)]
        slots = [self.watch.rig.slots[i].places[0] for i in self.watch.own]
        wanted += [slots[k - len(self.spec.inputs)][0][slots[k - len(self.spec.inputs)][1]] for k in self.spec.updated]
        for mine, theirs in zip(made, wanted, strict=True):
            if not torch.allclose(mine.double(), theirs.detach().double(), rtol=1e-3, atol=1e-5, equal_nan=True):
                raise _WiderError(
                    "by itself it gives another result: it depends on something that is no argument of it"
                )

    def _probe(self) -> None:
        """Other values of the same shapes give outputs of the same shapes."""
        for change in (torch.neg, torch.zeros_like, _mixed):
            other = [_altered(x, change) for x in self.watch.values[: len(self.spec.inputs)]]
            try:
                self.runner.forward([*other, *self.watch.values[len(other) :]], "trial")
            except InputError as error:
                raise _WiderError(str(error).split(": ", 1)[1].rsplit(": ", 1)[0]) from None
            except Exception:
                continue

    def _without(self, missing: frozenset[int]) -> CallSpec:
        """A tensor input that got no gradient has none; a parameter may get one from another batch."""
        wanted = [k for k, grad in enumerate(self.spec.grads) if grad]
        none = {wanted[k] for k in missing if wanted[k] < len(self.spec.inputs)}
        return replace(self.spec, gradients=tuple(g and k not in none for k, g in enumerate(self.spec.gradients)))


def _altered(x: Tensor, change: Any) -> Tensor:
    if x.is_floating_point():
        found: Tensor = change(x)
        return found
    return _mixed(x)


def _mixed(x: Tensor) -> Tensor:
    """The same entries in reverse order."""
    return x.flatten().flip(0).view(x.shape)

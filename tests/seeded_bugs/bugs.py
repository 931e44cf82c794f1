"""The bugs: each a wrong line of emitted text or a wrong function of the runtime, and the plans that have it.

A gradient's factor is the usual one: what a mean over ranks, stages or micro-batches makes of a sum.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autopar import api, staging
from autopar.ir.graph import Phase
from autopar.ir.layout import Kind, Layout, Placement
from autopar.ir.plan import is_staged
from autopar.ir.program import Source
from autopar.ir.staged import JOINED, StagedSource
from autopar.runtime import local_ops, pipeline_step
from autopar.runtime.comm import Communicator
from autopar.runtime.compiled import CompiledModule
from autopar.runtime.pipeline import Pipeline
from autopar.runtime.pipeline_step import Step
from autopar.runtime.staged import StagedModule
from tests.seeded_bugs.plans import Planned

Plant = Callable[[ExitStack, Planned], str | None]
"""Plants a bug until the stack ends; gives the emitted text of a flat plan if that is where it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """One bug. `kind`: as the issue names it; `seen`: what the name of a tensor that then differs begins with."""

    kind: str
    name: str
    plans: tuple[str, ...]
    plant: Plant
    seen: str


# How a bug is planted -------------------------------------------------------------------------------------------------


def text(pattern: str, instead: str, *, after: str = "") -> Plant:
    """The first line like `pattern` behind `after`: with stages, of the text of each part that has one."""

    def edited(whole: str) -> str:
        head, mark, tail = whole.partition(after) if after else ("", "", whole)
        return head + mark + re.sub(pattern, instead, tail, count=1)

    def plant(stack: ExitStack, planned: Planned) -> str | None:
        if is_staged(planned.plan):
            whole = function(staging, "emit_stages", lambda real: lambda program: _changed(real(program), edited))
            return whole(stack, planned)
        source = api.emit_captured(planned.captured, planned.plan).text
        assert edited(source) != source, f"nothing like {pattern} is emitted"
        return edited(source)

    return plant


def _changed(source: StagedSource, edit: Callable[[str], str]) -> StagedSource:
    def one(x: Source) -> Source:
        return replace(x, text=edit(x.text))

    found = replace(
        source,
        first={k: one(x) for k, x in source.first.items()},
        weights=tuple({k: one(x) for k, x in part.items()} for part in source.weights),
        main=tuple(map(one, source.main)),
        after={k: one(x) for k, x in source.after.items()},
        last=one(source.last),
    )
    assert found.text != source.text, "nothing like it is emitted"
    return found


def function(owner: Any, name: str, wrong: Callable[[Any], Any]) -> Plant:
    """`wrong(the right function)` in the place of a function or method."""

    def plant(stack: ExitStack, planned: Planned) -> None:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(owner, name, wrong(getattr(owner, name)))

    return plant


def update(register: Callable[[Any], Any], wrong: Callable[[torch.nn.Parameter], None], only: str = "rank") -> Plant:
    """`wrong(parameter)` at each update on ranks, which are threads of that name; the one device is another."""

    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if threading.current_thread().name.startswith(only):
            with torch.no_grad():
                for parameter in optimizer.param_groups[0]["params"]:
                    wrong(parameter)

    def plant(stack: ExitStack, planned: Planned) -> None:
        stack.callback(register(hook).remove)

    return plant


@contextmanager
def planted(bug: Bug, planned: Planned) -> Iterator[str | None]:
    """With the bug; gives the text to run, None: as emitted."""
    with ExitStack() as stack:
        yield bug.plant(stack, planned)


# What is wrong --------------------------------------------------------------------------------------------------------


def taken_for_whole(real: Any) -> Any:
    """Each rank's summand of a gradient stands for the sum."""

    def _of_devices(layout: Layout, mesh: Any) -> Layout:
        right = real(layout, mesh)
        return replace(
            right,
            placements=tuple(Placement(Kind.REPLICATE) if p.kind is Kind.PARTIAL else p for p in right.placements),
        )

    return _of_devices


def after_a_sum(wrong: Callable[[Communicator, torch.Tensor, str], torch.Tensor]) -> Callable[[Any], Any]:
    """What comes of a sum over an axis is not left alone."""

    def around(real: Any) -> Any:
        def convert(self: Communicator, x: torch.Tensor, before: Layout, after: Layout, *more: Any) -> torch.Tensor:
            found = real(self, x, before, after, *more)
            summed = [a for a in before.axes if before.on(a).kind is Kind.PARTIAL and self.size(a) > 1]
            return wrong(self, found, summed[0]) if summed else found

        return convert

    return around


def of_the_first_step(real: Any) -> Any:
    """Gathered weights are kept."""
    kept: dict[tuple[int, int], Any] = {}
    lock = threading.Lock()

    def _weights(self: Step, part: Any) -> Any:
        found = [x.clone() for x in real(self, part)]
        with lock:
            return kept.setdefault((id(self.pipeline), part.index), found)

    return _weights


def own_sum_only(real: Any) -> Any:
    return lambda self, name, parts, number: next(self.sums[p, name] for p in parts if (p, name) in self.sums)


def by_the_number_of_stages(real: Any) -> Any:
    return lambda self, *more: real(self, *more) / self.pipeline.program.stages


def by_the_number_of_micro_batches(real: Any) -> Any:
    return lambda self, key, gradient, summed: real(
        self, key, gradient / self.pipeline.program.micro_batches if summed else gradient, summed
    )


def a_key_for_each_rank(real: Any) -> Any:
    def _stream(rt: Communicator, *more: Any) -> Any:
        stream = real(rt, *more)
        return replace(stream, key=stream.key + (rt.index("dp") if rt.mesh.size > 1 else 0))

    return _stream


def average_of_averages(real: Any) -> Any:
    """Each micro-batch divides by its own number of labels, and all count alike."""

    def _inputs(self: Step, executable: Any, part: Any, micro_batch: int) -> list[torch.Tensor]:
        found = real(self, executable, part, micro_batch)
        labels = dict(zip(executable.inputs, found, strict=True)).get("labels")
        if labels is None:
            return found  # type: ignore[no-any-return]
        rt = self.pipeline.rt
        own = rt.all_reduce((labels != -100).sum().float(), "dp") * self.pipeline.program.micro_batches
        return [own if n.startswith(JOINED) else x for n, x in zip(executable.inputs, found, strict=True)]

    return _inputs


def of_another_micro_batch(real: Any) -> Any:
    """The first two are exchanged on their way forwards."""

    def _pass(self: Step, passed: Any, value: torch.Tensor, micro_batch: int) -> None:
        swapped = micro_batch ^ 1 if passed.phase is Phase.FORWARD and micro_batch < 2 else micro_batch
        real(self, passed, value, swapped)

    return _pass


def another_place(real: Any) -> Any:
    """The other data-parallel rank of the stage."""
    return lambda self, stage: stage * self.program.mesh.size + (self.rt.rank + 1) % self.program.mesh.size


def of_own_pieces(real: Any) -> Any:
    return lambda self, order: torch.nn.utils.get_total_norm([p.grad for p in self.parameters()], order)


def rows_shifted(parameter: torch.nn.Parameter) -> None:
    """The gradient of each row updates the next one."""
    if parameter.grad is not None:
        parameter.grad.copy_(parameter.grad.roll(1, 0))


def rounded(parameter: torch.nn.Parameter) -> None:
    """To bfloat16, and back."""
    parameter.copy_(parameter.bfloat16())


AXIS_SUM = r'rt\.(all_reduce|reduce_scatter)\((\w+), "(\w+)"([, \d]*)\)'
BACKWARD = "_backward(rt, i"

GRADIENT, STATE = "gradient of ", "optimizer "
LAYERS = "gradient of blocks."
BUGS = (
    Bug(
        kind="wrong gradient scale", name="mean over ranks", plans=("dp", "zero3", "tp", "cp"),
        plant=text(AXIS_SUM, r'rt.\1(\2, "\3"\4).div(rt.size("\3"))', after=BACKWARD), seen=LAYERS,
    ),
    Bug(
        kind="wrong gradient scale", name="mean over ranks, once a step", plans=("stages", "stages zero"),
        plant=function(Communicator, "convert", after_a_sum(lambda rt, x, axis: x / rt.size(axis))), seen=LAYERS,
    ),
    Bug(
        kind="wrong gradient scale", name="mean over micro-batches", plans=("stages", "stages zero"),
        plant=function(Step, "_add", by_the_number_of_micro_batches), seen=LAYERS,
    ),
    Bug(
        kind="wrong gradient scale", name="mean over stages", plans=("stages", "stages zero"),
        plant=function(Step, "_over_stages", by_the_number_of_stages), seen="gradient of embed.weight",
    ),
    Bug(
        kind="missing all-reduce", name="in the text", plans=("dp", "tp", "cp"),
        plant=text(AXIS_SUM.replace("|reduce_scatter", ""), r"\2.clone()", after=BACKWARD), seen=LAYERS,
    ),
    Bug(
        kind="missing all-reduce", name="a cut instead of a reduce-scatter", plans=("zero3",),
        plant=text(AXIS_SUM.replace("all_reduce|", ""), r'rt.slice(\2, "\3"\4)', after=BACKWARD), seen=LAYERS,
    ),
    Bug(
        kind="missing all-reduce", name="once a step", plans=("stages", "stages zero"),
        plant=function(pipeline_step, "_of_devices", taken_for_whole), seen=LAYERS,
    ),
    Bug(
        kind="double all-reduce", name="in the text", plans=("dp", "zero3", "tp", "cp"),
        plant=text(AXIS_SUM, r'rt.all_reduce(rt.\1(\2, "\3"\4), "\3")', after=BACKWARD), seen=LAYERS,
    ),
    Bug(
        kind="double all-reduce", name="once a step", plans=("stages", "stages zero"),
        plant=function(Communicator, "convert", after_a_sum(lambda rt, x, axis: rt.all_reduce(x, axis))), seen=LAYERS,
    ),
    Bug(
        kind="stale gather", name="of the first step", plans=("zero3",),
        plant=text(
            r'\naten = torch.ops.aten\n((?s:.*?))rt.all_gather\(p_embed_weight, "dp", 0\)',
            r'\naten = torch.ops.aten\nKEPT = {}\n\1'
            r'KEPT.setdefault("embed", rt.all_gather(p_embed_weight, "dp", 0))',
        ),
        seen="optimizer embed.weight",
    ),
    Bug(
        kind="stale gather", name="of the first step, for all parts", plans=("stages zero",),
        plant=function(Step, "_weights", of_the_first_step), seen="optimizer embed.weight",
    ),
    Bug(
        kind="tied weight not synchronised", name="one use's gradient", plans=("dp",),
        plant=text(r"aten\.add\.Tensor\((\w+), \w+\)(  # float32\[24, 12\])", r"\1.clone()\2"),
        seen="gradient of embed.weight",
    ),
    Bug(
        kind="tied weight not synchronised", name="each stage's own gradient", plans=("stages", "stages zero"),
        plant=function(Step, "_over_stages", own_sum_only), seen="gradient of embed.weight",
    ),
    Bug(
        kind="per-rank seed wrong", name="another key on each rank", plans=("drawing", "drawing stages"),
        plant=function(local_ops, "_stream", a_key_for_each_rank), seen="gradient of layers.",
    ),
    Bug(
        kind="norm over the local shard only", name="torch's own over own pieces",
        plans=("zero3", "tp", "stages", "stages zero"),
        plant=function(CompiledModule, "_gradient_norm", of_own_pieces), seen="norm of the gradients",
    ),
    Bug(
        kind="norm over the local shard only", name="of own stage", plans=("stages", "stages zero"),
        plant=function(StagedModule, "_over_stages", lambda real: lambda self, power, largest: power),
        seen="norm of the gradients",
    ),
    Bug(
        kind="norm over the local shard only", name="a tied weight counted on each stage", plans=("stages",),
        plant=function(StagedModule, "_counts", lambda real: lambda self, name: True), seen="norm of the gradients",
    ),
    Bug(
        kind="padding counted in the loss", name="as a label", plans=("dp", "cp", "stages"),
        plant=text(r"_to_copy\.default\((logical_not\w*),", r"_to_copy.default(torch.ones_like(\1),"), seen=LAYERS,
    ),
    Bug(
        kind="unequal micro-batch averaging", name="mean of means", plans=("stages", "stages zero"),
        plant=function(Step, "_inputs", average_of_averages), seen=LAYERS,
    ),
    Bug(
        kind="wrong optimizer shard", name="rows shifted by one", plans=("zero3", "stages zero"),
        plant=update(register_optimizer_step_pre_hook, rows_shifted), seen=STATE,
    ),
    Bug(
        kind="recompute with other random numbers", name="drawn by another name",
        plans=("recompute", "recompute stages"),
        plant=text(r"dropout\.default/forward#0", "dropout.default/elsewhere#0", after=BACKWARD),
        seen="gradient of layers.",
    ),
    Bug(
        kind="off-by-one stage boundary", name="the last block of a stage left out", plans=("stages", "stages zero"),
        plant=text(r"return \[out_blocks_[12]\]", "return [inputs[0]]"), seen=LAYERS,
    ),
    Bug(
        kind="swapped send", name="another micro-batch's", plans=("stages", "stages zero"),
        plant=function(Step, "_pass", of_another_micro_batch), seen=LAYERS,
    ),
    Bug(
        kind="swapped send", name="another rank's", plans=("stages",),
        plant=function(Pipeline, "neighbour", another_place), seen=LAYERS,
    ),
    Bug(
        kind="master-weight skew", name="one rank rounds its own", plans=("dp", "zero3", "stages", "stages zero"),
        plant=update(register_optimizer_step_post_hook, rounded, only="rank 1"), seen="blocks.",
    ),
)  # fmt: skip

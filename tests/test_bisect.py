"""`verify(..., bisect=True)`: nothing is found in right programs; in wrong ones the very line is."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from autopar import api
from autopar.cost_model.clusters import load_cluster
from autopar.ir.graph import Phase
from autopar.ir.layout import parse_layout
from autopar.ir.options import Options
from autopar.ir.program import Source
from autopar.runtime.watch import aligned, missing
from autopar.verification.bisect import Bisection, Difference, assembled
from tests.codegen.hand import mesh
from tests.models import NAMES
from tests.test_verify import DEFAULT, KINDS, captured


@lru_cache(maxsize=4)
def planned(name: str, kind: str, ranks: int, precision: str = "fp64"):
    model, batch, graph = captured(name, precision)
    options = Options(pins=KINDS[kind](ranks), precision=precision)
    plan = api.plan_captured(graph, load_cluster(f"rtx3090:{ranks}"), options=options)
    return model, batch, graph, plan, api.emit_captured(graph, plan)


def bisected(name: str, kind: str, ranks: int, text: str | None = None, precision: str = "fp64") -> Bisection:
    model, batch, graph, plan, source = planned(name, kind, ranks, precision)
    return api.bisect_source(graph, plan, source if text is None else replace(source, text=text), model, batch)


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize(("name", "kind"), [("mlp", "2x2"), ("tower", "zero3"), ("convnet", "dp"), ("llama", "2x2")])
def test_right_programs(name: str, kind: str, precision: str) -> None:
    found = bisected(name, kind, DEFAULT[kind], precision=precision)
    assert found.first is None, str(found)
    assert found.compared > 50


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("kind", DEFAULT)
@pytest.mark.parametrize("name", NAMES)
def test_right_programs_everywhere(name: str, kind: str, precision: str) -> None:
    assert bisected(name, kind, DEFAULT[kind], precision=precision).first is None


def edited(text: str, function: str, line: str, instead: str) -> tuple[str, int]:
    """(text with the first line like `line` in a function like `function` replaced, its number)."""
    inside = ""
    rows = text.splitlines()
    for number, row in enumerate(rows):
        header = re.match(r"def (\w+)\(", row)
        inside = header.group(1) if header else inside
        if re.fullmatch(function, inside) and re.search(line, row):
            rows[number] = re.sub(line, instead, row, count=1)
            assert rows[number] != row
            return "\n".join(rows) + "\n", number + 1
    raise AssertionError(f"nothing like {line} in {function}")


FAULTS = {
    # name: (model, plan, function, line, instead, op, module of the instance, phase)
    "a sum not reduced, folded block": (
        "tower", "2x2", r"Residual\w+_forward", r'rt\.reduce_scatter\((\w+), "tp", 1\)', r'rt.slice(\1, "tp", 1)',
        "reduce_scatter(tp, 1) for aten.add.Tensor", "layers.1", Phase.FORWARD,
    ),
    "a wrong argument, folded block": (
        "tower", "2x2", r"Residual\w+_forward", r"aten\.gelu\.default\((\w+)\)",
        r'aten.gelu.default(\1, approximate="tanh")', "aten.gelu.default", "layers.1", Phase.FORWARD,
    ),
    "one instance of a block": (
        "tower", "zero3", r"Residual\w+_forward", r"aten\.gelu\.default\((\w+)\)",
        r"aten.gelu.default(\1 * (1 + (i == 2)))", "aten.gelu.default", "layers.3", Phase.FORWARD,
    ),
    "a wrong slice": (
        "tower", "2x2", "forward", r'rt\.slice\((\w+), "tp", 1\)', r'rt.slice(\1.flip(1), "tp", 1)',
        "slice(tp, 1) for aten.add.Tensor", "layers.0", Phase.FORWARD,
    ),
    "a wrong op, backward of a folded block": (
        "tower", "2x2", r"Residual\w+_backward", r"aten\.gelu_backward\.default\((\w+), (\w+)\)",
        r"aten.gelu_backward.default(\1, \2 * 1.01)", "aten.gelu_backward.default", "layers.3", Phase.BACKWARD,
    ),
    "a gradient scaled": (
        "tower", "2x2", r"Residual\w+_backward", r"mm_1 = aten\.mm\.default\((\w+), (\w+)\)",
        r"mm_1 = aten.mm.default(\1, \2) * 0.5", "aten.mm.default", "layers.3.fc2", Phase.BACKWARD,
    ),
    "a gradient not reduced": (
        "tower", "2x2", r"Residual\w+_backward", r'mm_1_dpR = rt\.all_reduce\(mm_1, "dp"\)', "mm_1_dpR = mm_1.clone()",
        "all_reduce(dp) for aten.mm.default", "layers.3", Phase.BACKWARD,
    ),
    "the embedding": (
        "gpt2", "2x2", "forward", r"embedding = (\S+)\((.*)(\w+), (\w+)\)  #", r"embedding = \1(\2\3, \4.flip(0))  #",
        "aten.embedding.default", "transformer.wte", Phase.FORWARD,
    ),
    "the loss": (
        "gpt2", "zero3", "forward", r"= aten\.neg\.default\((\w+)\)", r"= aten.neg.default(\1) * 1.01",
        "aten.neg.default", "", Phase.FORWARD,
    ),
    "the loss not reduced": (
        "gpt2", "zero3", "forward", r'rt\.all_reduce\((sum_\d+), "dp"\)', r"(\1 * rt.size('dp'))",
        "all_reduce(dp) for", "", Phase.FORWARD,
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_very_line(fault: str) -> None:
    name, kind, function, line, instead, op, module, phase = FAULTS[fault]
    source: Source = planned(name, kind, DEFAULT[kind])[-1]
    text, number = edited(source.text, function, line, instead)
    first = bisected(name, kind, DEFAULT[kind], text).first
    assert first is not None
    assert (first.line, first.phase) == (number, phase), str(first)
    assert first.op.startswith(op), first.op
    assert first.module_path.startswith(module), first.module_path
    assert re.search(r"\.py:\d+$", first.source), first.source
    assert first.wrong_itself and "this op is wrong" in str(first)
    assert first.layout == str(parse_layout(first.layout, api.mesh_of(planned(name, kind, DEFAULT[kind])[3])))


def test_one_replica() -> None:
    """A wrong value on some ranks only: they are named."""
    *_, source = planned("tower", "2x2", 4)
    text, number = edited(
        source.text, "forward", r"= aten\.gelu\.default\((\w+)\)", r"= aten.gelu.default(\1 * (1 + (rt.rank == 3)))"
    )
    first = bisected("tower", "2x2", 4, text).first
    assert first is not None and first.line == number
    assert 3 in first.ranks


def test_inputs_already_wrong() -> None:
    """Saved tensors handed over in the wrong order: the op that reads them is right, what it reads is not."""
    *_, source = planned("tower", "2x2", 4)
    text, _ = edited(
        source.text, r"Residual\w+_backward", r"\[gelu, addmm, (.*)\] = saved", r"[addmm, gelu, \1] = saved"
    )
    first = bisected("tower", "2x2", 4, text).first
    assert first is not None
    assert not first.wrong_itself
    assert {name for name, _ in first.inputs} & {"gelu", "addmm"}
    assert "not what was made before" in str(first)
    assert first.module_path.startswith("layers.3") and first.phase is Phase.BACKWARD


def test_a_line_that_is_gone() -> None:
    """The line is deleted and its readers take what was there before: the first reader is named, and the line."""
    *_, source = planned("gpt2", "zero3", 3)
    found = re.search(r'\n    (sum_\d+_dpR) = rt\.all_reduce\((sum_\d+), "dp"\).*', source.text)
    assert found is not None
    after, before = found.groups()
    text = source.text.replace(f"{found.group()}\n    del {before}", "").replace(after, before)
    result = bisected("gpt2", "zero3", 3, text)
    assert result.first is not None
    assert any(after in line for line in result.missing)
    assert "lacks" in str(result)


def test_memory_before_it_is_filled() -> None:
    """What an op leaves in fresh memory is no value; what is written over it is."""
    from autopar.verification.bisect import _without_content

    assert all(map(_without_content, ("aten.new_empty.default", "aten.empty_like.default", "aten.empty.memory_format")))
    assert not any(map(_without_content, ("aten.new_zeros.default", "aten.mm.default", "autopar.block")))
    found = bisected("deepseek_v3", "tp", 2)
    assert found.first is None, str(found)
    assert found.drawn > 0


def test_lines_of_an_edited_text() -> None:
    *_, source = planned("tower", "2x2", 4)
    assert aligned(source, source.text) == source.made
    rows = source.text.splitlines()
    at = min(source.made)
    moved = aligned(source, "\n".join([*rows[: at - 1], "    print('here')", *rows[at - 1 :]]) + "\n")
    assert [moved[line + 1] for line in source.made] == list(source.made.values())
    gone = "\n".join([*rows[: at - 1], *rows[at:]])
    assert missing(source, gone) == (f"  line {at}: {rows[at - 1].split('  # ')[0].strip()}",)


def test_verify_with_bisection() -> None:
    model, batch, graph, plan, source = planned("tower", "2x2", 4)
    report = api.verify(model, batch, plan=plan, captured=graph, bisect=True)
    assert report.ok and report.bisection is not None and report.bisection.first is None
    text, _ = edited(source.text, r"Residual\w+_backward", r"aten\.gelu_backward\.default\((.*?)\)", r"(\g<0> * 2)")
    report = api.verify_source(graph, plan, replace(source, text=text), model, batch, bisect=True)
    assert not report.ok
    assert any(row.name.startswith("gradient of") and not row.ok for row in report.rows)
    assert "first wrong op: aten.gelu_backward.default in the backward of layers.3" in str(report)


def test_what_goes_wrong_outside_the_program() -> None:
    """A gradient that is left out where the backward returns: every op is right, and the report says so."""
    model, batch, graph, plan, source = planned("mlp", "2x2", 4)
    text, _ = edited(source.text, "backward", r"gradients\[2\] = (\w+)", r"gradients[2] = \1 * 3")
    report = api.verify_source(graph, plan, replace(source, text=text), model, batch, bisect=True)
    assert not report.ok and report.bisection is not None
    assert report.bisection.first is None
    assert "differs all the same" in str(report)


@pytest.mark.parametrize("text", ["dp:S(0) tp:S(1)", "dp:S(1) tp:S(1)", "dp:P tp:S(0)", "dp:R tp:P", "dp:R tp:R"])
def test_pieces_are_joined(text: str) -> None:
    on = mesh(dp=2, tp=3)
    layout = parse_layout(text, on)
    whole = torch.randn(12, 12, dtype=torch.float64)
    pieces = []
    for rank in range(on.size):
        piece = whole
        for axis, at, placement in zip(on.axes, on.coordinate(rank), layout.placements, strict=True):
            if placement.dim >= 0:
                piece = piece.chunk(axis.size, placement.dim)[at]
        pieces.append(piece)
    summands = 1
    for axis, placement in zip(on.axes, layout.placements, strict=True):
        summands *= axis.size if placement.kind.value == "P" else 1
    found = list(assembled(layout, [p / summands for p in pieces], on))
    assert sorted(r for ranks, _ in found for r in ranks) == list(range(6))
    for _, joined in found:
        assert torch.allclose(joined, whole, rtol=1e-14)


def test_a_difference_reads_well() -> None:
    first = Difference(
        phase=Phase.FORWARD, op="aten.mm.default", module_path="layers.1.fc1", source="model.py:12", line=7,
        text="mm = aten.mm.default(x, w)", function="layer_forward", value="mm", layout="dp:S(0)", ranks=(1,),
        error=0.25, tolerance=1e-10, inputs=(), right_for_inputs=False,
    )  # fmt: skip
    assert str(first).splitlines() == [
        "first wrong op: aten.mm.default in the forward of layers.1.fc1",
        "  model line    model.py:12",
        "  emitted line  7 (layer_forward): mm = aten.mm.default(x, w)",
        "  result        mm dp:S(0): error 2.5e-01 (tolerance 1e-10) on ranks 1",
        "  its inputs are right: this op is wrong",
    ]

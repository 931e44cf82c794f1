"""The usual wrong variants of rows whose own tests could otherwise only pass: planted, and seen.

CAP rows: in the emitted text, or as a model that decides once what its batches decide. OP rows: a wrong rule beside the
right ones, and the row's own check must name it; or what ranks do with two axes, in the other order.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import api
from autopar.ir.graph import Node
from autopar.ir.layout import R, S
from autopar.ir.strategy import Rule
from autopar.ops import TABLE
from autopar.ops.entry import Metas, OpEntry, dims_of
from autopar.verification import compare
from tests.cases import test_cap as cap
from tests.cases import test_op as op
from tests.cases.forced import Function, case, check, grid, line
from tests.cases.run import captured, planned, unequal

# Gradients: parts that are not added, and the wrong parameter's -------------------------------------------------------


def made_by(text: str, name: str) -> re.Match[str]:
    """The line of emitted code that makes a tensor: groups are the function and its arguments."""
    found = [*re.finditer(rf"^    (?:\w+, )*{name}(?:, \w+)* = ([\w.]+)\((.*?)\)  #", text, flags=re.MULTILINE)]
    assert found, f"nothing makes {name}"
    return found[-1]


def with_one_part(text: str, name: str) -> Iterator[str]:
    """The emitted text with one summand alone in place of each sum that a gradient is made of."""
    at = made_by(text, name)
    function, (first, *rest) = at[1], at[2].split(", ")
    if function == "aten.add.Tensor":
        for part in (first, rest[0]):
            yield text[: at.start()] + f"    {name} = {part}.clone()  #" + text[at.end() :]
    if function == "aten.add.Tensor" or function.startswith("rt.") or "reshape" in function:
        for part in (first, *rest[:1]) if function == "aten.add.Tensor" else (first,):
            yield from with_one_part(text, part)


def differing(model: nn.Module, inputs: Any, graph: Any, plan: Any, source: Any, text: str) -> set[str]:
    """Names of what differs from one device under another text."""
    report = api.verify_source(graph, plan, replace(source, text=text), model, inputs)
    return {row.name for row in report.rows if not row.ok}


ONE_TENSOR: dict[str, tuple[Callable[[], nn.Module], Any, str, int]] = {
    "CAP-05": (cap.TinyLM, {"ids": cap.ids()}, "embed.weight", 2),
    "CAP-07": (cap.Shared, (unequal(6, 6),), "student.weight", 2),
    "CAP-27": (cap.OneNorm, (unequal(6, 6),), "norms.0.weight", 4),
}


@pytest.mark.parametrize("row", ONE_TENSOR)
def test_a_part_of_a_shared_tensors_gradient(row: str) -> None:
    """Each use's own part is wrong, also the sum of two of three."""
    make, inputs, name, variants = ONE_TENSOR[row]
    torch.manual_seed(0)
    model = make().double()
    graph = captured(model, inputs)
    plan = planned(graph, 3, {"dp": 3})
    source = api.emit_captured(graph, plan)
    number = [p.name for p in graph.parameters].index(name)
    made = re.search(rf"^    gradients\[{number}\] = (\w+)$", source.text, flags=re.MULTILINE)
    assert made and not differing(model, inputs, graph, plan, source, source.text)
    found = [*with_one_part(source.text, made[1])]
    assert len(found) == variants
    for text in found:
        assert f"gradient of {name}" in differing(model, inputs, graph, plan, source, text)


@pytest.mark.parametrize(("kind", "layers", "both"), [("LSTM", 2, True), ("GRU", 1, True), ("RNN", 2, False)])
def test_cap18_gradients_in_another_order(kind: str, layers: int, both: bool) -> None:
    """A list of gradients that does not match the parameters: any two of one shape exchanged, where they differ."""
    torch.manual_seed(0)
    model, inputs = cap.Recurrent(kind, layers, both).double(), (unequal(6, 3, 4),)
    graph = captured(model, inputs)
    plan = planned(graph, 2, {"dp": 2, "zero": 0})
    source = api.emit_captured(graph, plan)
    model(*inputs).backward()
    of = dict(model.named_parameters())
    names = [p.name for p in graph.parameters]
    pairs = [(a, b) for k, a in enumerate(names) for b in names[k + 1 :] if of[a].shape == of[b].shape]
    model.zero_grad()
    exchanged = 0
    for a, b in pairs[:: max(1, len(pairs) // 5)]:
        i, j = f"gradients[{names.index(a)}] =", f"gradients[{names.index(b)}] ="
        if plan.parameters[a].layout == plan.parameters[b].layout and not _alike(a, b, kind):
            text = source.text.replace(i, "gradients[-1] =").replace(j, i).replace("gradients[-1] =", j)
            assert {f"gradient of {a}", f"gradient of {b}"} <= differing(model, inputs, graph, plan, source, text)
            exchanged += 1
    assert exchanged > 1


def _alike(a: str, b: str, kind: str) -> bool:
    """Both biases of a cell are only ever added to each other, but for the GRU's."""
    return kind != "GRU" and a.replace("bias_ih", "bias_hh") == b


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_cap19_the_derivative_of_the_forward(ranks: int) -> None:
    """In place of the user's backward: 2 for 7, in the emitted text."""
    model, x = cap.Custom().double(), unequal(6)
    graph = captured(model, (x,))
    plan = planned(graph, ranks, {"dp": ranks})
    source = api.emit_captured(graph, plan)
    head, tail = source.text.split("def backward")
    assert tail.count(", 7)") == 1
    text = head + "def backward" + tail.replace(", 7)", ", 2)")
    assert "gradient of p" in differing(model, (x,), graph, plan, source, text)


# What a batch decides, decided once -----------------------------------------------------------------------------------


class Taken(cap.Branch):
    """The branch of the first batch, whatever comes."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x)
        return -h if self.first else h


class Routed(cap.Experts):
    """Tokens go where the first batch's went."""

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            rows = self.first[k]
            out = out.index_add(0, rows, expert(x[rows]) * scores[rows, k, None])
        return out


@pytest.mark.parametrize("ranks", [2, 3])
def test_cap11_the_first_batchs_branch(ranks: int) -> None:
    torch.manual_seed(0)
    model, x = cap.Branches().double(), unequal(6, 4)
    frozen = copy.deepcopy(model)
    frozen.branch.__class__, frozen.branch.first = Taken, bool(model.branch.lin(x).sum() > 0)
    make, mesh = cap.on_ranks(frozen, (x,), ranks, {"dp": ranks})
    cap._same_on_batches(model, make, mesh, [(x,)])
    with pytest.raises(AssertionError):
        cap._same_on_batches(model, make, mesh, [(x,), (-3 * x,)])


@pytest.mark.parametrize("ranks", [2, 3])
def test_cap12_the_first_batchs_routing(ranks: int) -> None:
    torch.manual_seed(2)
    model = cap.Mixture().double()
    with torch.no_grad():
        model.moe.router.weight.mul_(4)
    best = [model.moe.router(torch.tanh(model.first(unequal(8, 4, seed=k)))).argmax(-1) for k in range(40)]
    first = next(k for k, b in enumerate(best) if len(b.unique()) == 3)
    other = next(k for k, b in enumerate(best) if len(b.unique()) == 2)
    frozen = copy.deepcopy(model)
    frozen.moe.__class__ = Routed
    frozen.moe.first = [(best[first] == k).nonzero().squeeze(1) for k in range(3)]
    batches = [(unequal(8, 4, seed=k),) for k in (first, other)]
    make, mesh = cap.on_ranks(frozen, batches[0], ranks, {"dp": ranks} if 8 % ranks == 0 else {"tp": ranks})
    cap._same_on_batches(model, make, mesh, batches[:1])
    with pytest.raises(AssertionError):
        cap._same_on_batches(model, make, mesh, batches)


# Wrong rules ----------------------------------------------------------------------------------------------------------

Rules = Callable[[Node, Metas], tuple[Rule, ...]]
ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"


def plant(monkeypatch: pytest.MonkeyPatch, name: str, rules: Rules) -> None:
    """Rules of an op beside those of the table, or beside none where DTensor is asked."""
    entry = TABLE.get(name, OpEntry())
    old = entry.rules or (lambda node, metas: ())
    monkeypatch.setitem(TABLE, name, replace(entry, rules=lambda n, m: (*old(n, m), *rules(n, m))))  # type: ignore[arg-type]


def local_sums(node: Node, metas: Metas) -> tuple[Rule, ...]:
    """Sums over a cut dim are whole: each rank's own statistics, or its own part of a gradient."""
    dims = dims_of(node.args[1], len(metas[0].shape))
    return tuple(Rule((R,), (S(d),)) for d in dims)


def heads_apart(node: Node, metas: Metas) -> tuple[Rule, ...]:
    """Each piece of the query heads beside all key heads: groups counted from the piece's own first head."""
    return (Rule((S(1), S(1)), (S(1), R, R)),)


@pytest.mark.parametrize(("heads", "kv", "width", "ranks"), [(6, 2, 12, 3), (4, 2, 8, 2)])
def test_op15_groups_counted_in_pieces(
    heads: int, kv: int, width: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, ATTENTION, heads_apart)
    torch.manual_seed(0)
    made = case(op.Decoder(width, heads, kv), op.text(), fold_blocks=False, steps=1)
    with pytest.raises(AssertionError, match="flash_attention"):
        check(made, line(ranks, "tp"), only=lambda name: name == ATTENTION)


def test_op15_key_gradients_without_their_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Key heads are whole, queries cut along the sequence; each rank keeps its own part of the keys' gradients."""
    name = ATTENTION.replace(".default", "_backward.default")
    plant(monkeypatch, name, lambda n, m: (Rule((S(2), R, R), (S(2), S(2), R, R, S(2), S(2))),))
    shapes = {"x": (4, 6, 6, 2), "y": (4, 2, 6, 2), "z": (4, 2, 6, 2)}
    function = Function(
        lambda x, y, z: F.scaled_dot_product_attention(x, y, z, enable_gqa=True),
        {n: unequal(*s, seed=i) for i, (n, s) in enumerate(shapes.items())}, {},
    )  # fmt: skip
    with pytest.raises(AssertionError, match="flash_attention"):
        check(case(function, {}, steps=1), line(3), only=lambda op: op == name)


def test_op23_a_batch_that_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution without a rule for the batch: the row's test finds the gather."""
    entry = replace(TABLE["aten.convolution.default"], rules=lambda node, metas: ())
    monkeypatch.setitem(TABLE, "aten.convolution.default", entry)  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        op.test_op23_a_stem_cut_along_the_batch_talks_to_nobody(2)


def test_op26_a_group_cut_by_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 3 ranks 2 of the 3 channels of a group: statistics of the pieces."""
    plant(monkeypatch, "aten.sum.dim_IntList", local_sums)
    x = {"x": unequal(4, 6, 5), "w": unequal(6, seed=1), "b": unequal(6, seed=2)}
    made = case(Function(lambda x, w, b: F.group_norm(x, 2, w, b), x, {}), {}, steps=1)
    with pytest.raises(AssertionError, match="sum"):
        check(made, line(3), only=lambda name: "sum.dim" in name)


@pytest.mark.parametrize("axes", [("free", "cp"), ("dp", "tp")])
def test_op29_a_frozen_norm_beside_gradients_of_pieces(axes: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "aten.sum.dim_IntList", local_sums)
    torch.manual_seed(0)
    model = op.Decoder()
    model.blocks[0].norm1.weight.requires_grad_(False)
    made = case(model, op.text(), fold_blocks=False, steps=1)
    with pytest.raises(AssertionError, match="sum"):
        check(made, grid(*axes), only=lambda name: "sum.dim" in name)


def test_op29_op35_a_frozen_parameter_that_has_a_gradient() -> None:
    """Or a trainable one that has none: each is seen, whatever its value."""
    torch.manual_seed(0)
    frozen = op.Decoder().double()
    free = copy.deepcopy(frozen)
    frozen.blocks[0].norm1.weight.requires_grad_(False)
    one, other = (case(m, op.text(), steps=1).expected for m in (frozen, free))
    for expected, found in ((one, other), (other, one)):
        wrong = {row.name for row in compare(expected, [found], {}).rows if not row.ok}
        assert "gradient of blocks.0.norm1.weight" in wrong


def test_op31_two_axes_in_the_other_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """B's rows cut by the second axis first: A's columns meet the wrong ones."""
    made = case(op.Product(), {"c": op.WEIGHING}, steps=1)
    plans = check(made, grid("free", "tp"))
    strategy = "free:S(1) tp:S(1), free:S(0) tp:S(0) -> free:P tp:P"
    plan = next(p for p in plans if strategy in op.used([p], "aten.mm.default"))
    source = api.emit_captured(made.captured, plan)
    head, tail = source.text.split("\ndef backward", 1)
    product = re.search(r"aten\.mm\.default\((\w+), (\w+)\)", head)
    assert product
    b = product[2]
    turned = f'rt.slice(rt.slice(rt.all_gather(rt.all_gather({b}, "tp", 0), "free", 0), "tp", 0), "free", 0)'
    text = head.replace(product[0], f"aten.mm.default({product[1]}, {turned})") + "\ndef backward" + tail
    wrong = differing(made.model, made.inputs, made.captured, plan, source, text)
    assert "loss of step 1" in wrong


def test_op40_a_permuted_dim_taken_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout of the input given to the output."""
    monkeypatch.setitem(
        TABLE,
        "aten.permute.default",
        OpEntry(rules=lambda n, m: tuple(Rule((S(d),), (S(d),)) for d in range(3))),  # type: ignore[index]
    )
    parameters = {"x": unequal(6, 6, 6), "w": unequal(6, seed=1), "b": unequal(6, seed=2)}

    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.layer_norm(x.permute(1, 2, 0), (6,), w, b).view(6, 6, 3, 2).view(36, 6) * 2

    with pytest.raises(AssertionError, match="permute"):
        check(case(Function(fn, parameters, {}), {}, steps=1), line(2), only=lambda name: "permute" in name)

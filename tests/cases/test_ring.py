"""Attention whose sequence is cut, keys and values going round (`autopar.runtime.ring`): beside one device."""

from __future__ import annotations

import contextlib
import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.codegen import lower
from autopar.cost_model.clusters import load_cluster
from autopar.cost_model.live import ROUND_CPU, program_memory
from autopar.cost_model.op_cost import op_cost
from autopar.cost_model.prices import MeshPrices
from autopar.ir.layout import S
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.options import Options
from autopar.ir.plan import Plan
from autopar.ir.strategy import Rule
from autopar.ops.attention import RING
from autopar.runtime import local_ops, ring
from autopar.runtime.launch import launch
from autopar.runtime.threads import run_threads
from autopar.sharding import RuleCache, one_axis_rules
from tests.cases.forced import Case, _priced, case, check, cover, grid, line, plan_of
from tests.models import tiny
from tests.sharding.truth import check as wrong
from tests.sharding.truth import fits, local_meta, make, strategy_of, with_node_units

ATT = "aten._scaled_dot_product_flash_attention_for_cpu"
CACHE = RuleCache()


def f(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def going_round(node: Any, metas: Any) -> tuple[Rule, ...]:
    return tuple(r for r in one_axis_rules(node, metas, CACHE) if r.tag == RING)


def attention(queries: int, keys: int, groups: int, mask: str, back: bool) -> tuple[Any, Any]:
    """A node and its metas: 2 samples, 2 · groups heads on 2 heads of keys."""
    q, k = f(2, 2 * groups, queries, 4), f(2, 2, keys, 4)
    given = {"attn_mask": f(2, 1, queries, keys)} if mask == "given" else {}
    if back:
        stats = f(2, 2 * groups, queries)
        made = make(ATT + "_backward.default", q, q, k, k, q, stats, 0.0, mask == "causal", **given, scale=0.3)
    else:
        made = make(ATT + ".default", q, k, k, 0.0, mask == "causal", **given, scale=0.3)
    return with_node_units(*made)


@pytest.mark.parametrize("back", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("mask", ["none", "causal", "given"])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(("queries", "ranks"), [(6, 2), (6, 3), (7, 3), (5, 4)], ids=["33", "222", "331", "2210"])
def test_every_piece_is_right(queries: int, ranks: int, groups: int, mask: str, back: bool) -> None:
    """Unequal and empty pieces, more heads of queries than of keys."""
    node, metas = attention(queries, queries, groups, mask, back)
    (rule,) = going_round(node, metas)
    on = line(ranks)
    assert fits(node, metas, (rule,), on)
    assert not wrong(node, metas, strategy_of((rule,), on), on)


def test_more_queries_than_keys() -> None:
    """Not under a causal mask, which would begin in the middle of a block."""
    node, metas = attention(12, 6, 1, "none", back=False)
    (rule,) = going_round(node, metas)
    assert not wrong(node, metas, strategy_of((rule,), line(3)), line(3))
    assert not going_round(*attention(12, 6, 1, "causal", back=False))


def round_a_mesh(on: Mesh, mask: Tensor | None, causal: bool, *tensors: Tensor) -> list[Tensor]:
    """(result, log-sum-exp, gradients of query, key, value) joined, of (query, key, value, gradient) whole."""
    cut = [x.chunk(on.size, 2) for x in tensors]
    length = tensors[1].shape[2]

    def rank(rt: Any) -> list[Tensor]:
        q, k, v, g = (x[rt.rank] for x in cut)
        m = None if mask is None else mask.chunk(on.size, 2)[rt.rank]
        out, lse = local_ops.ring_attention(rt, "free", length, 1, q, k, v, 0.0, causal, attn_mask=m)
        back = local_ops.ring_attention_backward(rt, "free", length, 1, g, q, k, v, out, lse, 0.0, causal, attn_mask=m)
        return [out, lse, *back]

    return [torch.cat(parts, 2) for parts in zip(*run_threads(on, rank), strict=True)]


def on_one_device(mask: Tensor | None, causal: bool, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> list[Tensor]:
    packet = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = packet(q, k, v, 0.0, causal, attn_mask=mask)
    back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return [out, lse, *back(g, q, k, v, out, lse, 0.0, causal, attn_mask=mask)]


def errors(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    """Relative to the largest entry."""
    assert [x.dtype for x in found] == [x.dtype for x in expected]
    pairs = zip(found, expected, strict=True)
    return [float((a.double() - b.double()).abs().max() / b.double().abs().max()) for a, b in pairs]


def drawn(dtype: torch.dtype, heads: int = 4) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    shapes = [(2, heads, 12, 8), (2, 2, 12, 8), (2, 2, 12, 8), (2, heads, 12, 8)]
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes]


@pytest.mark.parametrize("low", [-math.inf, -1e4, -1e9, "least"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_rows_that_are_masked_in_a_block_or_throughout(dtype: torch.dtype, low: float | str) -> None:
    """Where all is masked with -inf torch gives 0; with a number so low that scores vanish beside it, a mean."""
    least = torch.finfo(dtype).min if low == "least" else float(low)
    mask = torch.zeros(2, 1, 12, 12, dtype=dtype)
    mask[0, :, :, :5] = least  # all of the first block and some of the second
    mask[0, :, 3:5] = least
    mask[1, :, 9:, 8:] = least
    tensors = drawn(dtype)
    expected = on_one_device(mask, False, *tensors)
    for ranks in (2, 3):
        assert max(errors(round_a_mesh(line(ranks), mask, False, *tensors), expected)) < (
            1e-12 if dtype == torch.float64 else 2e-6
        )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_of_short_floats_are_made_in_float32(dtype: torch.dtype, causal: bool) -> None:
    """No further from the exact answer than one device is, but for one more rounding of each block's result."""
    tensors = drawn(dtype)
    exact = on_one_device(None, causal, *(x.double() for x in tensors))
    alone = on_one_device(None, causal, *tensors)
    found = round_a_mesh(line(3), None, causal, *tensors)
    unit = torch.finfo(dtype).eps
    mine = [a.double() for a in found]
    for error, beside in zip(errors(mine, exact), errors([a.double() for a in alone], exact), strict=True):
        assert error <= beside + unit


def test_blocks_go_round_one_axis() -> None:
    """With heads cut on the other; a sequence cut twice would be a ring in a ring."""
    from autopar.sharding.expand import Expander

    node, metas = with_node_units(*make(ATT + ".default", *(f(2, 4, 8, 4) for _ in range(3)), 0.0, True))
    outs = tuple(None if o is None else o.meta for o in node.outputs)
    (turns,) = going_round(node, metas)
    heads = next(r for r in one_axis_rules(node, metas, CACHE) if r.inputs[0] == S(1))
    on = grid()
    assert not Expander(on).expand(((turns,), (turns,)), metas, outs)
    (both,) = Expander(on).expand(((turns,), (heads,)), metas, outs)
    assert not wrong(node, metas, both, on)


@pytest.mark.parametrize("back", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("causal", [False, True])
def test_what_is_sent_is_priced_where_nothing_hides_it(causal: bool, back: bool) -> None:
    """The last of 4 ranks, a round's block against a round's transfer: over NVLink and over slow PCIe."""
    heads = tuple(f(2, 8, 4096, 64, dtype=torch.bfloat16) for _ in range(3))
    stats = f(2, 8, 4096, dtype=torch.float32)
    if back:
        made = make(ATT + "_backward.default", heads[0], *heads, heads[0], stats, 0.0, causal)
    else:
        made = make(ATT + ".default", *heads, 0.0, causal)
    node, metas = with_node_units(*made)
    (rule,) = going_round(node, metas)
    on = line(4, "cp")
    strategy = strategy_of((rule,), on)
    pieces = tuple(local_meta(m, x, on) for m, x in zip(metas, strategy.inputs, strict=True))
    values = zip(node.outputs, strategy.outputs, strict=True)
    outs = tuple(None if o is None or x is None else local_meta(o.meta, x, on) for o, x in values)
    exposed = []
    for name in ("dgx-a100-80g:1", "rtx4090:4"):
        cluster = load_cluster(name)
        on = Mesh(axes=(Axis(name="cp", size=4, level=cluster.level_of(4, 1)),))
        block = op_cost(node, pieces, outs, cluster).us
        whole, sent = MeshPrices(cluster, on).op_us(node, strategy, pieces, outs)
        rounds = [1, *[2 if causal else 1] * 3]
        assert whole == pytest.approx(sum(rounds) * block)
        link = cluster.levels[on.axes[0].level]
        blocks = 2 * pieces[-1 if not back else 2].nbytes
        turns = [blocks] * 3 if not back else [blocks, 3 * blocks, 3 * blocks, 2 * blocks, 2 * blocks]
        times = [link.latency_us + n / link.bytes_per_us for n in turns]
        assert sent == pytest.approx(sum(max(0.0, t - n * block) for t, n in zip(times, [*rounds, 0], strict=False)))
        exposed.append(sent)
    assert exposed[0] < exposed[1] and (back or exposed[0] == 0)


FAULTS = ("another block than came", "the mask of another block", "later keys seen", "not joined", "gradients lost")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_ring_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that never fails proves nothing."""
    causal = fault != FAULTS[1]
    mask = None if causal else torch.zeros(2, 1, 12, 12, dtype=torch.float64).index_fill_(3, torch.arange(5), -1.0)
    tensors = drawn(torch.float64)
    expected = on_one_device(mask, causal, *tensors)
    assert max(errors(round_a_mesh(line(3), mask, causal, *tensors), expected)) < 1e-12
    match fault:
        case "another block than came":
            monkeypatch.setattr("autopar.runtime.comm.Communicator.beside", lambda rt, axis: (
                (rt.rank + 1) % 3, (rt.rank - 1) % 3))  # fmt: skip
        case "the mask of another block":
            of = ring._of_keys
            monkeypatch.setattr(ring, "_of_keys", lambda m, rows, keys: of(m, ring.Piece(0, rows.length), keys))
        case "later keys seen":
            monkeypatch.setattr(ring, "_has_work", lambda query, rows, later, causal: True)
        case "not joined":
            monkeypatch.setattr(ring, "_weight", lambda part, most: torch.ones_like(part))
        case _:
            add = Tensor.add_
            monkeypatch.setattr(Tensor, "add_", lambda x, y, **k: x if x.dim() == 4 and x.shape[1] == 2 else add(x, y))
    assert max(errors(round_a_mesh(line(3), mask, causal, *tensors), expected)) > 1e-3


class Decoder(nn.Module):
    """One layer of causal attention, 4 heads on 2, between a sequence's sums; torch's own grouped heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: (B, S, 16), y: (B, S, 8) -> loss ()."""
        q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, 2, 4)).unbind(2)
        h = nn.functional.scaled_dot_product_attention(
            q, k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        return nn.functional.mse_loss(self.out(h.transpose(1, 2).flatten(2)), y)


def decoder(length: int) -> Case:
    torch.manual_seed(0)
    return case(Decoder(), {"x": torch.randn(2, length, 16), "y": torch.randn(2, length, 8)}, steps=2)


def model(name: str, length: int, **inputs: Any) -> Case:
    """A tiny model on sequences of another length, without a mask but the causal one."""
    made, _ = tiny(name)
    ids = torch.randint(0, 96, (2, length), generator=torch.Generator().manual_seed(2))
    return case(made, {"input_ids": ids, "labels": ids, "use_cache": False, **inputs}, steps=1)


def rings(plans: list[Plan]) -> int:
    """Ops that pass blocks on."""
    return sum(RING in s.tags for plan in plans for ops in plan.strategies.values() for s in ops.values())


def is_attention(op: str) -> bool:
    return op.startswith(ATT)


@pytest.mark.parametrize("on", [line(2, "cp"), line(3, "cp"), grid("cp", "tp")], ids=str)
def test_a_decoder_with_grouped_heads(on: Mesh) -> None:
    """Every strategy of attention, of 12 places and of 7; pieces of the 7: 4 3, 3 3 1."""
    for length in (12, 7):
        assert rings(check(decoder(length), on, only=is_attention)) >= 2


@pytest.mark.parametrize(("name", "length", "ranks"), [("gpt2", 11, 3), ("llama", 11, 2)])
def test_tiny_models(name: str, length: int, ranks: int) -> None:
    assert rings(check(model(name, length), line(ranks, "cp"), only=is_attention)) >= 2


LONG = 384
"""Places of a sequence whose blocks weigh something."""


def plan_with_rings(of: Case, on: Mesh) -> Plan:
    table, priced = _priced(of, on, RuleCache(), {})
    plans = (plan_of(of, table, priced, forced.choice) for forced in cover(priced, is_attention))
    return next(plan for plan in plans if rings([plan]) == 2)


def trained_beside_others(ranks: int = 2) -> tuple[float, list[Tensor], int]:
    """On a real rank: the loss and gradients of a step, and the most bytes held in one."""
    of = decoder(LONG)
    plan = plan_with_rings(of, line(ranks, "cp"))
    module = autopar.compile(of.model, plan=plan, example_inputs=of.inputs, options=Options(precision="fp64"))
    optimizer = torch.optim.AdamW(module.parameters())
    module.measure(steps=1)
    for _ in range(4):
        out = module(**of.inputs)
        out.backward()
        optimizer.step()
        found = out.item(), [p.grad.full_tensor() for p in module.parameters()]
        optimizer.zero_grad()
    with contextlib.redirect_stdout(io.StringIO()):
        return *found, module.report().measured_bytes


@pytest.mark.ranks
@pytest.mark.timeout(100)
def test_two_processes() -> None:
    """Same numbers; as many bytes as predicted, the ring's own among them."""
    of = decoder(LONG)
    loss, gradients, held = launch(trained_beside_others, 2, timeout_s=80)
    model, optimizer = of.model, torch.optim.AdamW(of.model.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        expected = model(**of.inputs)
        expected.backward()
        optimizer.step()
    assert loss == pytest.approx(expected.item(), rel=1e-10)
    for found, p in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(found, p.grad, rtol=1e-10, atol=1e-12)
    program = lower(of.captured, plan_with_rings(of, line(2, "cp")))
    said = program_memory(of.captured, program, 16, rounding=ROUND_CPU, gpus=False).peak_bytes
    assert 0.95 * said < held < 1.01 * said


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "bert"])
def test_tiny_models_with_masks(name: str, ranks: int) -> None:
    assert rings(check(case(*tiny(name), steps=1), line(ranks, "cp"), only=is_attention)) >= 2


def test_a_mask_that_is_given() -> None:
    """Padding and causality in one, cut along queries."""
    assert rings(check(case(*tiny("llama"), steps=1), line(3, "cp"), only=is_attention)) >= 2

"""NUM rows of the field cases: it runs, and the numbers are those of one process."""

from __future__ import annotations

import copy
import itertools
import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dispatch import found_inf_reduce_handler

from autopar import api, launch
from autopar.cost_model import build
from autopar.ir.plan import Plan, decode_plan, mesh_of
from autopar.runtime.comm import Alone
from autopar.runtime.groups import communicator, init_ranks
from autopar.runtime.module import ParallelModule
from autopar.runtime.spread_numbers import serve_whole_numbers
from autopar.runtime.torch_private import op_handlers
from tests.cases.lm import TinyLM, text
from tests.cases.run import RANKS, agree, captured, gradients, on_ranks, planned, same_everywhere, strategies, unequal

MIXED = {"tp": 2, "dp2tp2": 4}
"""Strategies with a rank count under which some gradients are cut and others whole."""


def lm(**more: Any) -> TinyLM:
    torch.manual_seed(0)
    return TinyLM(**more)


def ignoring(batch: dict[str, Tensor], rows: slice, columns: slice = slice(None)) -> dict[str, Tensor]:
    """The batch with these labels ignored."""
    labels = batch["labels"].clone()
    labels[rows, columns] = -100
    return {**batch, "labels": labels}


# ---- NUM-01: accumulation in the user's loop


def uneven_batches() -> list[dict[str, Tensor]]:
    """Two micro-batches of 12 rows with 7 and 2 valid labels."""
    found = []
    for seed, valid in ((1, 7), (2, 2)):
        g = torch.Generator().manual_seed(seed)
        labels = torch.full((12, 12), -100)
        labels.view(-1)[torch.randperm(144, generator=g)[:valid]] = torch.randint(0, 24, (valid,), generator=g)
        found.append({"ids": text(seed=seed)["ids"], "labels": labels})
    return found


def accumulated(module: nn.Module) -> dict[str, Tensor]:
    """Gradients of the sum of losses over all valid labels, one micro-batch after the other."""
    batches = uneven_batches()
    total = sum(int((b["labels"] != -100).sum()) for b in batches)
    for batch in batches:
        (module(**batch) / total).backward()
    return gradients(module)


def test_num01_accumulation_weighs_tokens_alike() -> None:
    model = lm(reduction="sum").double()
    graph = captured(model, uneven_batches()[0])
    whole = {k: torch.cat([b[k] for b in uneven_batches()]) for k in ("ids", "labels")}
    one = lm(reduction="mean").double()
    one(**whole).backward()
    wanted = gradients(one)
    for n in RANKS:
        for pins in strategies(n).values():
            for found in on_ranks(graph, planned(graph, n, pins), model, accumulated):
                agree(found, wanted)
    averaged = lm(reduction="mean").double()  # the usual wrong variant: the average of averages
    for batch in uneven_batches():
        (averaged(**batch) / 2).backward()
    with pytest.raises(AssertionError):
        agree(gradients(averaged), wanted, 0.1)


# ---- NUM-03: shards without labels


def test_num03_a_shard_without_labels() -> None:
    rows = ignoring(text(rows=12), slice(0, 6))
    columns = ignoring(text(rows=12, seed=3), slice(None), slice(0, 6))
    assert all(bool((b["labels"] == -100).any()) for b in (rows, columns))
    for batch, cut in ((rows, "dp"), (columns, "cp")):
        for precision, ranks in (("fp64", (2, 3, 4)), ("fp32", (3,))):
            same_everywhere(lm(), batch, ranks, precisions=(precision,), only=lambda name, cut=cut: cut in name)


def test_num03_a_batch_without_labels_is_as_eager() -> None:
    model = lm().double()
    batch = ignoring(text(), slice(None))
    graph = captured(model, batch)
    eager = copy.deepcopy(model)
    loss = eager(**batch)
    loss.backward()
    wanted = {name: g.isnan() for name, g in gradients(eager).items()}
    assert loss.isnan()

    def once(module: ParallelModule) -> tuple[float, dict[str, Tensor]]:
        loss = module(**batch)
        loss.backward()
        return loss.item(), {name: g.isnan() for name, g in gradients(module).items()}

    for n in (1, 3):
        for pins in strategies(n).values():
            for found, nans in on_ranks(graph, planned(graph, n, pins), model, once):
                assert found != found
                assert all(torch.equal(nans[name], w) for name, w in wanted.items())


def test_num03_a_shard_mean_is_seen_to_fail() -> None:
    """Wrong variant: each rank divides by its own count."""
    model, batch = lm().double(), ignoring(text(rows=12), slice(0, 6))
    graph = captured(model, batch)
    plan = planned(graph, 2, {"dp": 2, "zero": 0})
    source = api.emit_captured(graph, plan)
    sums = [line for line in source.text.splitlines() if "= rt.all_reduce(sum_" in line]
    assert len(sums) == 2
    wrong = source.text
    for line in sums:
        left, right = line.split(" = rt.all_reduce(")
        wrong = wrong.replace(line, f"{left} = {right.split(',')[0]}.clone()")
    report = api.verify_source(graph, plan, replace(source, text=wrong), model, batch, steps=1)
    assert not report.ok


# ---- NUM-04: sequence split


def test_num04_sequence_split_equals_batch_split() -> None:
    model, batch = lm(layers=2).double(), text()
    graph = captured(model, batch)
    model_grads = copy.deepcopy(model)
    model_grads(**batch).backward()
    found = [gradients(model_grads)]

    def once(module: ParallelModule) -> dict[str, Tensor]:
        module(**batch).backward()
        return gradients(module)

    for pins in ({"dp": 2, "cp": 2, "tp": 1}, {"dp": 4, "zero": 0}, {"dp": 1, "cp": 4, "tp": 1}):
        found += on_ranks(graph, planned(graph, 4, pins), model, once)
    for i, a in enumerate(found):
        for b in found[:i]:
            agree(a, b)


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_num04_every_strategy(precision: str) -> None:
    same_everywhere(lm(tie=True, offset=3.0), text(), RANKS if precision == "fp64" else (3,), precisions=(precision,))


# ---- NUM-06, 09, 10, 12, 22, 24: the user's own loop on gloo ranks

NORMS = [(p, each) for p in (2.0, 1.0, float("inf")) for each in (None, False, True)]


def spread(model: nn.Module, graph: Any, plan: Plan) -> ParallelModule:
    """The model on this process's rank."""
    mesh = mesh_of(plan)
    rt = communicator(mesh) if mesh.size > 1 else Alone(mesh, torch.device("cpu"))
    return ParallelModule(graph, plan, api.emit_captured(graph, plan), model, rt)


def tied() -> nn.Module:
    """Tied embedding and head, and a per-head parameter whose gradient is dominant."""
    return lm(tie=True, offset=100.0).double()


def batches() -> list[dict[str, Tensor]]:
    return [text(seed=s) for s in range(3)]


def backward(module: nn.Module, extra: nn.Parameter) -> None:
    """Three accumulated backwards, and a gradient of the user's own plain parameter."""
    for batch in batches():
        module(**batch).backward()
    extra.grad = torch.tensor([0.5, -2.0, 1.0], dtype=torch.float64)


def clipped(module: nn.Module, own: bool, norms: list[Any]) -> list[tuple[float, dict[str, Tensor]]]:
    """(norm, gradients) after one clipping of three accumulated backwards, for each norm.

    `own`: beside a plain parameter of the user's.
    """
    found = []
    extra = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    backward(module, extra)
    kept = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
    for order, each in norms:
        for p, g in zip(module.parameters(), kept, strict=True):
            p.grad = None if g is None else g.clone()
        extra.grad = torch.tensor([0.5, -2.0, 1.0], dtype=torch.float64)
        listed = [*module.parameters(), *([extra] if own else [])]
        norm = torch.nn.utils.clip_grad_norm_(listed, 0.1, norm_type=order, foreach=each, error_if_nonfinite=True)
        assert type(norm) is Tensor
        found.append((float(norm), {**gradients(module), "extra": extra.grad.clone() if own else torch.zeros(3)}))
    module.zero_grad()
    return found


def clip_alike(module: nn.Module, plain: nn.Module, norms: list[Any]) -> None:
    for own in (False, True):
        for (norm, after), (wanted, wanted_after) in zip(
            clipped(module, own, norms), clipped(plain, own, norms), strict=True
        ):
            assert abs(norm - wanted) <= 1e-10 * wanted, (norm, wanted)
            agree(after, wanted_after)


def not_finite(module: ParallelModule) -> None:
    """One entry of one rank's piece is NaN or infinite: every rank is told, whatever the norm."""
    cut = [(n, p) for n, p in module.named_parameters() if all(x.is_shard() for x in p.placements)]
    if not cut:  # a replica's entry alone is no gradient that training makes
        return
    name, spoilt = cut[0]
    for bad, order in ((float("nan"), 2.0), (float("nan"), float("inf")), (float("inf"), float("inf"))):
        module.zero_grad()
        module(**batches()[0]).backward()
        if dist.get_rank() == 1:
            spoilt.grad.to_local().view(-1)[-1] = bad
        with pytest.raises(RuntimeError, match="non-finite"):
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1, norm_type=order, error_if_nonfinite=True)
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1, norm_type=order)
        assert str(float(norm)) == str(bad), (name, bad, order, norm)
    module.zero_grad()


def read_numbers(module: ParallelModule, plain: nn.Module) -> None:
    """What a person prints of parameters: norms, sums, means, largest entries."""
    others = dict(plain.named_parameters())
    with torch.no_grad():
        for name, p in module.named_parameters():
            q = others[name]
            for read in (torch.sum, torch.mean, torch.max, torch.norm, lambda x: x.abs().max()):
                assert abs(read(p).item() - read(q).item()) <= 1e-10 * max(1.0, abs(read(q).item())), name


def first_updates(module: nn.Module) -> list[dict[str, Tensor]]:
    """State after the first AdamW step, and after a step of a new optimizer that loaded its state (NUM-22)."""
    found = []
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(2):
        module(**batches()[0]).backward()
        optimizer.step()
        steps = {float(s["step"]) for s in optimizer.state.values()}
        assert steps == {len(found) + 1.0}
        module.zero_grad()
        state = module.full_state_dict() if isinstance(module, ParallelModule) else module.state_dict()
        found.append({k: v.clone() for k, v in state.items()})
        loaded = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
        loaded.load_state_dict(optimizer.state_dict())
        optimizer = loaded
    return found


def scaled_steps(module: nn.Module) -> list[tuple[float, int]]:
    """(scale, steps taken) after each of three steps; at the second, one rank's piece of a gradient is infinite.

    That gradient comes last, after those that are whole on every rank.
    """

    def is_cut(p: nn.Parameter) -> bool:
        return isinstance(p, DTensor) and any(x.is_shard() for x in p.placements)

    ordered = sorted(module.parameters(), key=is_cut)
    optimizer = torch.optim.SGD(ordered, lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    taken: list[int] = []
    optimizer.register_step_post_hook(lambda *_: taken.append(1))
    found = []
    for step, batch in enumerate(batches()):
        optimizer.zero_grad()
        scaler.scale(module(**batch)).backward()
        grad = ordered[-1].grad
        if step == 1 and not (isinstance(grad, DTensor) and dist.get_rank() != min(1, dist.get_world_size() - 1)):
            (grad.to_local() if isinstance(grad, DTensor) else grad).view(-1)[-1] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        found.append((scaler.get_scale(), len(taken)))
    return found


def ranks_differ(mine: Any) -> bool:
    """True if not all ranks hold the same."""
    all_: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_, mine)
    return any(x != all_[0] for x in all_)


def loop_on_ranks(plans: list[tuple[str, str]]) -> str:
    """The user's own loop under each plan, on gloo ranks."""
    model = tied()
    graph = captured(model, batches()[0])
    for name, written in plans:
        plan = decode_plan(written.encode(), name, Plan)
        module = spread(model, graph, plan)
        mixed = MIXED.get(name) == mesh_of(plan).size
        clip_alike(module, copy.deepcopy(model), NORMS if mixed else NORMS[::3])
        read_numbers(module, model)
        kinds = {p.placements for p in module.parameters() if isinstance(p, DTensor)}
        if mixed:
            assert len(kinds) > 1, (name, kinds)
        if any(any(x.is_shard() for x in k) for k in kinds):
            not_finite(module)
        assert scaled_steps(spread(model, graph, plan)) == [(8.0, 1), (4.0, 1), (4.0, 2)], name
        if mixed:
            wrong = spread(model, graph, plan)
            op_handlers()[torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default] = found_inf_reduce_handler
            assert ranks_differ(scaled_steps(wrong)), "torch's own flag is seen to fail"
            serve_whole_numbers()
        for got, wanted in zip(first_updates(module), first_updates(copy.deepcopy(model)), strict=True):
            agree(got, wanted)
    return "done"


ORDERS = (2, 1, 0.5, 0, math.inf, -math.inf)
READ: dict[str, Any] = {
    "max": lambda x: x.max(), "min": lambda x: x.min(), "amax 0": lambda x: x.amax(0), "amin 1": lambda x: x.amin((1,)),
    "amin -2": lambda x: x.amin(-2, keepdim=True),
}  # fmt: skip
NORMED: dict[str, Any] = {
    **{f"norm {p}": lambda x, p=p: torch.linalg.vector_norm(x, p) for p in ORDERS},
    **{f"norm {p} of dim {d}": lambda x, p=p, d=d: torch.linalg.vector_norm(x, p, d) for p in ORDERS for d in (0, 1)},
    **{f"norms {p}": lambda x, p=p: torch.linalg.vector_norm(x, p, [-1], keepdim=True) for p in ORDERS},
    "norms together": lambda x: torch.stack(torch._foreach_norm([x, x], math.inf)),
}


def read_on_ranks() -> list[str]:
    """What differs from one device's, of numbers read off tensors of which some ranks hold nothing."""
    init_ranks()
    serve_whole_numbers()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wrong = []
    for shape, kind in itertools.product(((2, 3), (5, 4), (1, 2)), (torch.float64, torch.int64, torch.bool)):
        g = torch.Generator().manual_seed(1)
        whole = (torch.randn(shape, generator=g, dtype=torch.float64) * 10).to(kind)
        for place in (Replicate(), Shard(0), Shard(1)):
            x = distribute_tensor(whole, mesh, [place])
            for name, read in {**READ, **(NORMED if kind is torch.float64 else {})}.items():
                found = read(x)
                found = found.full_tensor() if isinstance(found, DTensor) else found
                if found.shape != read(whole).shape or not torch.allclose(found.double(), read(whole).double()):
                    wrong.append(f"{name} of {shape} {kind} cut {place}")
    return wrong


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_num06_09_numbers_of_tensors_that_a_rank_holds_nothing_of(ranks: int) -> None:
    """Seen to fail: torch's own answers; the ranks that hold nothing raise."""
    assert launch(read_on_ranks, ranks, timeout_s=100) == []


@pytest.mark.ranks
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (2, ("tp", "dp")),
        (3, ("zero3", "cp")),
        *(pytest.param(n, None, marks=pytest.mark.slow) for n in RANKS),
    ],
)
def test_num06_09_10_12_22_24_users_own_loop(ranks: int, names: tuple[str, ...] | None) -> None:
    """`names`: of strategies, None for all of that many ranks."""
    graph = captured(tied(), batches()[0])
    plans = [
        (name, planned(graph, ranks, pins).to_json().decode())
        for name, pins in strategies(ranks).items()
        if names is None or name in names
    ]
    assert launch(loop_on_ranks, ranks, (plans,), timeout_s=150) == "done"


# ---- NUM-21: half precision with float32 parameters


class Summing(nn.Module):
    """A matrix, a norm and a table: every gradient is the sum of the rows' weights."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.matrix = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.table = nn.Embedding(width, width)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """x: (B, d), a row's weight in each column; ids: (B,), all 0 -> loss ()."""
        weight = x[:, :1]
        steps = torch.arange(x.shape[1], device=x.device).to(x.dtype).expand(x.shape)
        return self.matrix(x).sum() + (self.norm(steps) * weight).sum() + (self.table(ids) * weight).sum()


def narrow_reductions(text_: str) -> list[str]:
    """Lines that reduce a bfloat16 value which is then only viewed and widened."""
    found = []
    lines = text_.splitlines()
    for k, line in enumerate(lines):
        made = re.match(r"\s+(\w+) = rt\.(?:all_reduce|reduce_scatter)\(.*# bfloat16", line)
        names = {made.group(1)} if made else set()
        for later in lines[k + 1 :] if made else ():
            if later.startswith("def "):
                break
            call = re.match(r"\s+(\w+) = ([\w.]+)\((\w+)\b(.*)", later)
            if call and call.group(3) in names:
                if "_to_copy" in call.group(2) and "dtype=torch.float32" in call.group(4):
                    found.append(line.strip())
                if re.search("reshape|view|aten.t|transpose|embedding_dense", call.group(2)):
                    names.add(call.group(1))
    return found


def summed_entries(module: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    """What is the sum of the rows' weights in the gradients of `Summing`."""
    module(**batch).backward()
    grads = gradients(module)
    return [grads["matrix.weight"], grads["table.weight"][0], grads["norm.bias"]]


def test_num21_gradients_are_reduced_in_the_wide_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 from one rank, 2⁻⁹ from each other. Seen to fail: pending sums reduced before the cast (1.0)."""
    for ranks in (2, 3, 4):
        x = torch.full((ranks, 12), 2.0**-9)
        x[0] = 1
        model, batch = Summing(), {"x": x, "ids": torch.zeros(ranks, dtype=torch.int64)}
        graph = captured(model, batch, "bf16")

        def exact(pins: dict[str, int], graph: Any = graph, model: Any = model, batch: Any = batch) -> bool:
            plan = planned(graph, mesh_size(pins), pins, "bf16")
            found = on_ranks(graph, plan, model, lambda module: summed_entries(module, batch))
            right = all((part == batch["x"][:, 0].sum()).all() for entries in found for part in entries)
            assert right == (not narrow_reductions(api.emit_captured(graph, plan).text))
            return right

        for name in ("dp", "zero3"):
            assert exact(strategies(ranks)[name]), (name, ranks)
            with monkeypatch.context() as wrong:
                wrong.setattr(build, "waiting_sums", lambda *_: frozenset())
                assert not exact(strategies(ranks)[name])


def mesh_size(pins: dict[str, int]) -> int:
    return math.prod(pins.get(axis, 1) for axis in ("dp", "tp", "cp"))


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        (1, ("2tp", "3zero3", "3cp", "4dp2tp2")),
        (3, ("2dp",)),
        *(pytest.param(n, None, marks=pytest.mark.slow) for n in (1, 3)),
    ],
)
def test_num21_strategies_train_as_one_device(layers: int, names: tuple[str, ...] | None) -> None:
    """Under bf16, tied, folded or not: no gradient is reduced in bfloat16; all are one device's to its rounding."""
    model, batch = lm(layers=layers, tie=True).float(), text()
    graph = captured(model, batch, "bf16")

    def once(module: ParallelModule) -> tuple[float, dict[str, Tensor]]:
        loss = module(**batch)
        loss.backward()
        return loss.item(), gradients(module)

    ((wanted_loss, wanted),) = on_ranks(graph, planned(graph, 1, {}, "bf16"), model, once)
    for ranks in (2, 3, 4):
        for name, pins in strategies(ranks).items():
            if names is not None and f"{ranks}{name}" not in names:
                continue
            plan = planned(graph, ranks, pins, "bf16")
            source = api.emit_captured(graph, plan)
            assert not narrow_reductions(source.text), (pins, narrow_reductions(source.text))
            for loss, found in on_ranks(graph, plan, model, once, source=source):
                assert abs(loss - wanted_loss) <= 2e-2 * wanted_loss
                agree(found, wanted, 2e-2)


def test_num21_a_loss_counts_more_labels_than_half_precision_can() -> None:
    """300 labels, 301 in all on three ranks: in bfloat16 a count ends at 256. Seen to fail: sums in bfloat16."""
    model = nn.Linear(4, 3)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = model

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            """x: (B, 4), y: (B,) -> loss ()."""
            return nn.functional.cross_entropy(0 * self.linear(x), y)

    batch = {"x": unequal(309, 4).float(), "y": torch.arange(309) % 3}
    batch["y"][::40] = -100
    graph = captured(Loss(), batch, "bf16")
    for ranks in (1, 3):
        plan = planned(graph, ranks, {"dp": ranks, "zero": 0}, "bf16")
        sums = re.findall(r"sum\.default\(.*# (\w+)\[\]", api.emit_captured(graph, plan).text)
        assert sums == ["float32", "float32"]
        for loss in on_ranks(graph, plan, Loss(), lambda module: module(**batch).item()):
            assert loss == pytest.approx(math.log(3), rel=2.0**-8)

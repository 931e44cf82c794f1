"""Calls that differ from the captured one, and plain loops, on in-process ranks: other batches, modes, plain values,
one submodule only, two models, losses outside the model.

Rows CAP-04, CAP-14, CAP-28, X-05, USE-06, USE-09 and USE-11 of the field cases: the same steps in plain torch, in
float64, on every rank.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import api
from autopar.cost_model.clusters import load_cluster
from autopar.ir.options import Options
from autopar.ir.plan import mesh_of
from autopar.runtime.comm import Communicator
from autopar.runtime.module import ParallelModule
from autopar.runtime.threads import run_threads
from tests.cases.lm import TinyLM, text
from tests.cases.run import unequal

Compile = Callable[..., ParallelModule]
PLANS: list[tuple[int, dict[str, Any]]] = [(1, {}), (2, {"dp": 2}), (3, {"dp": 3, "zero": 3}), (2, {"tp": 2})]
FOUR: tuple[int, dict[str, Any]] = (4, {"dp": 2, "tp": 2})
spread = pytest.mark.parametrize(
    ("ranks", "pins"),
    [pytest.param(r, p, id=f"{r}{p}", marks=pytest.mark.slow if r == 4 else ()) for r, p in [*PLANS, FOUR]],
)


def on_ranks(ranks: int, pins: dict[str, Any], body: Callable[[Compile], dict[str, Tensor]]) -> None:
    """`body(compile)` in threads, and with the plain model in place of the compiled: all return equal tensors."""
    cluster = load_cluster(f"rtx3090:{ranks}")
    options = Options(pins=pins, precision="fp64", differentiable="all")
    probe = api.search(nn.Linear(12, 12).double(), cluster, example_inputs=(unequal(12, 12),), options=options)

    def rank(rt: Communicator) -> dict[str, Tensor]:
        def compiled(model: nn.Module, *args: Any, **kwargs: Any) -> ParallelModule:
            return api.compile_on(model, lambda plan, source: rt, cluster, args, kwargs, options=options)

        return body(compiled)

    expected = body(lambda model, *args, **kwargs: model)  # type: ignore[arg-type,return-value]
    for found in run_threads(mesh_of(probe), rank, timeout_s=200.0):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            scale = max(float(value.abs().max()) if value.numel() else 0.0, 1e-30)
            assert float((found[name] - value).abs().max()) <= 1e-10 * scale, name


def made(make: Callable[[], nn.Module]) -> nn.Module:
    """The same float64 model in every thread, drawn from a generator of its own.

    torch's is one for all threads, and whoever captures a model puts it back to what it was: drawn from it, 320 of 400
    models differed while another thread captured.
    """
    model, draw = make().double(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    return model


def state(module: nn.Module) -> dict[str, Tensor]:
    whole = module.full_state_dict() if isinstance(module, ParallelModule) else module.state_dict()
    return {name: value.detach().double() for name, value in whole.items()}


@spread
def test_cap14_batches_of_any_size(ranks: int, pins: dict[str, Any]) -> None:
    """8, 4, 1 and 7 rows: the last, smaller batch of an epoch is one of them."""

    def body(compile_: Compile) -> dict[str, Tensor]:
        module = compile_(made(TinyLM), **text(8))
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, eps=1e-4)
        losses = {}
        for step, rows in enumerate((8, 4, 1, 7, 4)):
            loss = module(**text(rows, seed=step + 20 if rows > 1 else 7) if rows > 1 else _one_row())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[f"loss {step}"] = loss.detach().double()
        if isinstance(module, ParallelModule):
            assert module.replans == 3, [str(p) for p in module.plans]
            assert all(p.seconds > 0 for p in module.plans if p.plan is not module.plan)
        return losses | state(module)

    on_ranks(ranks, pins, body)


@spread
def test_cap14_a_smaller_batch_where_a_submodule_runs_as_it_is(ranks: int, pins: dict[str, Any]) -> None:
    """A region between captured parts, dropout that is off, batch norm, and the last batch smaller than the ranks."""

    def body(compile_: Compile) -> dict[str, Tensor]:
        module = compile_(made(Branching), unequal(8, 4))
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-4)
        losses = {}
        for step, rows in enumerate((8, 8, 5, 2, 8)):
            loss = module((-1) ** step * unequal(rows, 4, seed=step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[f"loss {step}"] = loss.detach()
        if isinstance(module, ParallelModule):
            assert module.replans == 2, [str(p) for p in module.plans]
        return losses | state(module)

    on_ranks(ranks, pins, body)


class Branching(nn.Module):
    """Linear, batch norm, a submodule that branches on its input's values, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.turn = Turn()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.turn(self.norm(self.first(x)), x)).pow(2).mean()


class Turn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return self.lin(h) if x.sum() > 0 else torch.tanh(self.lin(-h))


def _one_row() -> dict[str, Tensor]:
    return text(1, seed=5)


@spread
def test_cap14_other_sequence_lengths(ranks: int, pins: dict[str, Any]) -> None:
    def body(compile_: Compile) -> dict[str, Tensor]:
        module = compile_(made(TinyLM), **text(6, 12))
        for seq in (12, 7, 5):
            module(**text(6, seq, seed=seq)).backward()  # gradients add up over calls of different shapes
        torch.optim.SGD(module.parameters(), lr=0.1).step()
        return state(module)

    on_ranks(ranks, pins, body)


class Switched(nn.Module):
    """CAP-04's call: a tensor, an optional mask, a flag and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor, mask: Tensor | None, flag: bool, n: int) -> Tensor:
        h = self.up(x) if flag else self.up(x).tanh()
        if mask is not None:
            h = h * mask
        return (self.down(h) * n).pow(2).mean()


@spread
def test_cap04_plain_values_that_change(ranks: int, pins: dict[str, Any]) -> None:
    def body(compile_: Compile) -> dict[str, Tensor]:
        x, mask = unequal(6, 5), torch.rand(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        module = compile_(made(Switched), x, None, True, 2)
        found = {}
        calls = ((x, None, True, 2), (x, None, False, 3), (x, mask, True, 2), (x, None, True, 2))
        for k, call in enumerate(calls):
            found[f"loss {k}"] = module(*call)
            found[f"loss {k}"].backward()
        torch.optim.SGD(module.parameters(), lr=0.1).step()
        return {name: x.detach() for name, x in found.items()} | state(module)

    on_ranks(ranks, pins, body)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.norm(self.a(x))))


@spread
def test_x05_both_modes(ranks: int, pins: dict[str, Any]) -> None:
    """Batch norm on running statistics after eval(), on the batch's again after train()."""

    def body(compile_: Compile) -> dict[str, Tensor]:
        module = compile_(made(Normed), unequal(6, 4))
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-4)
        found = {}
        for step in range(3):
            module.train()
            module(unequal(6, 4, seed=step)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            module.eval()
            with torch.no_grad():
                found[f"evaluated {step}"] = module(unequal(6, 4, seed=9))
        with torch.inference_mode():
            found["inference"] = module(unequal(6, 4, seed=9)).clone()
        return found | state(module)

    on_ranks(ranks, pins, body)


@spread
def test_x05_dropout_is_off_in_evaluation(ranks: int, pins: dict[str, Any]) -> None:
    """And on again after train(), with new masks; a part of the model may be in another mode. Seen to fail: eval() that
    runs the training program."""

    def body(compile_: Compile) -> dict[str, Tensor]:
        module = compile_(made(lambda: nn.Sequential(nn.Linear(12, 12, bias=False), nn.Dropout(0.5))), unequal(6, 12))
        x, kept = unequal(6, 12), []
        for _ in range(2):
            module.train()
            kept.append(module(x) != 0)
            module.eval()
            found = module(x)
        assert 0.2 < float(kept[0].double().mean()) < 0.8 and not torch.equal(*kept)
        module.train()
        module.get_submodule("1").eval()
        assert bool((module(x) != 0).all())
        return {"evaluated": found.detach()}

    on_ranks(ranks, pins, body)


@spread
def test_cap14_seventeen_samples_by_four(ranks: int, pins: dict[str, Any]) -> None:
    """An exact validation mean: each sample once."""

    def body(compile_: Compile) -> dict[str, Tensor]:
        module = compile_(made(Normed), unequal(6, 4)).eval()
        data = unequal(17, 4, seed=3)
        with torch.no_grad():
            return {"mean": torch.cat([module(part) for part in data.split(4)]).pow(2).mean()}

    on_ranks(ranks, pins, body)


@spread
def test_cap28_two_models_in_one_step(ranks: int, pins: dict[str, Any]) -> None:
    def body(compile_: Compile) -> dict[str, Tensor]:
        generator = made(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)))
        judge = made(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
        g, d = compile_(generator, unequal(6, 4)), compile_(judge, unequal(6, 4))
        of_g, of_d = (torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4) for m in (g, d))
        for step in range(4):
            z, real = unequal(6, 4, seed=step), unequal(6, 4, seed=step + 50)
            of_d.zero_grad()
            (F.softplus(d(g(z).detach())).mean() + F.softplus(-d(real)).mean()).backward()
            of_d.step()
            of_g.zero_grad()
            F.softplus(-d(g(z))).mean().backward()
            of_g.step()
        return {f"g.{k}": v for k, v in state(g).items()} | {f"d.{k}": v for k, v in state(d).items()}

    on_ranks(ranks, pins, body)


class Parts(nn.Module):
    """USE-06: an encoder to be spread, and a decoder full of Python that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.decoder = nn.Linear(4, 4), nn.Linear(3, 2)
        self.encoder: nn.Module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(self.first(x))
        total = h.sum() * 0.0
        for row in range(h.shape[0]):
            if float(h[row].sum().detach()) > 0:
                total = total + self.decoder(h[row]).pow(2).sum()
        return total


@spread
def test_use06_one_submodule(ranks: int, pins: dict[str, Any]) -> None:
    def body(compile_: Compile) -> dict[str, Tensor]:
        model = made(Parts)
        model.encoder = compile_(model.encoder, unequal(6, 4))
        model(unequal(6, 4)).backward()
        outside = {n: p.grad for n, p in model.named_parameters() if not n.startswith("encoder.")}
        torch.optim.SGD(model.encoder.parameters(), lr=0.1).step()
        return {n: g for n, g in outside.items() if g is not None} | state(model.encoder)

    on_ranks(ranks, pins, body)


@spread
@pytest.mark.parametrize("loop", ["loss outside", "closure", "zeros kept", "accumulated", "retained"])
def test_use11_plain_loops(ranks: int, pins: dict[str, Any], loop: str) -> None:
    def body(compile_: Compile) -> dict[str, Tensor]:
        module = compile_(made(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))), unequal(6, 4))
        target = unequal(6, 1, seed=4)
        if loop == "closure":
            optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
        else:
            optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-4)
        for step in range(3):
            x = unequal(6, 4, seed=step)

            def closure(x: Tensor = x) -> Tensor:
                optimizer.zero_grad()
                loss = F.mse_loss(module(x), target)
                loss.backward()
                return loss

            if loop == "closure":
                optimizer.step(closure)
                continue
            optimizer.zero_grad(set_to_none=loop != "zeros kept")
            loss = F.mse_loss(module(x), target)
            if loop == "accumulated":
                (loss + F.mse_loss(module(x * 2), target)).backward()
            loss = F.mse_loss(module(x), target)
            if loop == "retained":
                loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
        return state(module)

    on_ranks(ranks, pins, body)


def test_use09_reading_and_copying_weights() -> None:
    def body(compile_: Compile) -> dict[str, Tensor]:
        model = made(lambda: TinyLM(tie=True))
        count = sum(p.numel() for p in model.parameters())
        module = compile_(model, **text(6))
        average = copy.deepcopy(module)
        module(**text(6)).backward()
        torch.optim.SGD(module.parameters(), lr=0.1).step()
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), module.parameters(), strict=True):
                mine.lerp_(theirs, 0.25)
        if isinstance(module, ParallelModule):
            assert sum(x.numel() for x in {id(p): p for p in module.full_state_dict().values()}.values()) >= count
            torch.save(module.state_dict(), io.BytesIO())
            with pytest.raises(Exception, match="full_state_dict"):
                torch.save(module, io.BytesIO())
            for change in (lambda: module.half(), lambda: module.to(torch.float32)):
                with pytest.raises(Exception, match="dtype"):
                    change()
        return state(average) | {"loss": average(**text(6)).detach()}

    on_ranks(2, {"dp": 2, "zero": 3}, body)

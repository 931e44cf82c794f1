"""AdamW and SGD: torch's results and state; the same bits by every target of the kernels and by PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar import native
from autopar.errors import UserError
from autopar.optim import SGD, AdamW, update
from autopar.runtime.philox import Stream, space

SHAPES = ((), (1,), (3, 5), (7, 1, 11), (129, 77), (5003,), (0, 4))
STEPS = 4

KINDS: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "adamw": (AdamW, torch.optim.AdamW, {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}),
    "adamw maximize": (AdamW, torch.optim.AdamW, {"lr": 3e-3, "weight_decay": 0.0, "maximize": True}),
    "sgd": (SGD, torch.optim.SGD, {"lr": 1e-2, "weight_decay": 0.1}),
    "sgd momentum": (SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
    "sgd nesterov": (SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-2}),
}
CLOSE = {torch.float64: (1e-13, 1e-14), torch.float32: (1e-5, 1e-6), torch.bfloat16: (2**-6, 2**-5)}
"""Relative and absolute. bfloat16: two in the last place, of numbers up to 4."""


def _targets() -> dict[str, native.Kernels | None]:
    made: dict[str, native.Kernels | None] = {"pytorch": None}
    found = native.kernels()
    for target in ("generic", "avx2", "avx512") if found is not None else ():
        try:
            made[target] = native.opened(found.path, target)  # type: ignore[union-attr]
        except ValueError:
            continue
    return made


TARGETS = _targets()


@pytest.fixture(params=sorted(TARGETS))
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Updates are made by one target, or in PyTorch."""
    monkeypatch.setattr(update, "_kernels", lambda: TARGETS[request.param])
    yield request.param


def parameters(dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(s, generator=random, dtype=torch.float64).to(dtype)) for s in shapes]


def give_gradients(held: list[nn.Parameter], turn: int, layout: Callable[[Tensor], Tensor] = lambda g: g) -> None:
    random = torch.Generator().manual_seed(100 + turn)
    for p in held:
        p.grad = layout(torch.randn(p.shape, generator=random, dtype=torch.float64).to(p.dtype))


def train(optimizer: torch.optim.Optimizer, held: list[nn.Parameter], turns: range = range(STEPS), **step: Any) -> None:
    for turn in turns:
        give_gradients(held, turn)
        optimizer.step(**step)


def values(optimizer: torch.optim.Optimizer, held: list[nn.Parameter]) -> list[Tensor]:
    """Parameters and their state."""
    states = [optimizer.state.get(p, {}) for p in held]
    return [*(p.detach() for p in held), *(s[k] for s in states for k in sorted(s) if isinstance(s[k], Tensor))]


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_as_torch(by: str, kind: str, dtype: torch.dtype) -> None:
    mine, theirs, arguments = KINDS[kind]
    held, wanted = parameters(dtype), parameters(dtype)
    one, other = mine(held, **arguments), theirs(wanted, **arguments)
    if theirs is torch.optim.AdamW and dtype is torch.bfloat16:
        other.param_groups[0]["fused"] = True  # else torch rounds after every operation; its fused SGD errs in bfloat16
    train(one, held)
    train(other, wanted)
    rtol, atol = CLOSE[dtype]
    for a, b in zip(values(one, held), values(other, wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16 state": {"state_dtype": torch.bfloat16},
    "bf16 state, stochastic": {"state_dtype": torch.bfloat16, "stochastic_rounding": True, "seed": 3},
    "fp32 state, stochastic": {"state_dtype": torch.float32, "stochastic_rounding": True},
}


@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("kind", ["adamw", "sgd", "sgd momentum", "sgd nesterov"])
def test_the_same_bits_by_every_target(monkeypatch: pytest.MonkeyPatch, kind: str, extras: str) -> None:
    """Odd sizes, infinities and NaN too; also with two threads, and the bfloat16 copies."""
    mine, _, arguments = KINDS[kind]
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        if dtype is torch.float64 and extras != "plain":
            continue
        found = []
        for kernels, threads in [*((k, 1) for k in TARGETS.values()), (native.kernels(), 2)]:
            monkeypatch.setattr(update, "_kernels", lambda k=kernels: k)
            monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
            held = parameters(dtype, (*SHAPES, (300, 701)))
            with torch.no_grad():
                held[5][:3] = torch.tensor([float("inf"), float("nan"), -float("inf")], dtype=dtype)
            copies = {p: torch.zeros(p.shape, dtype=torch.bfloat16) for p in held} if dtype is torch.float32 else {}
            optimizer = mine(held, **arguments, **EXTRAS[extras], copies=copies)
            train(optimizer, held)
            found.append([*values(optimizer, held), *copies.values()])
            for p, c in copies.items():
                torch.testing.assert_close(c, p.detach().bfloat16(), rtol=0, atol=0, equal_nan=True)
        for other in found[1:]:
            for a, b in zip(found[0], other, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "column-major": lambda x: x.t().contiguous().t(),
    "gaps": lambda x: torch.stack((x, x + 1), -1)[..., 0],
    "row-major": lambda x: x.contiguous(),
    "one row for all": lambda x: x[:1].expand(x.shape),
}


@pytest.mark.parametrize("extras", ["plain", "bf16 state, stochastic"])
@pytest.mark.parametrize("gradient", LAYOUTS)
@pytest.mark.parametrize("parameter", ["column-major", "gaps", "row-major"])
def test_any_strides(by: str, parameter: str, gradient: str, extras: str) -> None:
    """The same bits as where all is row-major."""
    held, plain = parameters(torch.float32, ((129, 77),)), parameters(torch.float32, ((129, 77),))
    with torch.no_grad():
        held[0].data = LAYOUTS[parameter](held[0].data)
    one, other = (AdamW(p, lr=1e-2, **EXTRAS[extras]) for p in (held, plain))
    for turn in range(3):
        give_gradients(held, turn, LAYOUTS[gradient])
        give_gradients(plain, turn, lambda g: LAYOUTS[gradient](g).contiguous())
        one.step()
        other.step()
    assert held[0].stride() == LAYOUTS[parameter](torch.zeros(129, 77)).stride()
    for a, b in zip(values(one, held), values(other, plain), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["adamw", "sgd momentum"])
def test_state_to_torch_and_back(by: str, kind: str) -> None:
    """Half of the steps here and half in torch, both ways, as all in torch."""
    mine, theirs, arguments = KINDS[kind]
    results = []
    for first, second in ((mine, theirs), (theirs, mine), (theirs, theirs)):
        held = parameters(torch.float64)
        before = first(held, **arguments)
        train(before, held, range(2))
        after = second(held, lr=0.5)
        after.load_state_dict(copy.deepcopy(before.state_dict()))
        train(after, held, range(2, 4))
        results.append(values(after, held))
    for other in results[:2]:
        for a, b in zip(results[2], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("stored", "kept"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_a_loaded_state_keeps_its_precision(stored: torch.dtype, kept: torch.dtype) -> None:
    """Parameters in one dtype, moments in another: a save, a load and a deep copy change nothing."""
    held, again = parameters(stored), parameters(stored)
    one = AdamW(held, lr=1e-2, state_dtype=kept)
    train(one, held, range(2))
    two = AdamW(again, state_dtype=kept)
    two.load_state_dict(copy.deepcopy(one.state_dict()))  # torch's loading shares tensors
    with torch.no_grad():
        for a, b in zip(again, held, strict=True):
            a.copy_(b)
    three = copy.deepcopy(one)
    train(one, held, range(2, 4))
    train(two, again, range(2, 4))
    thirds = [p for group in three.param_groups for p in group["params"]]
    train(three, thirds, range(2, 4))
    for a, b, c in zip(values(one, held), values(two, again), values(three, thirds), strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    assert {s["exp_avg_sq"].dtype for s in two.state.values()} == {kept}


def test_clipped_and_unscaled_on_the_way(by: str) -> None:
    """As torch's unscaled and clipped gradients; the gradients themselves are left."""
    held, wanted = parameters(torch.float64), parameters(torch.float64)
    one, other = AdamW(held, lr=1e-2), torch.optim.AdamW(wanted, lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for turn in range(3):
        for p in (held, wanted):
            give_gradients(p, turn)
        scaler.scale(torch.zeros(()))  # the scale exists from the first scaled loss on
        before = [p.grad.clone() for p in held if p.grad is not None]
        scaler.step(one, max_norm=0.5)
        scaler.update()
        for p in wanted:
            assert p.grad is not None
            p.grad /= 8
        torch.nn.utils.clip_grad_norm_(wanted, 0.5)
        other.step()
        assert all(torch.equal(a, p.grad) for a, p in zip(before, held, strict=True) if p.grad is not None)
    for a, b in zip(values(one, held), values(other, wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_an_overflow_is_no_step() -> None:
    held = parameters(torch.float32, ((4,),))
    optimizer, before = AdamW(held), held[0].detach().clone()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    held[0].grad = torch.tensor([1.0, float("inf"), 0.0, 0.0])
    scaler.step(optimizer)
    assert torch.equal(held[0], before) and not optimizer.state


def test_stochastic_rounding_keeps_small_changes() -> None:
    """Steps of a tenth of the last place: to the nearest nothing moves; at random the mean moves as it should."""
    n, steps = 20_000, 40
    moved = {}
    for random in (False, True):
        p = nn.Parameter(torch.ones(n, dtype=torch.bfloat16))
        optimizer = SGD([p], lr=2.0**-7 / 10, stochastic_rounding=random)
        for _ in range(steps):
            p.grad = -torch.ones_like(p)
            optimizer.step()
        moved[random] = float((p.detach().double() - 1).mean())
    assert moved[False] == 0.0
    wanted = steps * 2.0**-7 / 10
    assert abs(moved[True] - wanted) < 5 * 2.0**-7 * (steps * 0.09 / n) ** 0.5


def test_a_piece_rounds_as_in_the_whole(by: str) -> None:
    """Rows 3 to 7 of a tensor alone, by their numbers in the whole."""
    whole = torch.randn(10, 33, generator=torch.Generator().manual_seed(2)).bfloat16()
    results = []
    for rows in (slice(0, 10), slice(3, 8)):
        p, g = whole[rows].clone(), whole[rows].clone()
        moments = torch.zeros_like(p), torch.zeros_like(p)
        piece = space((10, 33), (rows.start, 0), tuple(p.shape))
        update.adamw(
            [update.Item(p, g, *moments, None, 1e-2, 1.0, (Stream(5, 6), piece))], update.Rule(1, 1, 0.1, 0.9, 0.1)
        )
        results.append((p, *moments))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a[3:8], b)


def test_no_gradient_no_change_and_groups() -> None:
    """Parameters without a gradient keep value and state; each group has its own numbers."""
    held, wanted = parameters(torch.float64), parameters(torch.float64)
    optimizers = []
    for kind, of in ((AdamW, held), (torch.optim.AdamW, wanted)):
        groups = [{"params": of[:3], "lr": 0.1}, {"params": of[3:], "weight_decay": 0.5}]
        optimizer = kind(groups, lr=torch.tensor(0.01, dtype=torch.float64))
        for turn in range(3):
            give_gradients(of, turn)
            of[2].grad = of[4].grad = None
            if turn == 1:
                of[0].grad = None
            optimizer.step()
        optimizers.append(optimizer)
    for a, b in zip(values(optimizers[0], held), values(optimizers[1], wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    assert held[2] not in optimizers[0].state


def test_what_is_refused() -> None:
    held = parameters(torch.float32, ((4,),))
    with pytest.raises(UserError, match=r"state_dtype is torch\.int8"):
        AdamW(held, state_dtype=torch.int8)
    with pytest.raises(UserError, match=r"a copy has shape \[5\], its parameter \[4\]"):
        AdamW(held, copies={held[0]: torch.zeros(5)})
    optimizer = AdamW(held)
    optimizer.load_state_dict(torch.optim.AdamW(held, amsgrad=True).state_dict())
    give_gradients(held, 0)
    with pytest.raises(UserError, match=r"amsgrad is not offered here; take torch\.optim\.AdamW"):
        optimizer.step()
    held[0].grad = torch.zeros(4).to_sparse()
    with pytest.raises(UserError, match="sparse gradient"):
        AdamW(held).step()


def test_autograd_sees_that_the_parameter_changed() -> None:
    p = nn.Parameter(torch.ones(3))
    loss = (p * p).sum()
    p.grad = torch.ones(3)
    AdamW([p]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()

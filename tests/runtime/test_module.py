"""The compiled module: names, call, return type, gradients, optimizers, state, modes, errors."""

from __future__ import annotations

import copy
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from autopar.codegen import check_program, emit, lower
from autopar.errors import InputError, PlanError, RankError, UserError
from autopar.ir.graph import CapturedGraph
from autopar.ir.mesh import Mesh
from autopar.ir.options import Options
from autopar.ir.plan import Plan
from autopar.ir.program import Source
from autopar.runtime.comm import Alone, Communicator
from autopar.runtime.loaded import EmittedError
from autopar.runtime.module import ParallelModule
from autopar.runtime.threads import run_threads
from autopar.sharding import build_table
from autopar.tracer import capture
from tests.codegen.hand import HID, Chain, chain, mesh, named_plan
from tests.codegen.table_plan import random_plan
from tests.models import tiny


def built(captured: CapturedGraph, plan: Plan) -> Source:
    program = lower(captured, plan)
    check_program(program, plan)
    return emit(program)


def chained(name: str, rt: Communicator, model: nn.Module | None = None, **more: Any) -> ParallelModule:
    """The hand-made chain under a named plan."""
    captured = chain()
    plan = named_plan(captured, name, rt.mesh.size)
    torch.manual_seed(0)
    return ParallelModule(captured, plan, built(captured, plan), model or Chain(), rt, **more)


def alone() -> Alone:
    return Alone(mesh(dp=1), torch.device("cpu"))


@lru_cache
def drawn(name: str, on: Mesh, seed: int) -> tuple[nn.Module, dict[str, Any], CapturedGraph, Plan, Source]:
    """A tiny model with a random plan."""
    model, batch = tiny(name)
    captured = capture(model, (), batch, options=Options(), model_name=name)
    plan = random_plan(captured, on, build_table(captured, on, Options()), seed)
    return model, batch, captured, plan, built(captured, plan)


X = torch.randn(HID, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def test_accumulation_adds_and_retain_graph_keeps() -> None:
    module = chained("dp", alone())
    loss = module(X)
    loss.backward(retain_graph=True)
    once = module.first.grad.clone()
    loss.backward()
    assert torch.allclose(module.first.grad, 2 * once)
    with pytest.raises(InputError, match="retain_graph=True"):
        loss.backward()
    (3 * module(X)).backward()
    assert torch.allclose(module.first.grad, 5 * once)


def test_no_grad_and_detached_parameters() -> None:
    model = Chain()
    model.first.requires_grad_(False)
    module = chained("dp", alone(), model)
    with torch.no_grad():
        assert not module(X).requires_grad
    module(X).backward()
    assert module.first.grad is None and module.layers[0].linear.weight.grad is not None


def test_names_order_and_strict_load() -> None:
    model, _, captured, plan, source = drawn("gpt2", mesh(dp=2), 0)

    def run(rt: Communicator) -> list[Any]:
        module = ParallelModule(captured, plan, source, model, rt)
        assert list(module.state_dict()) == list(model.state_dict())
        assert [n for n, _ in module.named_parameters()] == [n for n, _ in model.named_parameters()]
        assert [n for n, _ in module.named_buffers()] == [n for n, _ in model.named_buffers()]
        assert module.lm_head.weight is module.transformer.wte.weight
        assert all(p.is_contiguous() for p in module.parameters())
        return [module.full_state_dict()]

    for (full,) in run_threads(2, run, timeout_s=60):
        plain = copy.deepcopy(model)
        for p in plain.parameters():
            p.data.zero_()
        plain.load_state_dict(full, strict=True)
        assert all(
            torch.equal(a, b) for a, b in zip(plain.state_dict().values(), model.state_dict().values(), strict=True)
        )
        assert list(full) == list(model.state_dict())


def test_a_model_on_meta_is_loaded_by_pieces(tmp_path: Path) -> None:
    on = mesh(dp=2, tp=2)
    model, batch, captured, plan, source = drawn("mlp", on, 3)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    wanted = model(**batch)[0].item()

    def run(rt: Communicator) -> None:
        for load in ("file", "dict"):
            module = ParallelModule(captured, plan, source, copy.deepcopy(model).to("meta"), rt)
            with pytest.raises(UserError, match="have no values yet"):
                module(**batch)
            if load == "file":
                module.load_safetensors(tmp_path / "weights.safetensors")
            else:
                module.load_full_state_dict(model.state_dict())
            assert abs(module(**batch)[0].item() - wanted) < 1e-5 * abs(wanted)
        with pytest.raises(UserError, match=r"missing \['up.weight'\]"):
            module.load_full_state_dict({k: v for k, v in model.state_dict().items() if k != "up.weight"})
        with pytest.raises(UserError, match=r"up.bias has shape \(3,\), wanted \(48,\)"):
            module.load_full_state_dict({**model.state_dict(), "up.bias": torch.zeros(3)})

    run_threads(on, run, timeout_s=60)


@pytest.mark.parametrize("kind", ["cut short", "header only", "empty", "other", "missing", "folder"])
def test_a_damaged_weight_file_is_one_line_with_its_name(kind: str, tmp_path: Path) -> None:
    model, _, captured, plan, source = drawn("mlp", mesh(dp=1), 0)
    path = tmp_path / "weights.safetensors"
    save_file(model.state_dict(), path)
    whole = path.read_bytes()
    damaged = {"cut short": whole[:-8], "header only": whole[:20], "empty": b"", "other": b"\x80" * 99}
    if kind in damaged:
        path.write_bytes(damaged[kind])
    else:
        path = tmp_path / "none" if kind == "missing" else tmp_path
    module = ParallelModule(captured, plan, source, model, alone())
    with pytest.raises(UserError) as caught:
        module.load_safetensors(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_the_models_own_return_type_and_wrong_inputs() -> None:
    model, batch, captured, plan, source = drawn("mlp", mesh(dp=1), 0)
    module = ParallelModule(captured, plan, source, model, alone())
    got, wanted = module(**batch), model(**batch)
    assert type(got) is tuple and torch.allclose(got[1], wanted[1], atol=1e-5)
    with pytest.raises(InputError, match="goes through output"):
        got[1].sum().backward()
    with pytest.raises(InputError, match=r"'x' is .*7, 24"):
        module(batch["x"][:7], batch["y"])
    with pytest.raises(InputError, match="missing a required argument: 'y'"):
        module(batch["x"])
    assert module.plan is plan and module.source == source.text


def test_buffers_are_updated_in_place() -> None:
    model, batch, captured, plan, source = drawn("convnet", mesh(dp=2), 1)
    plain = copy.deepcopy(model)
    plain(**batch)["loss"].backward()

    def run(rt: Communicator) -> dict[str, torch.Tensor]:
        module = ParallelModule(captured, plan, source, model, rt)
        held = module.bn1.running_mean
        out = module(**batch)
        assert set(out) == {"loss", "logits"}
        out["loss"].backward()
        assert module.bn1.running_mean is held
        return dict(module.named_buffers())

    for buffers in run_threads(2, run, timeout_s=60):
        for name, wanted in plain.named_buffers():
            assert torch.allclose(buffers[name], wanted, atol=1e-5), name
    assert not torch.equal(plain.bn1.running_mean, model.bn1.running_mean)


class Halving(nn.Module):
    """Reads a buffer, then changes it: its backward needs the old value."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self.register_buffer("scale", torch.full((4,), 3.0), persistent=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = (x * self.w * self.scale.clone()).sum()
        self.scale.mul_(0.5)
        return loss, x


def test_the_backward_reads_a_buffers_old_value() -> None:
    model, x = Halving(), torch.arange(4.0)
    captured = capture(model, (x,), {}, options=Options())
    plan = random_plan(captured, mesh(dp=1), build_table(captured, mesh(dp=1), Options()), 0)
    module = ParallelModule(captured, plan, built(captured, plan), model, alone())
    loss, same = module(x)
    assert torch.equal(same, x) and not x.requires_grad and not same.requires_grad
    loss.backward()
    assert torch.equal(module.w.grad, 3 * x) and torch.equal(module.scale, torch.full((4,), 1.5))
    assert list(module.state_dict()) == ["w"] and [n for n, _ in module.named_buffers()] == ["scale"]


def test_modes() -> None:
    module = chained("dp", alone())
    module.eval()
    with pytest.raises(
        InputError, match=r"in evaluation mode, its plan was captured in training mode: call .train\(\)"
    ):
        module(X)
    module.train()
    assert module(X).requires_grad
    asked = []

    def recompile(request: Any) -> Any:
        import dataclasses

        asked.append(request.wanted.modes[0])
        captured = dataclasses.replace(chain(), training=request.wanted.modes[0])
        plan = named_plan(captured, "whole", 1)
        return captured, plan, built(captured, plan)

    module = chained("dp", alone(), recompile=recompile)
    trained = module(X)
    assert torch.allclose(module.eval()(X), trained) and torch.allclose(module(X), trained)
    assert asked == [False]


def test_an_error_in_emitted_code_points_to_the_users_line() -> None:
    model, batch, captured, plan, source = drawn("tower", mesh(dp=1), 0)
    module = ParallelModule(captured, plan, source, model, alone())
    weight = module.layers[2].fc1.weight
    weight.data = weight.data[:, :-1]
    with pytest.raises(EmittedError) as caught:
        module(**batch)
    text = str(caught.value)
    assert "models.py:" in text and "in module layers.2.fc1" in text and "emitted line" in text and "aten." in text
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_error_on_one_thread_names_it() -> None:
    def run(rt: Communicator) -> None:
        module = chained("dp", rt)
        if rt.rank == 1:
            module.first.data = module.first.data[:3]
        module(X).backward()

    with pytest.raises(RankError, match=r"(?s)rank 1 of 2 failed: EmittedError: .*hand.py:1, in module first"):
        run_threads(2, run, timeout_s=60)


def test_a_source_for_another_mesh() -> None:
    captured = chain()
    plan = named_plan(captured, "dp", 1)
    source = built(captured, named_plan(captured, "dp", 2))
    with pytest.raises(PlanError, match="the source is for mesh"):
        ParallelModule(captured, plan, source, Chain(), alone())


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adafactor, torch.optim.RMSprop])
def test_any_optimizer(optimizer: Any) -> None:
    plain = Chain()
    module = chained("tp", Alone(mesh(tp=1), torch.device("cpu")), plain)
    for m in (plain, module):
        step = optimizer(m.parameters(), lr=1e-2)
        for _ in range(2):
            step.zero_grad()
            m(X).backward()
            step.step()
    assert torch.allclose(module.first, plain.first)

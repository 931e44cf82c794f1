"""float16 with scaled losses: torch.amp.GradScaler in the user's own loop, on every kind of plan (NUM-24)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar import api, launch, staging
from autopar.cost_model.clusters import load_cluster
from autopar.ir.options import Options
from autopar.ir.plan import Plan, all_ranks, decode_plan
from autopar.runtime.parameters import unwrap
from autopar.runtime.staged import _Call
from autopar.runtime.threads import run_threads
from autopar.verification.narrowed import narrowed
from tests.cases.lm import TinyLM, text
from tests.cases.run import agree

STEPS, SPOILT = 7, 5
"""Steps of a run, and the one in which one rank's gradient is made infinite."""
FIRST_SCALE = 2.0**12
KINDS: dict[str, tuple[dict[str, Any], int | None]] = {
    "zero3": ({"dp": 2, "zero": 3}, None), "tp": ({"tp": 2}, None), "stages": ({"pp": 2, "dp": 1, "tp": 1}, 3),
}  # fmt: skip


class Weighed(nn.Module):
    """TinyLM with its loss times a factor: gradients that float16 can't hold with some scales of the loss."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lm = TinyLM(layers=2, tie=True)
        self.factor = factor

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """See TinyLM."""
        loss: Tensor = self.lm(ids, labels) * self.factor
        return loss


def planned(model: nn.Module, kind: str) -> tuple[Any, Plan]:
    pins, micro_batches = KINDS[kind]
    options = Options(pins=pins, precision="fp16", micro_batches=micro_batches)
    graph = api.capture(model, text(), options=options)
    return graph, api.plan_captured(graph, load_cluster("rtx3090:2"), options=options)


def scaled_run(module: Any, call: Any, by_step: bool = False) -> tuple[list[tuple[float, int]], list[float]]:
    """((scale, steps taken) after each step, losses) of SGD with momentum. The first scales overflow by themselves."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=FIRST_SCALE, growth_interval=100)
    if by_step:
        module.scale_steps_by(scaler)
    taken: list[int] = []
    optimizer.register_step_post_hook(lambda *_: taken.append(1))
    found, losses = [], []
    for step in range(STEPS):
        batch = text(seed=step)
        if by_step:
            losses.append(float(module.step(**batch)))
        else:
            loss = call(**batch)
            scaler.scale(loss).backward()
            losses.append(loss.item())
        if step == SPOILT and (not dist.is_initialized() or dist.get_rank() == 1):
            unwrap(next(module.parameters()).grad).view(-1)[-1] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append((scaler.get_scale(), len(taken)))
    return found, losses


def on_ranks(plans: dict[str, str]) -> list[tuple[str, Any, list[float], dict[str, Tensor]]]:
    """Every kind's run, and rank 0's results; all ranks went alike."""
    found = []
    for name, written in plans.items():
        kind, by_step = name.split()[0], "step" in name
        plan = decode_plan(written.encode(), kind, Plan)
        module: Any = autopar.compile(
            Weighed(64.0), plan=plan, example_inputs=text(), options=Options(precision="fp16")
        )  # fmt: skip
        mine = scaled_run(module, module, by_step)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        assert all(x == mine for x in everyone), (name, everyone)
        found.append((name, *mine, module.full_state_dict()))
    return found


@pytest.mark.ranks
@pytest.mark.timeout(200)
def test_num24_a_gradient_that_overflows_anywhere_skips_the_step_everywhere() -> None:
    """Scales and steps are one device's exactly: four scales of which float16 holds none, one infinite piece later."""
    written = {kind: planned(Weighed(64.0), kind)[1].to_json().decode() for kind in KINDS}
    plain = Weighed(64.0)
    wanted, wanted_losses = scaled_run(plain, narrowed(plain, "fp16"))
    assert wanted == [(2048.0, 0), (1024.0, 0), (512.0, 0), (512.0, 1), (512.0, 2), (256.0, 2), (256.0, 3)]
    plans = {**written, "stages step": written["stages"]}
    for name, scales, losses, state in launch(on_ranks, 2, (plans,), timeout_s=150):
        assert scales == wanted, name
        assert losses == pytest.approx(wanted_losses, rel=2e-3), name
        agree(state, plain.state_dict(), 2e-3)


def small_gradients(module: Any, scale: float) -> dict[str, Tensor]:
    """Gradients divided by the scale that the loss had."""
    (module(**text()) * scale).backward()
    return {name: unwrap(p.grad).float() / scale for name, p in module.named_parameters()}


def test_stages_scale_before_their_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that float16 flushes to zero are there if the loss is scaled. Seen to fail: scaled when handed over."""
    model = Weighed(2.0**-14)
    graph, plan = planned(model, "stages")
    made = staging.staged(graph, plan)
    wanted = small_gradients_of_one(model, 2.0**14)

    def grown(rt: Any) -> list[dict[str, Tensor]]:
        module = made.module(model, rt)
        found = []
        for scale in (2.0**14, 2.0**13):
            module.zero_grad()
            found.append(small_gradients(module, scale))
        return found

    for found in run_threads(all_ranks(plan), grown):
        for each in found:
            agree(each, {name: wanted[name] for name in each}, 4e-3)
    monkeypatch.setattr(_Call, "run", started_with_one(_Call.run))
    with pytest.raises(AssertionError, match="differs"):
        for found in run_threads(all_ranks(plan), grown):
            agree(found[0], {name: wanted[name] for name in found[0]}, 4e-3)


def started_with_one(real: Any) -> Any:
    """Backwards begin with 1, and what they made is scaled."""

    def run(call: Any, scale: float, *more: Any) -> Any:
        result = real(call, 1.0, *more)
        result.gradients = {name: g * scale for name, g in result.gradients.items()}
        return result

    return run


def small_gradients_of_one(model: nn.Module, scale: float) -> dict[str, Tensor]:
    plain = copy.deepcopy(model)
    (narrowed(plain, "fp16")(**text()) * scale).backward()
    return {name: p.grad / scale for name, p in plain.named_parameters()}

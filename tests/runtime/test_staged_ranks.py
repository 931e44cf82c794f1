"""Plans with stages on 4 and 8 real processes: clipped training equals one device's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.cost_model.clusters import load_cluster
from autopar.ir.options import Options
from autopar.runtime.launch import launch
from tests.cases.lm import TinyLM, text

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(300)]
PLANS = {
    4: ({"pp": 2, "dp": 2, "tp": 1, "*.weight": "dp:S(0)"}, 3),
    8: ({"pp": 2, "dp": 2, "tp": 2}, 2),
}
"""Ranks -> (pins, micro-batches)."""


def model() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return TinyLM(layers=4, tie=True).double(), text()


def steps(module: Any, inputs: dict[str, Tensor], clip: Any) -> list[tuple[float, float]]:
    """(loss, norm of the gradients) of three steps."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, eps=1e-4)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = module(**inputs)
        loss.backward()
        found.append((loss.item(), float(clip(0.5))))
        optimizer.step()
    return found


def trains(ranks: int) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    plain, inputs = model()
    pins, micro_batches = PLANS[ranks]
    options = Options(precision="fp64", pins=pins, micro_batches=micro_batches)
    module = autopar.compile(plain, load_cluster(f"rtx4090:{ranks}"), example_inputs=inputs, options=options)
    return steps(module, inputs, module.clip_grad_norm_), module.full_state_dict()


@pytest.mark.parametrize("ranks", PLANS)
def test_processes_train_as_one_device(ranks: int) -> None:
    found, state = launch(trains, ranks, (ranks,), timeout_s=280)
    plain, inputs = model()
    one = copy.deepcopy(plain)
    expected = steps(one, inputs, lambda most: torch.nn.utils.clip_grad_norm_(one.parameters(), most))
    assert found == [pytest.approx(row, rel=1e-10) for row in expected]
    for name, value in one.state_dict().items():
        assert torch.allclose(state[name], value, rtol=0, atol=1e-10 * float(value.abs().max())), name

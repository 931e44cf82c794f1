"""Field cases CAP that are about training on ranks: batch norm's buffers, a whole small ResNet."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import api
from autopar.cost_model.clusters import load_cluster
from autopar.ir.options import Options
from autopar.ir.plan import mesh_of
from autopar.runtime.comm import Alone, Communicator
from autopar.runtime.module import ParallelModule
from autopar.runtime.threads import run_threads
from tests.cases.run import compared, same, unequal, wide
from tests.models import ConvNet


def on_ranks(model: nn.Module, inputs: Any, ranks: int, pins: dict[str, Any]) -> Any:
    """(compile one rank's module, mesh): a float64 model planned for `ranks` ranks."""
    options = Options(pins=pins, precision="fp64")
    graph = api.capture(model, inputs, options=options)
    plan = api.plan_captured(graph, load_cluster(f"rtx3090:{ranks}"), options=options)
    source = api.emit_captured(graph, plan)
    return lambda rt: ParallelModule(graph, plan, source, model, rt), mesh_of(plan)


def every_rank(mesh: Any, fn: Any) -> list[Any]:
    if mesh.size == 1:
        return [fn(Alone(mesh, torch.device("cpu")))]
    return run_threads(mesh, fn, timeout_s=120)


class ConvNorm(nn.Module):
    """Conv, batch norm, ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 12, 3, padding=1)
        self.bn = nn.BatchNorm2d(12)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, 3, H, W) -> ()."""
        return F.relu(self.bn(self.conv(x))).pow(2).mean()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_cap15_running_statistics_advance_once_a_step(ranks: int) -> None:
    """Statistics are of the whole batch, on ranks whose parts are of unequal scale; then the plain model evaluates."""
    torch.manual_seed(0)
    model = ConvNorm().double()
    x = unequal(12, 3, 4, 4)
    make, mesh = on_ranks(model, {"x": x}, ranks, {"dp": ranks})
    eager = copy.deepcopy(model)
    for _ in range(3):
        eager(x)

    def rank(rt: Communicator) -> dict[str, Tensor]:
        module = make(rt)
        for _ in range(3):
            module(x=x)
        return module.full_state_dict()

    for state in every_rank(mesh, rank):
        assert int(state["bn.num_batches_tracked"]) == 3
        for name in ("bn.running_mean", "bn.running_var"):
            torch.testing.assert_close(state[name], eager.state_dict()[name], rtol=1e-10, atol=1e-12)
        once = copy.deepcopy(model)
        once(x)
        assert not torch.allclose(state["bn.running_mean"], once.state_dict()["bn.running_mean"], rtol=1e-3)
        plain = copy.deepcopy(model)
        plain.load_state_dict(state)
        torch.testing.assert_close(plain.eval()(x), eager.eval()(x), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_cap25_a_small_resnet(ranks: int, axis: str) -> None:
    torch.manual_seed(0)
    inputs = {"x": unequal(12, 3, 16, 16), "y": torch.randint(0, 12, (12,))}
    same(ConvNet(), inputs, ranks, pins={axis: ranks})


def test_a_wrong_batch_norm_is_seen() -> None:
    """The usual wrong variant, statistics of each rank's part, is far outside the tolerance on these data."""
    torch.manual_seed(0)
    bn = nn.BatchNorm2d(3).double()
    x = wide(unequal(12, 3, 4, 4))
    parts = torch.cat([bn(part) for part in x.chunk(2)])
    assert (parts - bn(x)).abs().max() > 0.1
    _, report = compared(ConvNorm(), {"x": x}, 2, pins={"dp": 2})
    assert report.ok

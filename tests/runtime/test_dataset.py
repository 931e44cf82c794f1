"""`shard_dataset`: each rank loads its part of every global batch, and training is that with whole batches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

import autopar
from autopar import Options
from tests.plan_samples import sample_plan

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(150)]

WIDTH, CLASSES, BATCH, COUNT = 12, 6, 12, 40


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, CLASSES)

    def forward(self, x: Tensor, y: Tensor, flip: bool = False) -> Tensor:
        h = self.down(F.gelu(self.up(-x if flip else x)))
        return F.cross_entropy(h, y, ignore_index=0)  # unequal counts: a mean of means would differ


class Samples(Dataset[dict[str, Tensor]]):
    """Counts what is loaded."""

    def __init__(self, count: int = COUNT, as_tuple: bool = False) -> None:
        g = torch.Generator().manual_seed(3)
        self.x = torch.randn(count, WIDTH, generator=g) * (1 + torch.arange(count)).view(-1, 1) / 20
        self.y = torch.randint(0, CLASSES, (count,), generator=g)
        self.as_tuple = as_tuple
        self.loaded: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        self.loaded[i] += 1
        return (self.x[i], self.y[i]) if self.as_tuple else {"x": self.x[i], "y": self.y[i]}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        data = Samples()
        return (data[i] for i in range(COUNT))


def _model() -> Net:
    torch.manual_seed(0)
    return Net()


def _example() -> dict[str, Tensor]:
    data = Samples()
    return {"x": data.x[:BATCH], "y": data.y[:BATCH]}


def _train(module: nn.Module, batches: Any) -> list[float]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for batch in batches:
        loss = module(**batch) if isinstance(batch, dict) else module(*batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _global_batches(order: list[int]) -> list[dict[str, Tensor]]:
    data = Samples()
    starts = range(0, COUNT - BATCH + 1, BATCH)
    return [{"x": data.x[order[s : s + BATCH]], "y": data.y[order[s : s + BATCH]]} for s in starts]


def _compiled(pins: dict[str, Any]) -> Any:
    cluster = autopar.ClusterSpec.load(f"rtx3090:{dist.get_world_size()}")
    return autopar.compile(_model(), cluster, example_inputs=_example(), options=Options(pins=pins))


def trains(module: Any) -> None:
    start = module.full_state_dict()
    expected = _train(_model(), _global_batches(list(range(COUNT))))

    def losses(batches: Any) -> Tensor:
        module.load_full_state_dict(start)
        return torch.tensor(_train(module, batches))

    for data in (Samples(), Samples(as_tuple=True), Stream()):
        found = losses(autopar.shard_dataset(data, module.plan, drop_last=True))
        assert torch.allclose(found, torch.tensor(expected), atol=1e-5, rtol=1e-5)
    wrong = losses(_global_batches([(i + 1) % COUNT for i in range(COUNT)]))
    assert not torch.allclose(wrong, torch.tensor(expected), atol=1e-3), "the check sees another order"


def loads_its_part(module: Any, dp: int) -> None:
    data = Samples()
    view = autopar.shard_dataset(data, module.plan, shuffle=True, seed=5)
    batches = list(view)
    assert len(batches) == len(view) == 4
    assert all(isinstance(b["x"], DTensor) and b["x"].shape == (BATCH, WIDTH) for b in batches[:3])
    rest = batches[3]["x"]
    assert not isinstance(rest, DTensor)
    assert len(rest) == COUNT % BATCH
    assert sum(data.loaded.values()) == 3 * BATCH // dp + COUNT % BATCH, "no more than this rank's part"
    # Each sample once, over all ranks and batches; ranks that differ only in tp load the same.
    mine = torch.zeros(COUNT, dtype=torch.int64)
    for i, times in data.loaded.items():
        mine[i] = times
    everyone = mine.clone()
    dist.all_reduce(everyone)
    ranks = dist.get_world_size()
    assert sorted(everyone.tolist()) == [ranks // dp] * 36 + [ranks] * 4
    whole = torch.cat([b["x"].full_tensor() for b in batches[:3]] + [rest])
    assert torch.equal(whole.sort(0).values, data.x.sort(0).values)
    # Another epoch, another order, alike on all ranks; the same epoch, the same order.
    again = next(iter(view))["x"].full_tensor()
    assert not torch.equal(again, whole[:BATCH])
    view.epoch = 0
    assert torch.equal(next(iter(view))["x"].full_tensor(), whole[:BATCH])


def with_workers(plan: autopar.Plan) -> None:
    for data in (Samples(), Stream()):
        alone = list(autopar.shard_dataset(data, plan))
        helped = list(autopar.shard_dataset(data, plan, workers=2))
        assert len(alone) == len(helped) == 4
        assert all(torch.equal(_plain(a[k]), _plain(b[k])) for a, b in zip(alone, helped, strict=True) for k in "xy")
    with pytest.raises(autopar.UserError, match="give their number to shard_dataset"):
        next(iter(DataLoader(autopar.shard_dataset(Samples(), plan), batch_size=None, num_workers=1)))


def _plain(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def everything(pins: list[dict[str, int]], workers: bool = False) -> None:
    """Training equals that with global batches; a rank loads only its part; worker processes load the same."""
    for each in pins:
        module = _compiled(each)
        trains(module)
        loads_its_part(module, each.get("dp", 1))
        if workers:
            with_workers(module.plan)


@pytest.mark.parametrize("pins", [[{"tp": 2}, {"dp": 2}], [{"dp": 3}], [{"dp": 2, "tp": 2}]], ids=str)
def test_ranks_load_their_parts(pins: list[dict[str, int]]) -> None:
    autopar.launch(everything, math.prod(pins[0].values()), (pins, pins[0] == {"tp": 2}))


def test_one_rank() -> None:
    cluster = autopar.ClusterSpec.load("rtx3090:1")
    module = autopar.compile(_model(), cluster, example_inputs=_example())
    view = autopar.shard_dataset(Samples(), module.plan, drop_last=True)
    assert len(view) == 3
    losses, expected = _train(module, view), _train(_model(), _global_batches(list(range(COUNT))))
    assert torch.allclose(torch.tensor(losses), torch.tensor(expected), atol=1e-6)


def test_what_cannot_be_is_said() -> None:
    cluster = autopar.ClusterSpec.load("rtx3090:1")
    plan = autopar.search(_model(), cluster, example_inputs=_example())
    with pytest.raises(autopar.PlanError, match="describes 4 ranks, 1 were launched"):
        autopar.shard_dataset(Samples(), sample_plan())
    with pytest.raises(autopar.UserError, match="no index to draw from"):
        autopar.shard_dataset(Stream(), plan, shuffle=True)
    short = [{"x": torch.zeros(WIDTH - 1), "y": torch.tensor(1)}] * BATCH
    with pytest.raises(autopar.UserError, match=r"'x' is shape \[11\]; the plan is for samples of shape \[12\]"):
        next(iter(autopar.shard_dataset(short, plan)))

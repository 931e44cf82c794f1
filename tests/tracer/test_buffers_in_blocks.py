"""Blocks that update buffers fold: the new values are outputs of the block's call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.cases.run import same, unequal
from tests.tracer.proof import check_equal


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.register_buffer("largest", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu_(self.norm(self.first(x)))
        with torch.no_grad():
            self.largest.copy_(torch.maximum(self.largest, y.amax((0, 2, 3))))
        return x + self.second(y)


class Net(nn.Module):
    def __init__(self, *, read: bool = False, twice: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.read, self.twice = read, twice

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        if self.twice:
            x = self.blocks[0](x)
        loss = x.pow(2).mean()
        return loss + self.blocks[3].norm.running_var.mean() if self.read else loss


def batch(rows: int = 6) -> Tensor:
    return unequal(rows, 3, 5, 5)


def folded(net: Net, *, shared: bool = False) -> list[str]:
    net = net.double()
    if shared:
        net.blocks[2].norm.running_mean = net.blocks[1].norm.running_mean
    captured = check_equal(net, {"x": batch()})
    return [name for block in captured.blocks for name in block.instances]


def test_blocks_with_batch_norm_fold() -> None:
    assert folded(Net()) == [f"blocks.{i}" for i in range(4)]


@pytest.mark.parametrize(
    ("how", "left_out"),
    [("shared", ("blocks.1", "blocks.2")), ("read", ("blocks.3",)), ("twice", ("blocks.0",))],
)
def test_a_buffer_that_others_use_too_keeps_its_block_open(how: str, left_out: tuple[str, ...]) -> None:
    """The order of the two uses counts, and calls of a block have none. `check_equal` compares the buffers."""
    found = folded(Net(), shared=True) if how == "shared" else folded(Net(**{how: True}))
    assert not set(left_out) & set(found)
    assert len(found) >= 2


@pytest.mark.parametrize(
    ("ranks", "pins"),
    [(1, {}), (2, {"dp": 2}), (3, {"dp": 3, "zero": 3}), (2, {"tp": 2}), (4, {"dp": 2, "tp": 2})],
)
def test_same_training_spread(ranks: int, pins: dict[str, int]) -> None:
    torch.manual_seed(2)
    same(Net(), {"x": batch(12)}, ranks, pins=pins)

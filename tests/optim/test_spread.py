"""Parameters spread over ranks: each piece is updated as the piece of the whole tensor would be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from autopar.optim import AdamW
from autopar.runtime.launch import launch

WAYS = (Shard(0), Shard(1), Replicate())


def column_major(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def trained(spread: bool, extras: dict[str, object], max_norm: float | None) -> list[Tensor]:
    """Whole parameters and moments after three steps of a [7, 12] tensor for each of WAYS."""
    random = torch.Generator().manual_seed(1)
    values = [torch.randn(7, 12, generator=random).bfloat16() for _ in WAYS]
    if extras.get("state_dtype") is not torch.float32:
        values = [v.float() for v in values]
    mesh = init_device_mesh("cpu", (2,)) if spread else None
    held = [nn.Parameter(distribute_tensor(v, mesh, [w]) if spread else v) for v, w in zip(values, WAYS, strict=True)]
    optimizer = AdamW(held, lr=0.05, **extras)  # type: ignore[arg-type]
    for _ in range(3):
        for p, way in zip(held, WAYS, strict=True):
            whole = torch.randn(7, 12, generator=random).to(p.dtype)
            if not spread:
                p.grad = whole
                continue
            piece = column_major(distribute_tensor(whole, mesh, [way]).to_local())
            p.grad = DTensor.from_local(piece, mesh, [way], run_check=False, shape=p.shape, stride=p.stride())
        optimizer.step(max_norm=max_norm)
    found = [x for p in held for x in (p.detach(), *(optimizer.state[p][k] for k in AdamW.moments))]
    return [x.full_tensor() if isinstance(x, DTensor) else x for x in found]


CASES: list[tuple[dict[str, object], float | None]] = [
    ({}, None),
    ({"state_dtype": torch.bfloat16, "stochastic_rounding": True}, None),
    ({"state_dtype": torch.float32, "stochastic_rounding": True, "seed": 7}, None),
    ({}, 0.5),
]


def compare() -> int:
    for extras, max_norm in CASES:
        one, all_ = trained(False, extras, max_norm), trained(True, extras, max_norm)
        for a, b in zip(one, all_, strict=True):
            if max_norm is None:
                assert torch.equal(a, b), (extras, a, b)
            else:  # ranks sum the norm in another order
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    return len(CASES)


@pytest.mark.ranks
@pytest.mark.timeout(90)
def test_pieces_are_those_of_the_whole() -> None:
    assert launch(compare, 2, timeout_s=80) == len(CASES)

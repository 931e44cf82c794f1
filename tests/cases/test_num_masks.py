"""NUM-26: what is given for the whole batch (masks, lengths, document ids) is cut with the batch, or kept whole.

Every row has a mask of its own, so a piece that meets another's mask is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.runtime import module as running
from tests.cases.run import agree, captured, compared, gradients, on_ranks, planned, same_everywhere, strategies

ROWS, SEQ = 12, 6
CAUSAL = torch.ones(SEQ, SEQ, dtype=torch.bool).tril()


def documents(rows: int = ROWS) -> Tensor:
    """Document ids (rows, S), which begin at random places: no two pieces of the batch have the same."""
    starts = torch.rand(rows, SEQ, generator=torch.Generator().manual_seed(1)) < torch.linspace(0.2, 0.8, rows)[:, None]
    return starts.long().cumsum(1)


def of_documents(ids: Tensor) -> Tensor:
    """True (rows, S, S) where a token may look: earlier, in its own document."""
    return (ids[:, :, None] == ids[:, None, :]) & CAUSAL


KINDS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "rows": (of_documents, lambda given: given[:, None]),
    "rows and heads": (lambda d: of_documents(d)[:, None].expand(-1, 6, -1, -1).contiguous(), lambda given: given),
    "added": (
        lambda d: torch.zeros(len(d), 1, SEQ, SEQ, dtype=torch.float64).masked_fill(~of_documents(d)[:, None], -1e9),
        lambda given: given,
    ),
    "documents": (lambda d: d, lambda given: of_documents(given)[:, None]),
    "lengths": (
        lambda d: d[:, -1] + 1, lambda given: (torch.arange(SEQ) < given[:, None])[:, None, None] & CAUSAL
    ),
    "one for all": (lambda d: of_documents(d)[3], lambda given: given),
    "one row for all": (lambda d: of_documents(d)[3:4], lambda given: given[:, None]),
}  # fmt: skip
"""Kind -> (what is given as `mask`, of the document ids; what the model makes of it)."""


class Masked(nn.Module):
    """Embedding, attention under a mask, head; `kind` says what `mask` is."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.whole = KINDS[kind][1]
        self.embed, self.qkv, self.head = nn.Embedding(24, 12), nn.Linear(12, 36), nn.Linear(12, 24)

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        """ids, labels: (B, S) -> the sum of losses ()."""
        q, k, v = (
            x.unflatten(-1, (6, 2)).transpose(1, 2) for x in self.qkv(self.embed(ids)).chunk(3, -1)
        )  # fmt: skip
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=self.whole(mask))
        logits = self.head(h.transpose(1, 2).flatten(2))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def batch(kind: str, rows: int = ROWS) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(5)
    ids, labels = (torch.randint(0, 24, (rows, SEQ), generator=g) for _ in range(2))
    for row in range(rows):
        labels[row, : row % 4] = -100
    return {"ids": ids, "labels": labels, "mask": KINDS[kind][0](documents(rows))}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4))])
def test_num26_masks_are_cut_with_the_batch(kind: str, ranks: int) -> None:
    same_everywhere(Masked(kind), batch(kind), (ranks,), precisions=("fp64",))


@pytest.mark.parametrize("kind", [k for k in KINDS if "for all" not in k])
def test_num26_the_mask_of_the_first_rows_is_seen_to_fail(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong variant: each rank takes the first piece of the mask."""
    model, given = Masked(kind), batch(kind)
    right: Any = running._place
    graph = captured(model, given)
    pins = {"dp": 2, "zero": 0}

    def first(x: Tensor, *rest: Any) -> Tensor:
        if x.shape == given["mask"].shape and torch.equal(x.double(), given["mask"].double()):
            x = torch.cat([x[: ROWS // 2], x[: ROWS // 2]])
        found: Tensor = right(x, *rest)
        return found

    monkeypatch.setattr(running, "_place", first)
    _, report = compared(model, given, 2, pins=pins, graph=graph)
    assert not report.ok


@pytest.mark.parametrize("kind", ["rows", "added", "documents", "one for all"])
def test_num26_micro_batches_of_a_users_loop(kind: str) -> None:
    """Four rows and four more, each with its own mask, are the batch of eight."""
    model, whole = Masked(kind).double(), batch(kind, 8)
    shared = "for all" in kind
    parts = [
        {k: v if shared and k == "mask" else v[r : r + 4] for k, v in whole.items()} for r in (0, 4)
    ]  # fmt: skip
    model(**whole).backward()
    wanted = gradients(model)
    graph = captured(Masked(kind), parts[0])

    def loop(module: nn.Module) -> dict[str, Tensor]:
        for part in parts:
            module(**part).backward()
        return gradients(module)

    for ranks in (1, 2, 3, 4):
        for name in ("dp", "tp"):
            plan = planned(graph, ranks, strategies(ranks)[name])
            for found in on_ranks(graph, plan, Masked(kind).double(), loop):
                agree(found, wanted)
    if not shared:  # wrong variant: the first micro-batch's mask for all
        wrong = Masked(kind).double()
        for part in parts:
            wrong(**{**part, "mask": parts[0]["mask"]}).backward()
        with pytest.raises(AssertionError):
            agree(gradients(wrong), wanted, 1e-2)

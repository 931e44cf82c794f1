"""TinyLM of the field cases: a pre-norm decoder with causal attention, a few thousand parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal attention of `heads` heads; `offset` times a learned number of each head is added to its values."""

    def __init__(self, width: int, heads: int, offset: float) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.gain = offset
        self.offset = nn.Parameter(torch.randn(heads) / (offset or 1.0)) if offset else None

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """x: (B, S, d), mask: (B, S, S), True where attended, or None: causal -> (B, S, d)."""
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.offset is not None:
            v = v + self.gain * self.offset[:, None, None]
        whole = None if mask is None else mask[:, None]
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=whole, is_causal=mask is None)
        return self.out(h.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """x + attention(norm x), then x + MLP(norm x)."""

    def __init__(self, width: int, heads: int, offset: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, offset)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """x: (B, S, d) -> same."""
        x = x + self.attention(self.norm1(x), mask)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TinyLM(nn.Module):
    """Embedding, L blocks, norm, head. `reduction` is of the cross entropy over labels that are not -100."""

    def __init__(
        self, vocab: int = 24, width: int = 12, heads: int = 6, layers: int = 1, *, seq: int = 12, tie: bool = False,
        offset: float = 0.0, reduction: str = "mean",
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed, self.places = nn.Embedding(vocab, width), nn.Embedding(seq, width)
        self.blocks = nn.ModuleList(Block(width, heads, offset) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tie:
            self.head.weight = self.embed.weight
        self.reduction = reduction

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        """ids, labels: (B, S) -> loss ()."""
        x = self.embed(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x, mask)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=self.reduction)


def text(rows: int = 12, seq: int = 12, vocab: int = 24, *, seed: int = 0) -> dict[str, Tensor]:
    """Random ids and labels; row r ignores its first r % 5 labels, so shards have unequal counts."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (rows, seq), generator=g)
    labels = torch.randint(0, vocab, (rows, seq), generator=g)
    for row in range(rows):
        labels[row, : row % 5] = -100
    return {"ids": ids, "labels": labels}

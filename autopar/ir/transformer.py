"""A transformer in the figures that decide what a step of it costs, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A routed feed-forward.

    Attributes:
        count: experts of a layer; each token visits `top_k` of them.
        width: feed-forward width of one expert; `shared_width` of those that every token visits (0: none).
        dense_layers: so many first layers have a plain feed-forward instead; after them every `every`-th is routed.
    """

    count: int
    top_k: int
    width: int
    shared_width: int = 0
    dense_layers: int = 0
    every: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Latent attention (arXiv 2405.04434): ranks of compressed query (0: whole) and key-value, and head sizes."""

    query_rank: int
    key_value_rank: int
    rope: int
    plain: int
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """An encoder or a decoder of equal layers, with an embedding below and a head over `vocabulary` above.

    Attributes:
        head_size: of one attention head. `key_value_heads` is `heads` where heads don't share keys and values.
        width: of the feed-forward; `gated` ones have three matrices, others two.
        positions: rows of a learned table of positions (0: none).
        tied: embedding and head are one tensor.
        causal: each token attends to those before it alone.
        dropout: masks are drawn, and kept for the backward.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    head_size: int
    width: int
    gated: bool
    vocabulary: int
    positions: int = 0
    tied: bool = False
    causal: bool = True
    dropout: bool = False
    experts: Experts | None = None
    latent: Latent | None = None

    @property
    def routed_layers(self) -> int:
        """Layers with a routed feed-forward."""
        if self.experts is None:
            return 0
        return (self.layers - self.experts.dense_layers) // self.experts.every

    @property
    def matrices(self) -> int:
        """Matrices of a feed-forward."""
        return 3 if self.gated else 2

    @property
    def score_sizes(self) -> tuple[int, int]:
        """Sizes of a head's query and of its value."""
        if self.latent is not None:
            return self.latent.rope + self.latent.plain, self.latent.value
        return self.head_size, self.head_size

    def attention_matrices(self, tensor_ranks: int = 1) -> tuple[tuple[float, float, bool], ...]:
        """(rows in, columns out, cut over tensor ranks) of the matrices around attention, on one tensor rank."""
        t, h, latent = tensor_ranks, self.hidden, self.latent
        if latent is None:
            qkv = (self.heads + 2 * self.key_value_heads) * self.head_size / t
            return (h, qkv, True), (self.heads * self.head_size / t, h, True)
        query, value = (self.heads * size for size in self.score_sizes)
        plain = self.heads * (latent.plain + latent.value)
        down = ((h, latent.query_rank, False), (latent.query_rank, query / t, True)) if latent.query_rank else ()
        return (
            *(down or ((h, query / t, True),)),
            (h, latent.key_value_rank + latent.rope, False),
            (latent.key_value_rank, plain / t, True),
            (value / t, h, True),
        )

    @property
    def attention_parameters(self) -> int:
        """Of one layer."""
        return int(sum(rows * columns for rows, columns, _ in self.attention_matrices()))

    @property
    def dense_parameters(self) -> int:
        """Of one layer's plain feed-forward."""
        return self.matrices * self.hidden * self.width

    @property
    def expert_parameters(self) -> int:
        """Of all experts of one layer."""
        return self.matrices * self.hidden * self.experts.width * self.experts.count if self.experts else 0

    @property
    def shared_parameters(self) -> int:
        """Of one routed layer's shared experts and router."""
        if self.experts is None:
            return 0
        return self.matrices * self.hidden * self.experts.shared_width + self.hidden * self.experts.count

    @property
    def embedding_parameters(self) -> int:
        """Of one table of tokens."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All matrices and tables; norms and biases are left out (under 0.1 % of a model of any size)."""
        plain = self.layers - self.routed_layers
        routed = self.expert_parameters + self.shared_parameters
        tables = (1 if self.tied else 2) * self.embedding_parameters + self.positions * self.hidden
        return (
            self.layers * self.attention_parameters
            + plain * self.dense_parameters
            + self.routed_layers * routed
            + tables
        )

    def flops_per_token(self, seq: int, *, halved: bool) -> float:
        """Model flops of one token, forward and backward, nothing recomputed: 3·(2·parameters used + attention).

        `halved`: causal attention counts the half of the scores that is used, as the kernels do; else all of them,
        4·s·h a layer, as the "6N + 12Lhs" convention does.
        """
        plain = self.layers - self.routed_layers
        used = self.layers * self.attention_parameters + plain * self.dense_parameters
        if self.experts is not None:
            visited = self.matrices * self.hidden * self.experts.width * self.experts.top_k
            used += self.routed_layers * (visited + self.shared_parameters)
        query, value = self.score_sizes
        scores = self.layers * 2 * seq * self.heads * (query + value) * (0.5 if halved and self.causal else 1.0)
        return 3 * (2 * used + scores + 2 * self.embedding_parameters)

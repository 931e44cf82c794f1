"""Small functions of many kinds, for `tests.cases.forced`: name -> (function, parameters, inputs).

Sizes are 6 and 12, so that 2 and 3 divide them; data are random and unequal along the first dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cases.run import unequal

Made = tuple[Callable[..., Any], dict[str, Tensor], dict[str, Tensor]]


def ints(*shape: int, high: int, low: int = 0, seed: int = 3) -> Tensor:
    """Random integers, low .. high - 1."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def bools(*shape: int, seed: int = 4) -> Tensor:
    """Random truths, unequally many in each row."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.4


def positive(*shape: int, seed: int = 0) -> Tensor:
    """Above 0.2."""
    return unequal(*shape, seed=seed).abs() + 0.2


def probabilities(*shape: int, seed: int = 0) -> Tensor:
    """Of the last dim."""
    return unequal(*shape, seed=seed).softmax(-1)


def labels(n: int, classes: int) -> Tensor:
    """Unbalanced, half of the first rows' ignored."""
    found = ints(n, high=classes)
    found[: n // 2 : 2] = -100
    return found


def one(fn: Callable[..., Any], *shape: int, **inputs: Tensor) -> Made:
    """A function of x of this shape."""
    return fn, {"x": unequal(*shape)}, inputs


def two(fn: Callable[..., Any], a: tuple[int, ...], b: tuple[int, ...], **inputs: Tensor) -> Made:
    """A function of x and y."""
    return fn, {"x": unequal(*a), "y": unequal(*b, seed=1)}, inputs


def three(fn: Callable[..., Any], a: tuple[int, ...], b: tuple[int, ...], c: tuple[int, ...], **inputs: Tensor) -> Made:
    """A function of x, y and z."""
    return fn, {"x": unequal(*a), "y": unequal(*b, seed=1), "z": unequal(*c, seed=2)}, inputs


CLASS_WEIGHTS = torch.tensor([1.0, 10.0, 0.1, 3.0, 0.5, 2.0], dtype=torch.float64)

LOSSES: dict[str, Made] = {
    "nll_weighted": one(
        lambda x, t, w: F.nll_loss(x.log_softmax(-1), t, w), 12, 6, t=ints(12, high=6), w=CLASS_WEIGHTS
    ),
    "nll_sum": one(lambda x, t: F.nll_loss(x, t, reduction="sum"), 12, 6, t=labels(12, 6)),
    "nll_none": one(lambda x, t, w: F.nll_loss(x, t, w, reduction="none"), 12, 6, t=labels(12, 6), w=CLASS_WEIGHTS),
    "cross_entropy": one(lambda x, t: F.cross_entropy(x, t), 12, 6, t=labels(12, 6)),
    "cross_entropy_ignore": one(lambda x, t: F.cross_entropy(x, t, ignore_index=2), 12, 6, t=ints(12, high=6)),
    "cross_entropy_smooth": one(
        lambda x, t: F.cross_entropy(x, t, label_smoothing=0.2), 12, 6, t=labels(12, 6)
    ),
    "cross_entropy_all": one(
        lambda x, t, w: F.cross_entropy(x, t, w, label_smoothing=0.1), 12, 6, t=labels(12, 6), w=CLASS_WEIGHTS
    ),
    "cross_entropy_soft": one(lambda x, t: F.cross_entropy(x, t), 12, 6, t=probabilities(12, 6, seed=5)),
    "cross_entropy_soft_all": one(
        lambda x, t, w: F.cross_entropy(x, t, w, label_smoothing=0.1), 12, 6, t=probabilities(12, 6, seed=5),
        w=CLASS_WEIGHTS,
    ),
    "cross_entropy_dims": one(lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), 6, 6, 3, t=ints(6, 3, high=6)),
    "cross_entropy_2d": one(
        lambda x, t, w: F.cross_entropy(x, t, w), 6, 6, 2, 3, t=ints(6, 2, 3, high=6), w=CLASS_WEIGHTS
    ),
    "cross_entropy_one": one(lambda x, t: F.cross_entropy(x, t), 6, t=torch.tensor(2)),
    "kl_div": one(
        lambda x, t: F.kl_div(x.log_softmax(-1), t, reduction="batchmean"), 12, 6, t=probabilities(12, 6, seed=5)
    ),
    "kl_div_mean": one(lambda x, t: F.kl_div(x.log_softmax(-1), t), 12, 6, t=probabilities(12, 6, seed=5)),
    "kl_div_log": two(
        lambda x, y: F.kl_div(x.log_softmax(-1), y.log_softmax(-1), log_target=True), (12, 6), (12, 6)
    ),
    "mse": two(lambda x, y: F.mse_loss(x, y), (12, 6), (12, 6)),
    "mse_none": two(lambda x, y: F.mse_loss(x, y, reduction="none"), (12, 6), (12, 6)),
    "l1": two(lambda x, y: F.l1_loss(x, y), (12, 6), (12, 6)),
    "huber": two(lambda x, y: F.huber_loss(x, y, delta=0.7), (12, 6), (12, 6)),
    "smooth_l1": two(lambda x, y: F.smooth_l1_loss(x, y, beta=0.6), (12, 6), (12, 6)),
    "smooth_l1_sum": two(lambda x, y: F.smooth_l1_loss(x, y, reduction="sum"), (12, 6), (12, 6)),
    "bce": one(lambda x, t, w: F.binary_cross_entropy(x.sigmoid(), t, w), 12, 6, t=bools(12, 6).double(),
               w=positive(12, 1)),
    "bce_logits": one(
        lambda x, t, w: F.binary_cross_entropy_with_logits(x, t, pos_weight=w), 12, 6, t=bools(12, 6).double(),
        w=CLASS_WEIGHTS,
    ),
    "poisson": one(lambda x, t: F.poisson_nll_loss(x, t, full=True), 12, 6, t=ints(12, 6, high=5).double()),
    "gaussian_nll": three(lambda x, y, z: F.gaussian_nll_loss(x, y, z.exp()), (12, 6), (12, 6), (12, 6)),
    "cosine_embedding": two(
        lambda x, y, t: F.cosine_embedding_loss(x, y, t, margin=0.1), (12, 6), (12, 6), t=ints(12, high=2) * 2 - 1
    ),
    "hinge_embedding": one(lambda x, t: F.hinge_embedding_loss(x, t), 12, 6, t=ints(12, 6, high=2) * 2 - 1),
    "margin_ranking": two(
        lambda x, y, t: F.margin_ranking_loss(x, y, t, margin=0.3), (12,), (12,), t=ints(12, high=2) * 2 - 1
    ),
    "triplet": three(lambda x, y, z: F.triplet_margin_loss(x, y, z), (12, 6), (12, 6), (12, 6)),
    "soft_margin": one(lambda x, t: F.soft_margin_loss(x, t), 12, 6, t=ints(12, 6, high=2).double() * 2 - 1),
    "multi_margin": one(lambda x, t: F.multi_margin_loss(x, t), 12, 6, t=ints(12, high=6)),
    "multilabel_margin": one(
        lambda x, t: F.multilabel_margin_loss(x, t), 12, 6,
        t=torch.tensor([[3, 0, -1, 1, 2, 4], [1, -1, 0, 2, 3, 5]]).repeat(6, 1),
    ),
    "multilabel_soft": one(
        lambda x, t: F.multilabel_soft_margin_loss(x, t), 12, 6, t=bools(12, 6).double()
    ),
    "masked_mean": one(lambda x, m: (x * m).sum() / m.sum(), 12, 6, m=bools(12, 6).double()),
}  # fmt: skip


REDUCTIONS: dict[str, Made] = {
    "sum": one(lambda x: x.sum((0, 2)), 6, 6, 6),
    "mean": one(lambda x: (x.mean(), x.mean(1), x.mean((0, 1), keepdim=True)), 6, 6, 3),
    "max": one(lambda x: x.max(), 12, 6),
    "min": one(lambda x: x.min(), 12, 6),
    "max_dim": one(lambda x: x.max(1), 12, 6),
    "min_dim": one(lambda x: x.min(0, keepdim=True), 12, 6),
    "amax": one(lambda x: (x.amax((0, 1)), x.amin(0)), 12, 6, 3),
    "aminmax": one(lambda x: tuple(torch.aminmax(x, dim=1)), 12, 6),
    "maximum": two(lambda x, y: (torch.maximum(x, y), torch.fmin(x, y)), (12, 6), (6,)),
    "prod": one(lambda x: (x.prod(), x.prod(1)), 6, 6),
    "norm": one(lambda x: (x.norm(), x.norm(dim=1), x.norm(p=1), x.norm(p=3, dim=0)), 12, 6),
    "vector_norm": one(
        lambda x: (torch.linalg.vector_norm(x, torch.inf), torch.linalg.vector_norm(x, 2, 1, keepdim=True)), 12, 6
    ),
    "matrix_norm": one(lambda x: torch.linalg.matrix_norm(x), 6, 6, 6),
    "var": one(lambda x: (x.var(), x.var(0), x.var((0, 1), correction=0)), 12, 6, 3),
    "std": one(lambda x: (x.std(), x.std(1, keepdim=True)), 12, 6),
    "var_mean": one(lambda x: torch.var_mean(x, 0), 12, 6),
    "std_mean": one(lambda x: torch.std_mean(x, (0, 1)), 12, 6),
    "any_all": one(lambda x: ((x > 1).any(), (x > -9).all(), (x > 0).any(1), (x > 0).all(0), x * 2), 12, 6),
    "count_nonzero": one(lambda x: ((x > 0).count_nonzero(), (x > 0).sum(0), x * 2), 12, 6),
    "logsumexp": one(lambda x: (x.logsumexp(1), x.logsumexp((0, 1)), x.logsumexp(0, keepdim=True)), 12, 6),
    "cumsum": one(lambda x: (x.cumsum(0), x.cumsum(1)), 6, 6),
    "cumprod": one(lambda x: x.cumprod(1), 6, 6),
    "cummax": one(lambda x: (*x.cummax(0), *x.cummin(1)), 6, 6),
    "logcumsumexp": one(lambda x: x.logcumsumexp(1), 6, 6),
    "argmax": one(lambda x: (x.argmax(1), x.argmin(0), x.argmax(), x.argmax(1, keepdim=True), x * 2), 12, 6),
    "topk": one(lambda x: (*x.topk(3, 1), *x.topk(2, 0, largest=False)), 6, 6),
    "sort": one(lambda x: (*x.sort(1), *x.sort(0, descending=True)), 6, 6),
    "argsort": one(lambda x: (x.argsort(1), x.argsort(dim=0, stable=True), x * 2), 6, 6),
    "kthvalue": one(lambda x: (*x.kthvalue(2, 1), *x.kthvalue(3, 0)), 6, 6),
    "median": one(lambda x: (x.median(), *x.median(1), x.nanmedian()), 6, 6),
    "mode": one(lambda x: x.round().mode(1), 6, 6),
    "quantile": one(lambda x: (x.quantile(0.3), x.quantile(0.5, dim=1)), 6, 6),
    "nansum": one(lambda x: (x.nansum(), x.nansum(1), x.nanmean(0)), 6, 6),
    "trace": one(lambda x: (x.trace(), x.diagonal().sum()), 6, 6),
    "renorm": one(lambda x: x.renorm(2, 0, 1.0), 6, 6),
    "softmax": one(lambda x: (x.softmax(0), x.softmax(1)), 6, 6),
    "log_softmax": one(lambda x: (x.log_softmax(0), x.log_softmax(-1)), 6, 6),
    "softmin_gumbel": one(lambda x: (F.softmin(x, 1), F.normalize(x, dim=0), F.normalize(x, p=1.0)), 6, 6),
    "cosine_similarity": two(lambda x, y: F.cosine_similarity(x, y, 1), (6, 6), (6, 6)),
    "bincount": one(lambda x, t: (x * 2, t.bincount(minlength=6)), 12, 6, t=ints(12, high=6)),
    "histc": one(lambda x: (x * 2, x.detach().histc(6, -2, 2), x.detach().histc(4)), 12, 6),
    "one_hot": one(lambda x, t: (x * F.one_hot(t, 6), F.one_hot(t, 6).sum(0)), 12, 6, t=ints(12, high=6)),
    "searchsorted": one(
        lambda x, s: (x * 2, torch.searchsorted(s, x.detach()), torch.bucketize(x.detach(), s)), 12, 6,
        s=torch.linspace(-2, 2, 6, dtype=torch.float64),
    ),
    "diff": one(lambda x: (x.diff(dim=0), x.diff(dim=1, n=2)), 6, 6),
}  # fmt: skip


INDEXING: dict[str, Made] = {
    "gather": one(lambda x, t: x.gather(1, t), 12, 6, t=ints(12, 6, high=6)),
    "gather_rows": one(lambda x, t: x.gather(0, t), 12, 6, t=ints(6, 6, high=12)),
    "scatter": two(lambda x, y, t: x.scatter(1, t, y), (12, 6), (12, 6), t=torch.randperm(6).repeat(12, 1)),
    "scatter_value": one(lambda x, t: x.scatter(0, t, 3.0), 6, 6, t=ints(3, 6, high=6)),
    "scatter_add": two(lambda x, y, t: x.scatter_add(0, t, y), (12, 6), (12, 6), t=ints(12, 6, high=12)),
    "scatter_reduce": two(
        lambda x, y, t: (x.scatter_reduce(0, t, y, "amax"), x.scatter_reduce(0, t, y, "mean")), (6, 6), (6, 6),
        t=ints(6, 6, high=6),
    ),
    "index_put": two(
        lambda x, y, t: x.index_put((t,), y), (12, 6), (6, 6), t=torch.randperm(12)[:6]
    ),
    "index_put_accumulate": two(
        lambda x, y, t: x.index_put((t,), y, accumulate=True), (12, 6), (12, 6), t=ints(12, high=12)
    ),
    "index_put_two": two(
        lambda x, y, s, t: x.index_put((s, t), y), (6, 6, 3), (6, 3), s=torch.randperm(6), t=ints(6, high=6)
    ),
    "assign_columns": two(lambda x, y, t: _columns(x, y, t), (6, 12), (6, 6), t=torch.randperm(12)[:6]),
    "index_add": two(lambda x, y, t: x.index_add(0, t, y, alpha=2), (12, 6), (6, 6), t=ints(6, high=12)),
    "index_copy": two(lambda x, y, t: x.index_copy(0, t, y), (12, 6), (6, 6), t=torch.randperm(12)[:6]),
    "index_fill": one(lambda x, t: x.index_fill(1, t, 2.0), 12, 6, t=torch.tensor([0, 4])),
    "index_select": one(lambda x, t: (x.index_select(0, t), x.index_select(1, t)), 6, 6, t=ints(6, high=6)),
    "index": one(lambda x, s, t: (x[s, t], x[:, t], x[s, :, t]), 6, 6, 6, s=ints(6, high=6), t=ints(6, high=6, seed=9)),
    "index_list": one(lambda x: (x[..., [-2], :], x[[0, -1]], x[:, [[0, 1], [2, 3]]]), 6, 6, 3),
    "index_where": one(lambda x, m: torch.where(m, x, x.mean()), 12, 6, m=bools(12, 6)),
    "where": two(lambda x, y, m: torch.where(m, x, y), (12, 6), (6,), m=bools(12, 1)),
    "masked_fill": one(lambda x, m: x.masked_fill(m, -1e3).softmax(1), 12, 6, m=bools(12, 6)),
    "masked_scatter": two(lambda x, y, m: x.masked_scatter(m, y), (6, 6), (6, 6), m=bools(6, 6)),
    "assign_rows": two(lambda x, y: _assigned(x, y), (12, 6), (3, 6)),
    "assign_mask": one(lambda x, m: _masked(x, m), 12, 6, m=bools(12, 6)),
    "take_along_dim": one(lambda x: x.take_along_dim(x.argsort(0), 0), 6, 6),
    "take": one(lambda x, t: x.take(t), 6, 6, t=ints(6, high=36)),
    "put": two(lambda x, y, t: x.put(t, y), (6, 6), (6,), t=torch.randperm(36)[:6]),
    "embedding": one(lambda x, t: F.embedding(t, x), 12, 6, t=ints(6, 2, high=12)),
    "embedding_padding": one(
        lambda x, t: F.embedding(t, x, padding_idx=8), 12, 6, t=torch.tensor([[8, 2, 1], [8, 8, 5]])
    ),
    "embedding_frequency": one(
        lambda x, t: F.embedding(t, x, scale_grad_by_freq=True), 12, 6, t=ints(6, 4, high=3)
    ),
    "embedding_bag": one(lambda x, t: F.embedding_bag(t, x, mode="mean"), 12, 6, t=ints(6, 3, high=12)),
    "embedding_bag_sum": one(
        lambda x, t, o: F.embedding_bag(t, x, o, mode="sum"), 12, 6, t=ints(12, high=12), o=torch.tensor([0, 3, 3, 7])
    ),
    "embedding_bag_max": one(lambda x, t: F.embedding_bag(t, x, mode="max"), 12, 6, t=ints(6, 3, high=12)),
    "select_narrow": one(lambda x: (x[2], x[:, -1], x.narrow(0, 2, 6), x[3:9:2], x[:, ::2]), 12, 6),
    "unbind_chunk": one(lambda x: (*x.chunk(3, 1), x.unbind(0)[3], *x.split([2, 4, 6])), 12, 6),
    "tensor_split": one(lambda x: (*x.tensor_split(4, 0), x.hsplit(3)[1]), 6, 6),
}  # fmt: skip


def _assigned(x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x[2:8:2] = y
    x[:, 1] = 0.5
    return x


def _columns(x: Tensor, y: Tensor, t: Tensor) -> Tensor:
    x = x * 1
    x[:, t] = y
    return x


def _masked(x: Tensor, m: Tensor) -> Tensor:
    x = x * 2
    x[m] = 0.25
    return x


VIEWS: dict[str, Made] = {
    "view_merge": one(lambda x: x.view(36, 6) * 2, 6, 6, 6),
    "view_regroup": one(lambda x: x.view(-1, 6).exp(), 12, 8),
    "view_middle": one(lambda x: x.reshape(6, 36).sin(), 6, 6, 6),
    "view_split": one(lambda x: x.view(6, 2, 3, 2).sin(), 12, 6),
    "unflatten": one(lambda x: x.unflatten(1, (3, 2)).permute(2, 0, 1).flatten(1), 12, 6),
    "permute_reshape": one(lambda x: x.permute(2, 0, 1).reshape(12, 18).sin(), 6, 6, 6),
    "movedim": one(lambda x: (x.movedim(0, 2), x.swapaxes(0, 1), x.mT), 6, 6, 3),
    "squeeze": one(lambda x: (x.squeeze(), x.squeeze(1), x.unsqueeze(-1)), 6, 1, 6),
    "expand": one(lambda x: (x.expand(-1, 6, -1), x.unsqueeze(0).expand(3, -1, 12, -1)), 6, 1, 3),
    "broadcast_to": two(lambda x, y: (torch.broadcast_to(x, (6, 12, 6)), x + y), (12, 1), (6, 1, 6)),
    "repeat": one(lambda x: (x.repeat(2, 1), x.repeat(3, 1, 2), x.tile(2)), 6, 6),
    "repeat_interleave": one(lambda x: (x.repeat_interleave(2, 0), x.repeat_interleave(3, 1)), 6, 6),
    "repeat_interleave_flat": one(lambda x: x.repeat_interleave(2), 6, 6),
    "repeat_interleave_counts": one(
        lambda x, t: x.repeat_interleave(t, 0, output_size=12), 6, 6, t=torch.tensor([1, 3, 0, 2, 2, 4])
    ),
    "roll": one(lambda x: (x.roll(1, 0), x.roll((2, -1), (0, 1)), x.roll(3)), 6, 6),
    "flip": one(lambda x: (x.flip(0), x.flip(0, 1), x.fliplr(), x.rot90()), 6, 6),
    "pad": one(lambda x: (F.pad(x, (1, 2)), F.pad(x, (0, 0, 3, 0)), F.pad(x, (1, 1), value=2.5)), 6, 6),
    "pad_negative": one(lambda x: F.pad(x, (-1, 2)), 6, 6),
    "pad_reflect": one(lambda x: (F.pad(x, (1, 2), "reflect"), F.pad(x, (2, 1), "replicate")), 6, 6),
    "pad_circular": one(lambda x: F.pad(x, (1, 2), "circular"), 6, 2, 6),
    "pad_2d": one(
        lambda x: (F.pad(x, (1, 2, 0, 1), "reflect"), F.pad(x, (1, 0, 2, 1), "replicate")), 6, 2, 6, 6
    ),
    "pad_3d": one(lambda x: F.pad(x, (1, 0, 1, 1, 0, 1), "replicate"), 6, 2, 3, 3, 3),
    "shifted": one(lambda x: x[1:] - x[:-1], 12, 6),
    "unfold": one(lambda x: x.unfold(0, 3, 3), 12, 6),
    "unfold_overlap": one(lambda x: x.unfold(1, 3, 1), 6, 12),
    "im2col": one(lambda x: F.unfold(x, 2, stride=2), 6, 3, 4, 4),
    "col2im": one(lambda x: F.fold(x, (4, 4), 2, stride=2), 6, 12, 4),
    "as_strided": one(lambda x: x.as_strided((5, 4), (6, 1), 3), 6, 6),
    "cat": two(lambda x, y: (torch.cat([x, y]), torch.cat([x, y, x], 1)), (6, 6), (6, 6)),
    "stack": two(lambda x, y: (torch.stack([x, y]), torch.stack([x, y], 2), torch.hstack([x, y])), (6, 6), (6, 6)),
    "tril": one(lambda x: (x.tril(), x.triu(1), x.tril(-2)), 6, 6, 6),
    "diag": one(lambda x: (x.diag(), x.diagonal(1), x.diag_embed()), 6, 6),
    "meshgrid": two(lambda x, y: torch.meshgrid(x, y, indexing="ij"), (6,), (6,)),
    "cartesian": two(lambda x, y: torch.cartesian_prod(x, y), (6,), (6,)),
    "block_diag": two(lambda x, y: torch.block_diag(x, y), (3, 2), (2, 3)),
    "pixel_shuffle": one(lambda x: (F.pixel_shuffle(x, 2), F.channel_shuffle(x, 2)), 6, 12, 3, 3),
    "pixel_unshuffle": one(lambda x: F.pixel_unshuffle(x, 2), 6, 3, 4, 4),
    "contiguous": one(lambda x: x.t().contiguous().view(6, 12).clone(), 12, 6),
    "select_scatter": two(lambda x, y: (x.select_scatter(y, 0, 2), x.slice_scatter(x[2:4], 0, 1, 3)), (6, 6), (6,)),
    "diagonal_scatter": two(lambda x, y: x.diagonal_scatter(y), (6, 6), (6,)),
    "atleast": one(lambda x: (torch.atleast_3d(x), x.ravel()), 6, 6),
}  # fmt: skip


def attention(query: int = 4, keys: int = 4, *, heads: int = 6, kv: int = 6, batch: int = 6, **options: Any) -> Made:
    """scaled_dot_product_attention of x, y, z: query, key and value."""
    mask = options.pop("mask", None)
    inputs = {} if mask is None else {"mask": mask}

    def fn(x: Tensor, y: Tensor, z: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(x, y, z, attn_mask=mask, **options)

    return three(fn, (batch, heads, query, 4), (batch, kv, keys, 4), (batch, kv, keys, 4), **inputs)


PRODUCTS: dict[str, Made] = {
    "matmul": two(lambda x, y: x @ y, (12, 6), (6, 12)),
    "matmul_batch": two(lambda x, y: x @ y, (6, 6, 6), (6, 6)),
    "matmul_broadcast": two(lambda x, y: x @ y, (6, 1, 6, 6), (3, 6, 6)),
    "matmul_vectors": two(lambda x, y: (x @ y, x[0] @ y, y @ y), (12, 6), (6,)),
    "bmm": two(lambda x, y: torch.bmm(x, y), (6, 6, 6), (6, 6, 6)),
    "baddbmm": three(lambda x, y, z: torch.baddbmm(z, x, y, beta=0.5, alpha=2), (6, 6, 6), (6, 6, 6), (6, 1, 6)),
    "addmm": three(lambda x, y, z: torch.addmm(z, x, y, beta=0.5, alpha=2), (12, 6), (6, 6), (6,)),
    "addbmm": three(lambda x, y, z: torch.addbmm(z, x, y), (6, 6, 6), (6, 6, 6), (6, 6)),
    "addmv": three(lambda x, y, z: torch.addmv(z, x, y), (12, 6), (6,), (12,)),
    "addr": three(lambda x, y, z: torch.addr(z, x, y), (6,), (12,), (6, 12)),
    "outer": two(lambda x, y: torch.outer(x, y), (6,), (12,)),
    "inner": two(lambda x, y: torch.inner(x, y), (6, 6), (12, 6)),
    "kron": two(lambda x, y: torch.kron(x, y), (6, 2), (3, 6)),
    "tensordot": two(lambda x, y: torch.tensordot(x, y, 2), (6, 3, 2), (3, 2, 6)),
    "linear": three(lambda x, y, z: F.linear(x, y, z), (6, 3, 6), (12, 6), (12,)),
    "bilinear": three(lambda x, y, z: F.bilinear(x, y, z), (6, 6), (6, 3), (6, 6, 3)),
    "einsum": two(lambda x, y: torch.einsum("bij,bjk->bik", x, y), (6, 6, 6), (6, 6, 6)),
    "einsum_heads": two(lambda x, y: torch.einsum("bqhd,bkhd->bhqk", x, y), (6, 3, 6, 2), (6, 3, 6, 2)),
    "einsum_outer": two(lambda x, y: torch.einsum("bi,bj->bij", x, y), (6, 6), (6, 6)),
    "einsum_diagonal": one(lambda x: (torch.einsum("ii->i", x), torch.einsum("ij->", x)), 6, 6),
    "einsum_three": three(lambda x, y, z: torch.einsum("bi,ij,bj->b", x, y, z), (6, 6), (6, 6), (6, 6)),
    "einsum_ellipsis": two(lambda x, y: torch.einsum("...i,ij->...j", x, y), (6, 3, 6), (6, 6)),
    "multi_dot": three(lambda x, y, z: torch.linalg.multi_dot([x, y, z]), (6, 12), (12, 6), (6, 6)),
    "matrix_power": one(lambda x: torch.linalg.matrix_power(x * 0.1, 3), 6, 6),
    "cdist": two(lambda x, y: torch.cdist(x, y), (6, 6), (12, 6)),
    "cdist_one": two(lambda x, y: torch.cdist(x, y, p=1.0), (6, 6), (12, 6)),
    "pdist": one(lambda x: F.pdist(x), 6, 6),
    "pairwise_distance": two(lambda x, y: F.pairwise_distance(x, y), (6, 6), (6, 6)),
    "cross": two(lambda x, y: torch.linalg.cross(x, y), (6, 3), (6, 3)),
    "inverse": one(lambda x: torch.linalg.inv(x + 20 * torch.eye(6, dtype=x.dtype)), 6, 6),
    "solve": two(lambda x, y: torch.linalg.solve(x + 20 * torch.eye(6, dtype=x.dtype), y), (6, 6), (6, 6)),
    "determinant": one(lambda x: torch.linalg.slogdet(x + 20 * torch.eye(6, dtype=x.dtype))[1], 6, 6),
    "cholesky": one(lambda x: torch.linalg.cholesky(x @ x.mT + 20 * torch.eye(6, dtype=x.dtype)), 6, 6, 6),
    "attention": attention(6, 6),
    "attention_causal": attention(6, 6, is_causal=True),
    "attention_cross": attention(3, 6),
    "attention_causal_cross": attention(3, 6, is_causal=True),
    "attention_bool": attention(6, 6, mask=bools(6, 1, 6, 6) | torch.eye(6, dtype=torch.bool)),
    "attention_float": attention(6, 6, mask=unequal(6, 6, 6, 6, seed=8)),
    "attention_padding": attention(6, 6, mask=bools(6, 1, 1, 6) | (torch.arange(6) == 0)),
    "attention_table": attention(6, 6, mask=unequal(6, 6, seed=8)),
    "attention_grouped": attention(6, 6, heads=6, kv=3, enable_gqa=True),
    "attention_grouped_causal": attention(6, 6, heads=6, kv=2, enable_gqa=True, is_causal=True),
    "attention_one_key_head": attention(6, 6, heads=6, kv=1, enable_gqa=True, is_causal=True),
    "attention_no_batch": three(
        lambda x, y, z: F.scaled_dot_product_attention(x, y, z, is_causal=True), (6, 6, 4), (6, 6, 4), (6, 6, 4)
    ),
    "attention_scale": attention(6, 6, scale=0.3),
    "attention_learned_mask": three(
        lambda x, y, z: F.scaled_dot_product_attention(x, x, y, attn_mask=z), (6, 6, 3, 4), (6, 6, 3, 4), (6, 3, 3)
    ),
    "attention_wide_value": three(
        lambda x, y, z: F.scaled_dot_product_attention(x, y, z), (6, 6, 3, 4), (6, 6, 3, 4), (6, 6, 3, 6)
    ),
    "attention_narrow_value": three(
        lambda x, y, z: F.scaled_dot_product_attention(x, y, z, is_causal=True, enable_gqa=True),
        (6, 6, 3, 6), (6, 3, 3, 6), (6, 3, 3, 4),
    ),
}  # fmt: skip


def norm(fn: Callable[..., Tensor], shape: tuple[int, ...], channels: tuple[int, ...], *, affine: bool = True) -> Made:
    """`fn(x, weight, bias)`."""
    if not affine:
        return one(lambda x: fn(x, None, None), *shape)
    return three(lambda x, y, z: fn(x, y, z), shape, channels, channels)


def _batch_norm(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, y, z, training=True)


MODEL_PARTS: dict[str, Made] = {
    "conv1d": three(lambda x, y, z: F.conv1d(x, y, z, padding=1), (6, 6, 6), (12, 6, 3), (12,)),
    "conv1d_causal": two(lambda x, y: F.conv1d(F.pad(x, (2, 0)), y), (6, 6, 6), (12, 6, 3)),
    "conv2d": three(lambda x, y, z: F.conv2d(x, y, z, padding=1), (6, 3, 6, 6), (6, 3, 3, 3), (6,)),
    "conv2d_patches": three(lambda x, y, z: F.conv2d(x, y, z, stride=3), (6, 3, 6, 6), (6, 3, 3, 3), (6,)),
    "conv2d_stem": two(lambda x, y: F.conv2d(x, y, stride=2, padding=3), (6, 3, 12, 12), (6, 3, 7, 7)),
    "conv2d_dilated": three(lambda x, y, z: F.conv2d(x, y, z, dilation=2), (6, 6, 6, 6), (6, 6, 2, 2), (6,)),
    "conv2d_grouped": three(lambda x, y, z: F.conv2d(x, y, z, groups=3), (6, 6, 4, 4), (12, 2, 3, 3), (12,)),
    "conv2d_depthwise": three(lambda x, y, z: F.conv2d(x, y, z, groups=6), (6, 6, 4, 4), (6, 1, 3, 3), (6,)),
    "conv2d_multiplier": three(lambda x, y, z: F.conv2d(x, y, z, groups=6), (6, 6, 4, 4), (12, 1, 3, 3), (12,)),
    "conv2d_same": two(lambda x, y: F.conv2d(x, y, padding="same"), (6, 3, 5, 5), (6, 3, 2, 2)),
    "conv2d_single": two(lambda x, y: F.conv2d(x, y, padding=1), (3, 6, 6), (6, 3, 3, 3)),
    "conv3d": three(lambda x, y, z: F.conv3d(x, y, z), (6, 3, 3, 4, 4), (6, 3, 2, 2, 2), (6,)),
    "conv_transposed": three(lambda x, y, z: F.conv_transpose2d(x, y, z, 2), (6, 6, 3, 3), (6, 3, 2, 2), (3,)),
    "conv_transposed_odd": three(
        lambda x, y, z: F.conv_transpose2d(x, y, z, 2, 1, 1, dilation=2), (6, 6, 3, 3), (6, 6, 3, 3), (6,)
    ),
    "conv_transposed_grouped": three(
        lambda x, y, z: F.conv_transpose1d(x, y, z, 2, groups=3), (6, 6, 4), (6, 2, 3), (6,)
    ),
    "max_pool": one(lambda x: F.max_pool2d(x, 2), 6, 6, 4, 4),
    "max_pool_overlap": one(lambda x: F.max_pool2d(x, 3, 2, 1), 6, 6, 5, 5),
    "max_pool_indices": one(lambda x: F.max_pool2d(x, 2, return_indices=True), 6, 6, 4, 4),
    "max_pool_1d": one(lambda x: F.max_pool1d(x, 2), 6, 6, 6),
    "max_pool_3d": one(lambda x: F.max_pool3d(x, 2), 6, 2, 4, 4, 4),
    "max_unpool": one(lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), 6, 6, 4, 4),
    "avg_pool": one(lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), 6, 6, 5, 5),
    "avg_pool_1d": one(lambda x: F.avg_pool1d(x, 2), 6, 6, 6),
    "avg_pool_3d": one(lambda x: F.avg_pool3d(x, 2), 6, 2, 4, 4, 4),
    "lp_pool": one(lambda x: F.lp_pool2d(x, 2.0, 2), 6, 6, 4, 4),
    "adaptive_avg_pool": one(lambda x: F.adaptive_avg_pool2d(x, (2, 3)), 6, 6, 5, 5),
    "adaptive_avg_pool_whole": one(lambda x: F.adaptive_avg_pool2d(x, 1), 6, 6, 4, 4),
    "adaptive_avg_pool_1d": one(lambda x: F.adaptive_avg_pool1d(x, 4), 6, 6, 6),
    "adaptive_max_pool": one(lambda x: F.adaptive_max_pool2d(x, (2, 3)), 6, 6, 5, 5),
    "upsample_nearest": one(lambda x: F.interpolate(x, scale_factor=2), 6, 6, 3, 3),
    "upsample_bilinear": one(lambda x: F.interpolate(x, size=(5, 7), mode="bilinear"), 6, 6, 3, 3),
    "upsample_corners": one(lambda x: F.interpolate(x, size=5, mode="linear", align_corners=True), 6, 6, 3),
    "upsample_bicubic": one(lambda x: F.interpolate(x, scale_factor=1.5, mode="bicubic"), 6, 6, 4, 4),
    "upsample_smooth": one(lambda x: F.interpolate(x, size=(3, 3), mode="bilinear", antialias=True), 6, 6, 6, 6),
    "upsample_area": one(lambda x: F.interpolate(x, size=(2, 2), mode="area"), 6, 6, 4, 4),
    "grid_sample": two(lambda x, y: F.grid_sample(x, y.tanh(), align_corners=False), (6, 6, 4, 4), (6, 3, 3, 2)),
    "affine_grid": one(lambda x: F.affine_grid(x, [6, 1, 3, 3], align_corners=False), 6, 2, 3),
    "layer_norm": norm(lambda x, w, b: F.layer_norm(x, (6,), w, b), (6, 6, 6), (6,)),
    "layer_norm_plain": norm(lambda x, w, b: F.layer_norm(x, (6,), w, b), (6, 6, 6), (), affine=False),
    "layer_norm_two_dims": norm(lambda x, w, b: F.layer_norm(x, (6, 3), w, b), (6, 6, 3), (6, 3)),
    "layer_norm_permuted": norm(
        lambda x, w, b: F.layer_norm(x.permute(1, 2, 0), (6,), w, b).view(12, 6) * 2, (6, 2, 6), (6,)
    ),
    "rms_norm": two(lambda x, y: F.rms_norm(x, (6,), y), (6, 6, 6), (6,)),
    "rms_norm_plain": one(lambda x: F.rms_norm(x, (6,)), 6, 6, 6),
    "group_norm": norm(lambda x, w, b: F.group_norm(x, 2, w, b), (6, 6, 6), (6,)),
    "group_norm_plain": norm(lambda x, w, b: F.group_norm(x, 3, w, b), (6, 6, 4), (), affine=False),
    "group_norm_one": norm(lambda x, w, b: F.group_norm(x, 1, w, b), (6, 6, 2, 3), (6,)),
    "instance_norm": norm(lambda x, w, b: F.instance_norm(x, weight=w, bias=b), (6, 6, 6), (6,)),
    "batch_norm": norm(_batch_norm, (12, 6, 3), (6,)),
    "batch_norm_rows": norm(_batch_norm, (12, 6), (6,)),
    "batch_norm_eval": three(
        lambda x, y, z, m, v: F.batch_norm(x, m, v, y, z), (6, 6, 3), (6,), (6,), m=unequal(6), v=positive(6)
    ),
    "local_response_norm": one(lambda x: F.local_response_norm(x, 3), 6, 6, 4),
    "activations": one(
        lambda x: (F.gelu(x), F.gelu(x, approximate="tanh"), F.silu(x), F.mish(x), F.elu(x), F.selu(x), F.celu(x)), 6, 6
    ),
    "activations_more": one(
        lambda x: (
            F.hardswish(x), F.hardtanh(x), F.hardsigmoid(x), F.leaky_relu(x), F.logsigmoid(x), F.softplus(x),
            F.softshrink(x), F.hardshrink(x), F.tanhshrink(x), F.threshold(x, 0.1, 0.2), F.relu6(x), F.softsign(x),
        ),
        6, 6,
    ),
    "prelu": two(lambda x, y: F.prelu(x, y), (6, 6, 3), (6,)),
    "glu": one(lambda x: (F.glu(x, 1), F.glu(x, 0)), 6, 6),
    "swiglu": one(lambda x: _swiglu(x), 6, 12),
    "dropout_off": one(lambda x: F.dropout(x, 0.0), 6, 6),
}  # fmt: skip


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _rotated(x: Tensor, f: Tensor) -> Tensor:
    whole = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(whole * torch.polar(torch.ones_like(f), f)).flatten(-2)


def _router(x: Tensor) -> tuple[Tensor, ...]:
    """Tokens to experts: counts of the whole batch decide a capacity."""
    score, expert = x.softmax(-1).topk(2, -1)
    chosen = F.one_hot(expert, x.shape[-1]).sum(1)
    counts = torch.bincount(expert.flatten(), minlength=x.shape[-1])
    place = chosen.cumsum(0) * chosen
    kept = (place <= counts.max() - 1) & (chosen > 0)
    return (x * kept).sum(1) * score.sum(1) / counts.sum(), counts, kept


POINTWISE: dict[str, Made] = {
    "arithmetic": two(
        lambda x, y: (x + y, x - 2 * y, x * y, x / (y.abs() + 1), 3 - x, 2 / (x.abs() + 1)), (12, 6), (6,)
    ),
    "add_scaled": two(
        lambda x, y: (torch.add(x, y, alpha=3), torch.addcmul(x, x, y, value=2), torch.lerp(x, y, 0.3)), (6, 6), (6,)
    ),
    "add_number": one(lambda x: (x + 2.5, 1 - x, x * 0 + 1), 6, 6),
    "addcdiv": two(lambda x, y: torch.addcdiv(x, x, y.abs() + 1, value=0.5), (6, 6), (6, 6)),
    "powers": one(lambda x: (x**2, x.abs() ** 1.5, 2**x, (x.abs() + 1).sqrt(), (x.abs() + 1).rsqrt()), 6, 6),
    "pow_tensor": two(lambda x, y: (x.abs() + 0.5) ** y, (6, 6), (6,)),
    "exponentials": one(lambda x: (x.exp(), x.expm1(), x.abs().log1p(), (x.abs() + 1).log2(), x.sigmoid()), 6, 6),
    "trigonometry": one(lambda x: (x.sin(), x.cos(), x.tan(), x.atan(), x.tanh(), x.sinh(), x.erf()), 6, 6),
    "atan2_hypot": two(lambda x, y: (torch.atan2(x, y), torch.hypot(x, y)), (6, 6), (6,)),
    "rounding": one(lambda x: (x * 2, x.round(), x.floor(), x.trunc(), x.frac(), x.sign(), x.detach().ceil()), 6, 6),
    "remainder": two(lambda x, y: (x.remainder(1.5), x.fmod(2.0), x * (x // (y.abs() + 1)).detach()), (6, 6), (6,)),
    "clamp": two(lambda x, y: (x.clamp(-1, 1), x.clamp(min=y), x.clamp_max(0.5)), (6, 6), (6,)),
    "comparisons": two(lambda x, y: (x * (x > y), x == y, x.ne(y), (x < y) & (x >= 0), ~(x > 0)), (6, 6), (6,)),
    "isfinite": one(lambda x: (x * 2, x.isnan(), (x.detach() * 0).log().isinf(),
                              (x.detach() * 0).log().nan_to_num(neginf=2.0)), 6, 6),
    "integers": one(lambda x, t: (x * t, t // 2, t % 3, t << 1, t ^ 3, -t, t.abs(), t.double() / 2), 6, 6,
                    t=ints(6, 6, high=9)),
    "casts": one(lambda x, t: (x.to(torch.float32) * 2, (x > 0).to(torch.int64), x * t.to(x.dtype), x.long()), 6, 6,
                 t=ints(6, high=9)),
    "mixed_types": one(lambda x, t, m: (x + t, t * m, t + 0.5, m.sum(), m + m), 6, 6, t=ints(6, 6, high=9),
                       m=bools(6, 6)),
    "half": one(lambda x: (x.to(torch.bfloat16).double() * 2, x.half().double() * 3), 6, 6),
    "special": one(
        lambda x: (
            torch.special.i0e(x), torch.lgamma(x.abs() + 1), torch.digamma(x.abs() + 1), torch.erfinv(x.tanh() / 2),
            torch.special.entr(x.abs() + 0.1), torch.xlogy(x, x.abs() + 1), torch.logit(x.sigmoid()), x.erfc(),
        ),
        6, 6,
    ),
    "logaddexp": two(lambda x, y: (torch.logaddexp(x, y), torch.copysign(x, y)), (6, 6), (6,)),
    "factories": one(
        lambda x: (
            x + torch.arange(6), x * torch.ones_like(x), x + torch.full((6, 1), 2.0), x + x.new_zeros(6, 6),
            x + torch.linspace(0, 1, 6), x * torch.eye(6), x + torch.tensor([1.0, 2, 3, 4, 5, 6]),
        ),
        6, 6,
    ),
    "positions": one(lambda x: x + torch.arange(x.shape[1])[None] * torch.arange(0, 24, 2)[:, None], 12, 6),
    "causal_mask": one(
        lambda x: x.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), float("-inf")).softmax(-1), 6, 6, 6
    ),
    "complex_rope": one(lambda x, f: _rotated(x, f), 6, 3, 6, 4, f=unequal(6, 2)),
    "complex_parts": one(
        lambda x: (torch.view_as_complex(x).abs(), torch.view_as_complex(x).angle(), torch.view_as_complex(x).real,
                   torch.view_as_complex(x).conj().imag),
        6, 6, 2,
    ),
    "complex_product": two(
        lambda x, y: torch.view_as_real(torch.view_as_complex(x) @ torch.view_as_complex(y).mH), (6, 6, 2), (6, 6, 2)
    ),
    "complex_made": two(lambda x, y: torch.complex(x, y).exp().real, (6, 6), (6, 6)),
    "polar": two(lambda x, y: torch.view_as_real(torch.polar(x.abs() + 1, y)), (6, 6), (6, 6)),
    "fft": one(lambda x: (torch.fft.rfft(x).abs(), torch.fft.fft(x, dim=0).real), 6, 6),
    "fft_inverse": one(lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2, n=6), 6, 6),
    "detached": two(lambda x, y: (x * y.detach() + y, (x - x.detach()).exp()), (6, 6), (6, 6)),
    "straight_through": one(lambda x: x + (x.round() - x).detach(), 6, 6),
    "router": one(_router, 12, 6),
}  # fmt: skip

FAMILIES = (LOSSES, REDUCTIONS, INDEXING, VIEWS, PRODUCTS, MODEL_PARTS, POINTWISE)
FUNCTIONS: dict[str, Made] = {name: made for family in FAMILIES for name, made in family.items()}

LONG = {
    "upsample_bicubic", "special", "activations_more", "cosine_embedding", "upsample_bilinear", "factories",
    "conv3d", "conv2d_same", "unbind_chunk", "lp_pool", "conv_transposed_odd", "complex_parts",
    "group_norm_one", "select_narrow", "conv_transposed_grouped", "conv2d_single", "conv2d_multiplier",
    "trigonometry", "rounding", "quantile", "attention_wide_value", "detached",
}  # fmt: skip
"""Many nodes, or much like another: run by hand."""

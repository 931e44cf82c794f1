"""Every rule of the table, on drawn shapes and axis sizes: does cutting and joining give what the op gives?"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopar.ir.graph import Ref, TensorMeta
from autopar.ir.layout import P, R, S
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.strategy import Rule
from autopar.sharding import RuleCache, one_axis_rules
from tests.sharding.truth import check, fits, make, node_of, strategy_of, with_node_units

CACHE = RuleCache()
QUICK = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
Draw = Callable[[st.DataObject], Any]


def line(size: int) -> Mesh:
    return Mesh(axes=(Axis(name="x", size=size),))


def f(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def i(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def failures(node: Any, metas: tuple[TensorMeta, ...], size: int, rules: tuple[Rule, ...] | None = None) -> list[str]:
    """Every rule that fits, on one axis."""
    found = []
    mesh = line(size)
    for rule in one_axis_rules(node, metas, CACHE) if rules is None else rules:
        if fits(node, metas, (rule,), mesh) and (wrong := check(node, metas, strategy_of((rule,), mesh), mesh)):
            found.append(f"{node.op} {rule}: {wrong}")
    return found


# Each case: size of the axis n and a small multiplier m (1 or 2) -> op and arguments.
ATT = "aten._scaled_dot_product_flash_attention_for_cpu"
CASES: dict[str, Callable[[int, int], tuple[Any, ...]]] = {
    "view_merge": lambda n, m: ("aten.view.default", f(n * m, n, 4), [n * m * n, 4]),
    "view_split": lambda n, m: ("aten.view.default", f(n * m * n, 4), [n * m, n, 2, 2]),
    "view_mixed": lambda n, m: ("aten.reshape.default", f(2 * n, 3 * n), [3 * n, 2 * n]),
    "view_ones": lambda n, m: ("aten.view.default", f(1, n * m, 1, 4), [n * m, 1, 4, 1]),
    "squeeze": lambda n, m: ("aten.squeeze.default", f(n, 1, n * m)),
    "squeeze_dim": lambda n, m: ("aten.squeeze.dim", f(n, 1, n * m), 1),
    "unsqueeze": lambda n, m: ("aten.unsqueeze.default", f(n, n * m), 1),
    "permute": lambda n, m: ("aten.permute.default", f(n, 2 * n, n * m), [2, 0, 1]),
    "transpose": lambda n, m: ("aten.transpose.int", f(n, 2, n * m), -1, 0),
    "t": lambda n, m: ("aten.t.default", f(n, n * m)),
    "expand": lambda n, m: ("aten.expand.default", f(n, 1, 4), [n * m, n, 2 * n, -1]),
    "repeat": lambda n, m: ("aten.repeat.default", f(n, 1, 2 * n), [2, 1, n, 1]),
    "slice": lambda n, m: ("aten.slice.Tensor", f(2 * n, 3 * n), 1, 1, 1 + n),
    "slice_all": lambda n, m: ("aten.slice.Tensor", f(2 * n, 3 * n), 1, 0, 2**63 - 1),
    "slice_backward": lambda n, m: ("aten.slice_backward.default", f(n, 3), [n, 5 * n], 1, 1, 4, 1),
    "select": lambda n, m: ("aten.select.int", f(n, 3, 2 * n), 1, -1),
    "select_backward": lambda n, m: ("aten.select_backward.default", f(n, 2 * n), [n, 3 * n, 2 * n], 1, 2),
    "unbind": lambda n, m: ("aten.unbind.int", f(n, 3, 2 * n), 1),
    "split": lambda n, m: ("aten.split.Tensor", f(2 * n, 3 * n), n, 1),
    "split_sizes": lambda n, m: ("aten.split_with_sizes.default", f(2 * n, 3 * n), [n, 2 * n], -1),
    "cat": lambda n, m: ("aten.cat.default", [f(n, 3), f(n, 2 * n)], -1),
    "stack": lambda n, m: ("aten.stack.default", [f(n, 3), f(n, 3)], 1),
    "select_scatter": lambda n, m: ("aten.select_scatter.default", f(n, 3 * n, 2), f(n, 2), 1, 1),
    "slice_scatter": lambda n, m: ("aten.slice_scatter.default", f(n, 3 * n), f(n, n), 1, 0, n, 1),
    "pad": lambda n, m: ("aten.constant_pad_nd.default", f(n, 2 * n, n), [1, 2, 0, 0], 0.0),
    "pad_value": lambda n, m: ("aten.constant_pad_nd.default", f(n, 2 * n, n), [1, 2, 0, 0], -100.0),
    "roll": lambda n, m: ("aten.roll.default", f(n, 2 * n, 3), [1, -1], [1, 2]),
    "flip": lambda n, m: ("aten.flip.default", f(n, 2 * n), [1]),
    "tril": lambda n, m: ("aten.tril.default", f(n, 2 * n, 2 * n)),
    "repeat_interleave": lambda n, m: ("aten.repeat_interleave.self_int", f(n, 2 * n), 3, 1),
    "to_copy": lambda n, m: ("aten._to_copy.default", f(n, n * m)),
    "mm": lambda n, m: ("aten.mm.default", f(n, n * m), f(n * m, 2 * n)),
    "bmm": lambda n, m: ("aten.bmm.default", f(n, n, n * m), f(n, n * m, 2 * n)),
    "addmm": lambda n, m: ("aten.addmm.default", f(2 * n), f(n, n * m), f(n * m, 2 * n)),
    "addmm_full": lambda n, m: ("aten.addmm.default", f(n, 2 * n), f(n, n * m), f(n * m, 2 * n)),
    "baddbmm": lambda n, m: ("aten.baddbmm.default", f(n, 1, 2 * n), f(n, n, n * m), f(n, n * m, 2 * n)),
    "linear": lambda n, m: ("aten.linear.default", f(n, 2 * n, n * m), f(3 * n, n * m), f(3 * n)),
    "matmul": lambda n, m: ("aten.matmul.default", f(n, 1, 2 * n, n * m), f(2 * n, n * m, n)),
    "sum": lambda n, m: ("aten.sum.dim_IntList", f(n, 2 * n, n * m), [0, -1], True),
    "sum_all": lambda n, m: ("aten.sum.default", f(n, n * m)),
    "mean": lambda n, m: ("aten.mean.dim", f(n, 2 * n, n * m), [1, 2]),
    "mean_all": lambda n, m: ("aten.mean.default", f(n, n * m)),
    "amax": lambda n, m: ("aten.amax.default", f(n, 2 * n), [1]),
    "max_dim": lambda n, m: ("aten.max.dim", f(n, 2 * n), 1),
    "argmax": lambda n, m: ("aten.argmax.default", f(n, 2 * n), 1),
    "argmax_all": lambda n, m: ("aten.argmax.default", f(n, 2 * n)),
    "var": lambda n, m: ("aten.var.correction", f(n, 2 * n), [1]),
    "std_all": lambda n, m: ("aten.std.correction", f(n, 2 * n)),
    "topk": lambda n, m: ("aten.topk.default", f(2 * n, n + 1), 2),
    "sort": lambda n, m: ("aten.sort.default", f(2 * n, 2 * n)),
    "cumsum": lambda n, m: ("aten.cumsum.default", f(n, 2 * n), 1),
    "logsumexp": lambda n, m: ("aten.logsumexp.default", f(n, 2 * n), [1]),
    "histc": lambda n, m: ("aten.histc.default", f(2 * n), 4, -1, 1),
    "softmax": lambda n, m: ("aten._softmax.default", f(n, 2 * n), 1, False),
    "safe_softmax": lambda n, m: ("aten._safe_softmax.default", f(n, 2 * n), -1),
    "log_softmax": lambda n, m: ("aten._log_softmax.default", f(n, 2 * n), 1, False),
    "softmax_bf16": lambda n, m: ("aten._softmax.default", f(n, 2 * n, dtype=torch.float64), 1, False),
    "softmax_back": lambda n, m: ("aten._softmax_backward_data.default", f(n, 2 * n), f(n, 2 * n), 1, torch.float32),
    "log_softmax_back": lambda n, m: (
        "aten._log_softmax_backward_data.default", f(n, 2 * n), f(n, 2 * n), -1, torch.float32,
    ),
    "embedding": lambda n, m: ("aten.embedding.default", f(2 * n, n * m), i(n, 2)),
    "embedding_back": lambda n, m: (
        "aten.embedding_dense_backward.default", f(n, 2, n * m), i(n, 2), 2 * n, -1, False,
    ),
    "embedding_back_padding": lambda n, m: (
        "aten.embedding_dense_backward.default", f(n, 2, n * m), i(n, 2), 2 * n, n + 1, False,
    ),
    "gather": lambda n, m: ("aten.gather.default", f(n, 2 * n), 1, i(n, n * m)),
    "gather_short": lambda n, m: ("aten.gather.default", f(2 * n, n), 1, i(n, n * m)),
    "scatter": lambda n, m: ("aten.scatter.src", f(n, 2 * n), 1, i(n, n), f(n, n)),
    "scatter_value": lambda n, m: ("aten.scatter.value", f(n, 2 * n), 1, i(n, n), 2.0),
    "scatter_add": lambda n, m: ("aten.scatter_add.default", f(n, 2 * n), 1, i(n, n), f(n, n)),
    "index_select": lambda n, m: ("aten.index_select.default", f(n, 2 * n), 1, i(n)),
    "index_add": lambda n, m: ("aten.index_add.default", f(n, 2 * n), 1, i(n), f(n, n)),
    "index_adjacent": lambda n, m: ("aten.index.Tensor", f(n, 2 * n, 3, n), [None, i(n, 1), i(n), None]),
    "index_apart": lambda n, m: ("aten.index.Tensor", f(2 * n, n, 3), [i(n, 2), None, i(2)]),
    "index_put": lambda n, m: ("aten.index_put.default", f(2 * n, n), [i(n)], f(n, n)),
    "index_put_accumulate": lambda n, m: ("aten.index_put.default", f(2 * n, n), [i(n)], f(n, n), True),
    "pick": lambda n, m: ("autopar.pick.default", f(n, 2 * n, 2), 1, i(n, 2)),
    "place": lambda n, m: ("autopar.place.default", f(n, 2), 1, i(n, 2), 2 * n),
    "attention": lambda n, m: (ATT + ".default", f(n, 2 * n, 2 * n, 4), f(n, 2 * n, 3, 4), f(n, 2 * n, 3, 4)),
    "attention_causal": lambda n, m: (
        ATT + ".default", f(n, n, 2 * n, 4), f(n, n, 2 * n, 4), f(n, n, 2 * n, 4), 0.0, True,
    ),
    "native_dropout": lambda n, m: ("aten.native_dropout.default", f(n, 2 * n), 0.25, True),
    "dropout_back": lambda n, m: ("aten.native_dropout_backward.default", f(n, n), f(n, n), 1.3),
    "rand_like": lambda n, m: ("aten.rand_like.default", f(n, 2 * n)),
    "randn_like": lambda n, m: ("aten.randn_like.default", f(n, 2 * n)),
    "randint_like": lambda n, m: ("aten.randint_like.default", f(n, 2 * n), 7),
    "bernoulli": lambda n, m: ("aten.bernoulli.p", f(n, 2 * n), 0.4),
    "bernoulli_of": lambda n, m: ("aten.bernoulli.Tensor", f(n, 2 * n), f(1, 2 * n)),
    "uniform": lambda n, m: ("aten.uniform.default", f(n, 2 * n), -1.0, 3.0),
    "normal": lambda n, m: ("aten.normal_functional.default", f(n, 2 * n), 1.0, 3.0),
    "normal_sized": lambda n, m: ("aten.normal.float_float", 1.0, 3.0, [n, 2 * n]),
    "normal_of": lambda n, m: ("aten.normal.Tensor_Tensor", f(n, 1), f(2 * n)),
    "exponential": lambda n, m: ("aten.exponential.default", f(n, 2 * n), 2.0),
    "geometric": lambda n, m: ("aten.geometric.default", f(n, 2 * n), 0.3),
    "cauchy": lambda n, m: ("aten.cauchy.default", f(n, 2 * n), 0.3, 2.0),
    "log_normal": lambda n, m: ("aten.log_normal.default", f(n, 2 * n), 0.3, 0.2),
    "rrelu": lambda n, m: (
        "aten.rrelu_with_noise_functional.default", f(n, 2 * n), f(n, 2 * n), 0.1, 0.4, True,
    ),
    "rrelu_back": lambda n, m: (
        "aten.rrelu_with_noise_backward.default", f(n, 2 * n), f(n, 2 * n), f(n, 2 * n), 0.1, 0.4, True, False,
    ),
    "randint_sized": lambda n, m: ("aten.randint.low", 3, 9, [n, 2 * n]),
    "randperm": lambda n, m: ("aten.randperm.default", 2 * n),
    "rand": lambda n, m: ("aten.rand.default", [n, 2 * n]),
    "arange": lambda n, m: ("aten.arange.default", 2 * n),
    "arange_step": lambda n, m: ("aten.arange.start_step", 3, 3 + 4 * n, 2),
    "full": lambda n, m: ("aten.full.default", [n, 2 * n], 2.5),
    "new_zeros": lambda n, m: ("aten.new_zeros.default", f(n, 3), [n, 2 * n]),
    "new_full": lambda n, m: ("aten.new_full.default", f(n, 3), [2 * n], 7.0),
    "zeros_like": lambda n, m: ("aten.zeros_like.default", f(n, 2 * n)),
    "full_like": lambda n, m: ("aten.full_like.default", f(n, 2 * n), 3.0),
    "scalar_tensor": lambda n, m: ("aten.scalar_tensor.default", 2.0),
    "layer_norm": lambda n, m: ("aten.native_layer_norm.default", f(n, 2 * n, 4), [4], f(4), f(4), 1e-5),
    "layer_norm_back": lambda n, m: (
        "aten.native_layer_norm_backward.default", f(n, 2 * n, 4), f(n, 2 * n, 4), [4], f(n, 2 * n, 1), f(n, 2 * n, 1),
        f(4), f(4), [True, True, True],
    ),
    "layer_norm_back_frozen": lambda n, m: (
        "aten.native_layer_norm_backward.default", f(n, 2 * n, 4), f(n, 2 * n, 4), [4], f(n, 2 * n, 1), f(n, 2 * n, 1),
        f(4), f(4), [True, False, False],
    ),
    "rms_norm": lambda n, m: ("aten._fused_rms_norm.default", f(n, 2 * n, 4), [4], f(4), 1e-5),
    "group_norm": lambda n, m: ("aten.native_group_norm.default", f(2 * n, 6, 5), f(6), f(6), 2 * n, 6, 5, 2, 1e-5),
    "group_norm_back": lambda n, m: (
        "aten.native_group_norm_backward.default", f(2 * n, 6, 5), f(2 * n, 6, 5), f(2 * n, 2), f(2 * n, 2), f(6),
        2 * n, 6, 5, 2, [True, True, True],
    ),
    "batch_norm": lambda n, m: (
        "aten._native_batch_norm_legit_functional.default", f(n, 2 * n, 3, 3), f(2 * n), f(2 * n), f(2 * n), f(2 * n),
        True, 0.1, 1e-5,
    ),
    "batch_norm_eval": lambda n, m: (
        "aten.native_batch_norm.default", f(n, 2 * n, 3), f(2 * n), f(2 * n), f(2 * n), f(2 * n), False, 0.1, 1e-5,
    ),
    "batch_norm_back": lambda n, m: (
        "aten.native_batch_norm_backward.default", f(n, 2 * n, 3), f(n, 2 * n, 3), f(2 * n), f(2 * n), f(2 * n),
        f(2 * n), f(2 * n), True, 1e-5, [True, True, True],
    ),
    "convolution": lambda n, m: (
        "aten.convolution.default", f(n, 2 * n, 8, 8), f(3 * n, 2 * n, 3, 3), f(3 * n), [2, 2], [1, 1], [1, 1], False,
        [0, 0], 1,
    ),
    "convolution_1d": lambda n, m: (
        "aten.convolution.default", f(n, 2 * n, 8), f(3 * n, 2 * n, 4), None, [4], [0], [1], False, [0], 1,
    ),
    "convolution_depthwise": lambda n, m: (
        "aten.convolution.default", f(n, 2 * n, 8), f(2 * n, 1, 3), f(2 * n), [1], [1], [1], False, [0], 2 * n,
    ),
    "convolution_transposed": lambda n, m: (
        "aten.convolution.default", f(n, 2 * n, 4, 4), f(2 * n, 3 * n, 2, 2), f(3 * n), [2, 2], [0, 0], [1, 1], True,
        [0, 0], 1,
    ),
    "convolution_back": lambda n, m: (
        "aten.convolution_backward.default", f(n, 3 * n, 4, 4), f(n, 2 * n, 8, 8), f(3 * n, 2 * n, 3, 3), [3 * n],
        [2, 2], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True],
    ),
    "convolution_depthwise_back": lambda n, m: (
        "aten.convolution_backward.default", f(n, 2 * n, 8), f(n, 2 * n, 8), f(2 * n, 1, 3), [2 * n], [1], [1], [1],
        False, [0], 2 * n, [True, True, True],
    ),
    "avg_pool": lambda n, m: ("aten.avg_pool2d.default", f(n, 2 * n, 4, 4), [2, 2], [2, 2]),
    "max_pool": lambda n, m: ("aten.max_pool2d_with_indices.default", f(n, 2 * n, 4, 4), [2, 2], [2, 2]),
    "adaptive_pool": lambda n, m: ("aten._adaptive_avg_pool2d.default", f(n, 2 * n, 4, 4), [2, 2]),
    "upsample": lambda n, m: ("aten.upsample_bilinear2d.default", f(n, 2 * n, 3, 3), [6, 6], False),
    "upsample_back": lambda n, m: (
        "aten.upsample_nearest2d_backward.default", f(n, 2 * n, 6, 6), [6, 6], [n, 2 * n, 3, 3],
    ),
    "add": lambda n, m: ("aten.add.Tensor", f(n, 1, 2 * n), f(2 * n, 1)),
    "mul": lambda n, m: ("aten.mul.Tensor", f(n, 2 * n), f(2 * n)),
    "div": lambda n, m: ("aten.div.Tensor", f(n, 2 * n), f(n, 1)),
    "where": lambda n, m: ("aten.where.self", f(n, 1, dtype=torch.bool), f(n, 2 * n), f()),
    "masked_fill": lambda n, m: ("aten.masked_fill.Scalar", f(n, 2 * n), f(n, 1, dtype=torch.bool), 0.0),
    "gelu": lambda n, m: ("aten.gelu.default", f(n, 2 * n)),
    "silu_back": lambda n, m: ("aten.silu_backward.default", f(n, 2 * n), f(n, 2 * n)),
    "pow": lambda n, m: ("aten.pow.Tensor_Scalar", f(n, 2 * n), 2),
    "copy": lambda n, m: ("aten.copy.default", f(n, 2 * n), f(2 * n)),
    "vector_norm": lambda n, m: ("aten.linalg_vector_norm.default", f(n, 2 * n), 2, [1]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@QUICK
@given(n=st.sampled_from([2, 3]), m=st.sampled_from([1, 2]))
def test_one_axis_rules_are_true(name: str, n: int, m: int) -> None:
    op, *args = CASES[name](n, m)
    node, metas = make(op, *args)
    assert failures(node, metas, n) == []


UNEVEN = [(3, 2), (4, 3), (5, 4), (7, 4)]
"""(size that the shapes are made of, size of the axis): pieces 2 1; 2 2 0 (6: 2 2 2); 2 2 1 0; 2 2 2 1."""


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("n", "size"), UNEVEN)
def test_one_axis_rules_are_true_of_unequal_pieces(name: str, n: int, size: int) -> None:
    """Dims that don't divide, empty pieces, and rows that stay together."""
    op, *args = CASES[name](n, 1)
    node, metas = with_node_units(*make(op, *args))
    assert failures(node, metas, size) == []


@pytest.mark.parametrize("mask", [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize(("n", "size"), [(2, 2), (3, 3), (5, 4)])
def test_attention_with_masks_and_fewer_key_heads(mask: tuple[int, int], n: int, size: int) -> None:
    """Broadcast dims of the mask stay whole; the backward too."""
    batch, heads, kv = n, 2 * n, 2 * n
    shape = (1 if mask[0] == 1 else batch, 1 if mask[1] == 1 else heads, 4 * n, 6)
    q, k = f(batch, heads, 4 * n, 4), f(batch, kv, 6, 4)
    node, metas = make(ATT + ".default", q, k, k, attn_mask=f(*shape), scale=0.5)
    assert failures(node, metas, size) == []
    assert len(one_axis_rules(node, metas, CACHE)) == 5
    stats = f(batch, heads, 4 * n)
    node, metas = make(ATT + "_backward.default", q, q, k, k, q, stats, 0.0, False, attn_mask=f(*shape), scale=0.5)
    assert failures(node, metas, size) == []


PAIRS = (
    "mm", "addmm", "embedding", "embedding_back_padding", "log_softmax", "pick", "place", "native_dropout",
    "batch_norm", "batch_norm_back", "mean", "arange", "linear", "view_merge",
)  # fmt: skip


@pytest.mark.parametrize(
    "sizes", [(2, 3), *(pytest.param(x, marks=pytest.mark.slow) for x in ((3, 2), (2, 2)))], ids=str
)
@pytest.mark.parametrize("n", [6, 5, 7])
@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in PAIRS else pytest.mark.slow) for x in CASES])
def test_products_of_two_axes_are_true(name: str, n: int, sizes: tuple[int, int]) -> None:
    """One rule per axis: Megatron, cut vocabulary with cut batch, cut classes with cut batch. 5 and 7 rows by 2, then
    by 3: 1 1 1, 1 1 0 and 2 2 0, 1 1 1."""
    mesh = Mesh(axes=(Axis(name="dp", size=sizes[0]), Axis(name="tp", size=sizes[1])))
    op, *args = CASES[name](n, 1)
    node, metas = with_node_units(*make(op, *args))
    rules = one_axis_rules(node, metas, CACHE)
    wrong = []
    for first, second in itertools.product(rules, rules):
        strategy = strategy_of((first, second), mesh)
        if fits(node, metas, (first, second), mesh) and (error := check(node, metas, strategy, mesh)):
            wrong.append(f"{op} {strategy}: {error}")
    assert wrong == []


WRONG: dict[str, tuple[Callable[[int, int], tuple[Any, ...]], Rule]] = {
    "cumsum along the cut": (CASES["cumsum"], Rule((S(1),), (S(1),))),
    "softmax of pieces (no talk inside)": (CASES["softmax"], Rule((S(1),), (S(1),))),
    "gelu of a summand (OP-05)": (CASES["gelu"], Rule((P,), (P,))),
    "argmax of pieces (OP-21)": (CASES["argmax_all"], Rule((P,), (S(0),))),
    "convolution cut on width (OP-22)": (CASES["convolution"], Rule((S(3),), (S(3), R, R))),
    "view of a middle dim (OP-01)": (CASES["view_merge"], Rule((S(0),), (S(1),))),
    "group cut by channels (OP-26)": (CASES["group_norm"], Rule((S(1), S(1), S(1)), (S(1), S(0), S(0)))),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_harness_catches(name: str) -> None:
    """A truth test that never fails proves nothing."""
    case, rule = WRONG[name]
    op, *args = case(2, 1)
    node, metas = make(op, *args)
    assert rule not in one_axis_rules(node, metas, CACHE)
    assert failures(node, metas, 2, (rule,)) != []


def test_a_mask_of_minus_infinity_is_safe() -> None:
    """Rows that are -inf throughout give 0, cut or not."""
    from autopar.runtime import local_ops
    from autopar.runtime.threads import run_threads

    x = torch.full((2, 4), -torch.inf)
    x[1] = torch.arange(4.0)
    pieces = run_threads(line(2), lambda rt: local_ops.safe_softmax(rt, rt.slice(x, "x", 1), 1, ("x",), torch.float32))
    assert torch.allclose(torch.cat(pieces, 1), torch.ops.aten._safe_softmax.default(x, 1))


def test_unknown_op_is_replicated() -> None:
    node = node_of("nobody.knows.this", (Ref("a"),), {}, [TensorMeta((4, 4), "float32")])
    cache = RuleCache()
    assert one_axis_rules(node, (TensorMeta((4, 4), "float32"),), cache) == (Rule((R,), (R,)),)
    assert cache.replicated == {"nobody.knows.this"}

"""The adapter: our placements only, users' rules, no process group made or needed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar.ir.graph import Ref, TensorMeta
from autopar.ir.layout import P, R, S
from autopar.ir.strategy import Rule
from autopar.sharding import RuleCache, one_axis_rules
from autopar.sharding.dtensor_rules import ask_dtensor, torch_op
from tests.sharding.truth import make, node_of

MATRIX = TensorMeta((4, 6), "float32")


def test_pointwise_rules_of_both_kinds() -> None:
    node, metas = make("aten.add.Tensor", torch.empty(4, 6), torch.empty(6))
    found = one_axis_rules(node, metas, RuleCache())
    assert found[0] == Rule((R,), (R, R))
    assert {Rule((S(0),), (S(0), R)), Rule((S(1),), (S(1), S(0))), Rule((P,), (P, P))} <= set(found)


def test_enumerated_rules_agree_with_our_own() -> None:
    """mm has rules of DTensor too: ours are among them."""
    node, metas = make("aten.mm.default", torch.empty(4, 6), torch.empty(6, 8))
    op = torch_op("aten.mm.default")
    assert op is not None
    theirs = ask_dtensor(op, node, metas, RuleCache().one_axis_mesh())
    assert theirs is not None
    assert {Rule((S(0),), (S(0), R)), Rule((S(1),), (R, S(1))), Rule((P,), (S(1), S(0)))} <= set(theirs)


def test_averages_and_maxima_are_dropped() -> None:
    node, metas = make("aten.amax.default", torch.empty(4, 6), [1])
    assert set(one_axis_rules(node, metas, RuleCache())) == {Rule((R,), (R,)), Rule((S(0),), (S(0),))}


def test_no_process_group_is_made() -> None:
    node, metas = make("aten.gelu.default", torch.empty(4, 6))
    before = dist.is_initialized()
    one_axis_rules(node, metas, RuleCache())
    assert dist.is_initialized() == before


def test_a_users_process_group_is_left_alone() -> None:
    if dist.is_initialized():
        pytest.skip("some other test left a process group")
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    try:
        node, metas = make("aten.clone.default", torch.empty(4, 6))
        op = torch_op("aten.clone.default")
        assert op is not None
        assert ask_dtensor(op, node, metas, RuleCache().one_axis_mesh())
        assert (dist.get_rank(), dist.get_world_size()) == (3, 8)
    finally:
        dist.destroy_process_group()


def test_a_users_rule_comes_before_ours() -> None:
    op = torch.ops.aten.tril.default
    propagator = DTensor._op_dispatcher.sharding_propagator
    kept = (propagator.op_strategy_funcs.get(op), propagator.op_to_schema_info.get(op))

    @register_sharding(op)
    def rule(x: object, diagonal: int = 0) -> list[tuple[list[object], list[object]]]:
        return [([Replicate()], [Replicate()]), ([Shard(1)], [Shard(1)])]

    try:
        node, metas = make("aten.tril.default", torch.empty(2, 4, 4))
        assert set(one_axis_rules(node, metas, RuleCache())) == {Rule((R,), (R,)), Rule((S(1),), (S(1),))}
    finally:
        propagator.op_strategy_funcs[op], propagator.op_to_schema_info[op] = kept


def test_rules_of_a_users_own_op() -> None:
    library = torch.library.Library("autopar_test", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: 2 * x, "CompositeExplicitAutograd")
    register_sharding(torch.ops.autopar_test.twice.default)(lambda x: [([Shard(0)], [Shard(0)])])
    node = node_of("autopar_test.twice.default", (Ref("a"),), {}, [MATRIX])
    assert set(one_axis_rules(node, (MATRIX,), RuleCache())) == {Rule((R,), (R,)), Rule((S(0),), (S(0),))}


def test_answers_are_kept() -> None:
    cache = RuleCache()
    node, metas = make("aten.gelu.default", torch.empty(4, 6))
    assert one_axis_rules(node, metas, cache) is one_axis_rules(node, metas, cache)
    assert len(cache.rules) == 1


def test_dims_of_size_one_and_zero_are_not_cut() -> None:
    node, metas = make("aten.gelu.default", torch.empty(1, 6))
    assert Rule((S(0),), (S(0),)) not in one_axis_rules(node, metas, RuleCache())

"""The table, walked; costs in closed form; local forms and random numbers."""

from __future__ import annotations

import torch

from autopar.ir.graph import Ref
from autopar.ir.layout import P, R, S
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.reshard import Collective
from autopar.ir.strategy import Rule
from autopar.ops import TABLE, flops, inner_collectives, is_random, is_view, local_call, moved_bytes
from autopar.ops.table import FAMILIES
from autopar.runtime import local_ops
from autopar.runtime.threads import run_threads
from autopar.sharding.dtensor_rules import torch_op
from tests.sharding.truth import make, strategy_of

MESH = Mesh(axes=(Axis(name="dp", size=2), Axis(name="tp", size=2)))


def e(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def test_every_entry_is_complete_and_in_one_family() -> None:
    assert len(TABLE) == sum(len(f) for f in FAMILIES)
    for name, entry in TABLE.items():
        assert entry.rules is not None or entry.local is not None or entry.flops is not None, name
        assert not (entry.view and entry.flops), name
        assert not entry.random or entry.local is not None, f"{name} draws with torch's own generator"
        if name.startswith(("aten.", "prims.")):
            assert torch_op(name) is not None, f"torch has no {name}"


def test_every_local_op_named_in_the_table_exists() -> None:
    import ast
    import pathlib

    names = set()
    for path in pathlib.Path("autopar/ops").glob("*.py"):
        for part in ast.walk(ast.parse(path.read_text())):
            if isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value.startswith("local_ops."):
                names.add(part.value.removeprefix("local_ops."))
    assert {n for n in names if n and not hasattr(local_ops, n)} == set()


def test_flops_in_closed_form() -> None:
    node, metas = make("aten.mm.default", e(3, 5), e(5, 7))
    assert flops(node, metas, tuple(o.meta for o in node.outputs if o)) == 2 * 3 * 5 * 7
    node, metas = make("aten.addmm.default", e(7), e(3, 5), e(5, 7))
    assert flops(node, metas, tuple(o.meta for o in node.outputs if o)) == 2 * 3 * 5 * 7
    node, metas = make(
        "aten.convolution.default", e(2, 3, 8, 8), e(4, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    )
    assert flops(node, metas, tuple(o.meta for o in node.outputs if o)) == 2 * (2 * 8 * 8) * 4 * (3 * 3 * 3)
    q = e(2, 4, 8, 16)
    node, metas = make("aten._scaled_dot_product_flash_attention_for_cpu.default", q, q, q)
    assert flops(node, metas, tuple(o.meta for o in node.outputs if o)) == 2 * 2 * (2 * 4 * 8 * 8 * 16)
    node, metas = make("aten.gelu.default", e(3, 5))
    assert flops(node, metas, tuple(o.meta for o in node.outputs if o)) == 15


def test_moved_bytes() -> None:
    node, metas = make("aten.mm.default", e(3, 5), e(5, 7))
    assert moved_bytes(node, metas, tuple(o.meta for o in node.outputs if o)) == 4 * (15 + 35 + 21)
    node, metas = make("aten.view.default", e(3, 5), [15])
    assert is_view(node.op)
    assert moved_bytes(node, metas, tuple(o.meta for o in node.outputs if o)) == 0
    node, metas = make("aten.embedding.default", e(1000, 8), torch.empty(3, dtype=torch.int64, device="meta"))
    assert moved_bytes(node, metas, tuple(o.meta for o in node.outputs if o)) == 3 * 8 + 2 * 4 * 24


def test_inner_collectives_of_a_cut_softmax() -> None:
    """A maximum and a sum of one fp32 number per local row: 3 rows on dp=2 of 6."""
    node, _ = make("aten._log_softmax.default", e(6, 8), 1, False)
    strategy = strategy_of((Rule((S(0),), (S(0),)), Rule((S(1),), (S(1),), "inner")), MESH)
    local = tuple(make("aten.gelu.default", e(3, 4))[1])
    assert inner_collectives(node, strategy, MESH, local, local) == ((Collective.ALL_REDUCE, "tp", 12),) * 2
    whole = strategy_of((Rule((S(0),), (S(0),)), Rule((R,), (R,))), MESH)
    assert inner_collectives(node, whole, MESH, local, local) == ()


def test_views_become_reshapes_of_the_local_shape() -> None:
    node, _ = make("aten.view.default", e(4, 6, 8), [24, 8])
    strategy = strategy_of((Rule((S(0),), (S(0),)), Rule((S(1),), (S(2),))), MESH)
    call = local_call(
        node, strategy, MESH, (make("aten.gelu.default", e(2, 6, 4))[1]), make("aten.gelu.default", e(12, 4))[1]
    )
    assert (call.function, call.args) == ("aten.reshape.default", (Ref("a0"), (12, 4)))


def test_a_bias_under_a_cut_contraction_is_added_once() -> None:
    node, metas = make("aten.addmm.default", e(4), e(2, 6), e(6, 4))
    strategy = strategy_of((Rule((R,), (R, R, R)), Rule((P,), (R, S(1), S(0)), "bias_once")), MESH)
    call = local_call(node, strategy, MESH, metas, tuple(o.meta for o in node.outputs if o))
    assert call.function == "local_ops.bias_once"
    assert call.args[:2] == ("aten.addmm.default", ("tp",))


def _masks(n: int, dim: int, seed: int = 1, key: str = "k", step: int = 0) -> torch.Tensor:
    line = Mesh(axes=(Axis(name="x", size=n),))

    def rank(rt: object) -> torch.Tensor:
        rt.seed, rt.step = seed, step  # type: ignore[attr-defined]
        shape = [12, 18]
        shape[dim] //= n
        axes = tuple(("x",) if d == dim and n > 1 else () for d in range(2))
        return local_ops.dropout(rt, torch.ones(shape), 0.3, key, (12, 18), axes)[1]  # type: ignore[arg-type]

    return torch.cat(run_threads(line, rank), dim)


def test_dropout_masks_do_not_depend_on_the_plan() -> None:
    whole = _masks(1, 0)
    for n, dim in ((2, 0), (3, 0), (2, 1), (3, 1), (6, 1)):
        assert torch.equal(_masks(n, dim), whole)


def test_dropout_masks_differ_by_seed_step_and_op() -> None:
    whole = _masks(1, 0)
    for other in (_masks(1, 0, seed=2), _masks(1, 0, key="j"), _masks(1, 0, step=1)):
        assert 0.3 < (other == whole).float().mean() < 0.9  # independent: 0.7² + 0.3² = 0.58


def test_random_numbers_are_uniform_and_uncorrelated() -> None:
    line = Mesh(axes=(Axis(name="x", size=1),))

    def draw(rt: object) -> torch.Tensor:
        whole, axes = (1000, 1000), ((), ())
        return local_ops.uniform(rt, None, 0.0, 1.0, "k", whole, axes, torch.float32)  # type: ignore[arg-type]

    x = run_threads(line, draw)[0].double()
    assert abs(float(x.mean()) - 0.5) < 2e-3
    assert abs(float(x.var()) - 1 / 12) < 1e-3
    rows, columns = x - x.mean(1, keepdim=True), x - x.mean(0, keepdim=True)
    for centred, step in ((rows, (0, 1)), (columns, (1, 0))):
        shifted = centred.roll(step, (0, 1))
        assert abs(float((centred * shifted).mean() * 12)) < 5e-3


def test_random_flags() -> None:
    assert is_random("aten.native_dropout.default")
    assert not is_random("aten.mm.default")

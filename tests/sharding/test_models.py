"""Every distinct (op, signature) of captured models, every rule, cut 2, 3 and 5 ways, against truth."""

from __future__ import annotations

import pytest

from autopar.ir.mesh import Axis, Mesh
from autopar.ir.options import Options
from autopar.ops.experts import ROUTED
from autopar.sharding import RuleCache, one_axis_rules
from autopar.sharding.dtensor_rules import rule_key
from autopar.tracer import capture
from tests.models import tiny
from tests.sharding.truth import check, fits, strategy_of

MODELS = ["llama", "convnet", "gpt2", "mlp"]
SLOW = ["bert", "t5", "bart", "vit", "swin", "resnet", "convnext", "mixtral", "deepseek_v3", "mamba", "gemma2", "gru"]
CACHE = RuleCache()
SEEN: set[object] = set()
"""Signatures already tried by an earlier model."""


@pytest.mark.parametrize("name", [*MODELS, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)])
def test_rules_of_a_model_are_true(name: str) -> None:
    model, kwargs = tiny(name)
    captured = capture(model, (), kwargs, options=Options(), model_name=name)
    wrong: list[str] = []
    tried = 0
    for graph in captured.graphs:
        values = graph.values()
        for node in graph.nodes:
            metas = tuple(values[r].meta for r in node.refs)
            key = rule_key(node, metas)
            if node.block is not None or key in SEEN or node.op in ROUTED:  # these: tests/cases/test_experts.py
                continue
            SEEN.add(key)
            for rule in one_axis_rules(node, metas, CACHE):
                for size in (2, 3, 5):  # 12 rows in 5 pieces: 3 3 3 3 0
                    mesh = Mesh(axes=(Axis(name="x", size=size),))
                    if fits(node, metas, (rule,), mesh):
                        tried += 1
                        if error := check(node, metas, strategy_of((rule,), mesh), mesh):
                            wrong.append(f"{node.key} {node.op} {rule} {size} ways: {error}")
    assert wrong == []
    assert tried > 0

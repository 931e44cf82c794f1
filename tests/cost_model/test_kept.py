"""What a layer keeps for its backward, against the paper's formula; what keeping more does to the peak.

Letters: B batch, S sequence, H hidden, A heads.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autopar import api, codegen
from autopar.cost_model.live import ACTIVATIONS, program_memory
from autopar.cost_model.local import local_cluster
from autopar.ir.graph import CapturedGraph, Phase
from autopar.ir.options import Options
from autopar.ir.plan import Plan, mesh_of
from autopar.ir.program import Compute, Free, Local, Program
from tests.cost_model.test_replay import planned

B, S, H, A = 8, 32, 64, 4
DROPOUT = 0.1


class Layer(nn.Module):
    """The layer of Korthikanti et al. (arXiv 2205.05198, figure 2)."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.before, self.between = nn.LayerNorm(H), nn.LayerNorm(H)
        self.qkv, self.out = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x: Tensor) -> Tensor:
        """Attention and feed-forward of (B, S, H), each with dropout and a residual."""
        parts = self.qkv(self.before(x)).chunk(3, -1)
        q, k, v = (t.view(B, S, A, H // A).transpose(1, 2) for t in parts)
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v)
        else:
            scores = q @ k.transpose(-1, -2) / math.sqrt(H // A)
            mixed = F.dropout(scores.softmax(-1), DROPOUT) @ v
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(B, S, H)), DROPOUT)
        return x + F.dropout(self.down(F.gelu(self.up(self.between(x)))), DROPOUT)


class Layers(nn.Module):
    """So many, and a loss."""

    def __init__(self, count: int, fused: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(fused) for _ in range(count))
        self.head = nn.Linear(H, 8)

    def forward(self, x: Tensor) -> Tensor:
        """A mean square."""
        for layer in self.layers:
            x = layer(x)
        return self.head(x).float().square().mean()


def kept_bytes(count: int, fused: bool) -> int:
    """Bytes of activations at the peak, in 16 bits on one device."""
    model = Layers(count, fused).to(torch.bfloat16)
    batch = {"x": torch.randn(B, S, H, dtype=torch.bfloat16)}
    captured = api.capture(model, batch, options=Options())
    plan = api.plan_captured(captured, local_cluster(1), options=Options())
    program = codegen.lower(captured, plan, mesh_of(plan))
    return program_memory(captured, program, 0, rounding=1).kinds[ACTIVATIONS]


@pytest.mark.parametrize("fused", [False, True])
def test_a_layer_keeps_what_the_paper_counts(fused: bool) -> None:
    """sbh(34 + 5as/h); a fused attention keeps 4 bytes for each head and token instead of scores. Norms' statistics,
    two of each token in the norm's dtype, are too small for the paper."""
    sbh = S * B * H
    scores = 4 * A * S * B if fused else 5 * A * S * S * B
    statistics = 2 * 2 * 2 * S * B
    assert kept_bytes(5, fused) - kept_bytes(4, fused) == 34 * sbh + scores + statistics


@functools.cache
def lowered(name: str) -> tuple[CapturedGraph, Plan, Program]:
    """On two ranks."""
    captured, plan = planned(name, 2, {"tp": 2})
    return captured, plan, codegen.lower(captured, plan, mesh_of(plan))


def made(program: Program) -> list[tuple[str, Local]]:
    """What forwards make and let go: (function, tensor)."""
    found = []
    for function in program.functions:
        if function.phase is Phase.FORWARD:
            freed = {name for step in function.steps if isinstance(step, Free) for name in step.names}
            kept = {x.name for x in (*function.saved, *function.outputs) if x is not None}
            outs = (x for step in function.steps if isinstance(step, Compute) for x in step.outputs)
            found += [(function.name, x) for x in outs if x is not None and x.name in freed - kept]
    return found


def keeping(program: Program, name: str, tensor: Local) -> Program:
    """The same where a forward keeps one tensor more for its backward."""
    functions = []
    for function in program.functions:
        if function.name == name:
            steps = (
                Free(names=tuple(n for n in step.names if n != tensor.name)) if isinstance(step, Free) else step
                for step in function.steps
            )
            function = replace(function, saved=(*function.saved, tensor), steps=tuple(steps))
        functions.append(function)
    return replace(program, functions=tuple(functions))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["gpt2", "llama", "convnet"]), st.data())
def test_keeping_a_tensor_more_never_takes_less_memory(name: str, data: st.DataObject) -> None:
    captured, _, program = lowered(name)
    function, tensor = data.draw(st.sampled_from(made(program)))
    before, after = (program_memory(captured, p, 8) for p in (program, keeping(program, function, tensor)))
    assert after.peak_bytes >= before.peak_bytes


def test_keeping_what_is_large_takes_its_bytes_more() -> None:
    """Once for each call of the block."""
    captured, _, program = lowered("gpt2")
    function, tensor = max(made(program), key=lambda x: x[1].meta.nbytes)
    before, after = (program_memory(captured, p, 8) for p in (program, keeping(program, function, tensor)))
    assert after.peak_bytes > before.peak_bytes

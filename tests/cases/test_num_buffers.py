"""NUM-29: models built without values; what no checkpoint holds is computed or refused by name, never left as it was.

Uninitialised memory is full of NaN here, so that a tensor which nobody filled is seen.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar import api, launch
from autopar.cost_model.clusters import load_cluster
from autopar.errors import CaptureError, UserError
from autopar.ir.options import Options
from autopar.ir.plan import mesh_of
from autopar.runtime.module import ParallelModule
from autopar.runtime.threads import run_threads
from tests.cases.run import agree, captured, gradients, planned, strategies


@pytest.fixture(autouse=True)
def _memory_is_full_of_nan() -> Any:
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty then fills with NaN
    yield
    torch.use_deterministic_algorithms(False)


class Rotated(nn.Module):
    """Frequencies that are not saved, a saved buffer, a plain tensor, a tied weight and a frozen one."""

    def __init__(self, plain: bool = True) -> None:
        super().__init__()
        self.register_buffer("freqs", 100.0 ** -(torch.arange(6, dtype=torch.float32) / 6), persistent=False)
        self.register_buffer("scale", torch.tensor(0.5))
        self.plain = torch.arange(12.0) + 1 if plain else None
        self.embed, self.mix = nn.Embedding(24, 12), nn.Linear(12, 12)
        self.head = nn.Linear(12, 24, bias=False)
        self.head.weight = self.embed.weight
        self.mix.bias.requires_grad_(False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """ids, labels: (B, S) -> loss ()."""
        angles = torch.arange(ids.shape[1])[:, None] * self.freqs
        x = self.embed(ids)
        a, b = x.chunk(2, -1)
        x = torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)
        x = self.mix(x * self.scale).tanh()
        x = x if self.plain is None else x * self.plain
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def words(rows: int = 12) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(rows)
    labels = torch.randint(0, 24, (rows, 5), generator=g)
    for row in range(rows):
        labels[row, : row % 4] = -100
    return {"ids": torch.randint(0, 24, (rows, 5), generator=g), "labels": labels}


def real(**more: Any) -> Rotated:
    torch.manual_seed(0)
    return Rotated(**more)


def weightless(**more: Any) -> Rotated:
    with autopar.without_weights():
        return Rotated(**more)


def test_num29_only_parameters_are_without_values() -> None:
    model, plain = weightless(), real()
    assert all(p.is_meta for p in model.parameters())
    assert {n: p.requires_grad for n, p in model.named_parameters()} == {
        n: p.requires_grad for n, p in plain.named_parameters()
    }
    assert model.head.weight is model.embed.weight
    for name, wanted in {**dict(plain.named_buffers()), "plain": plain.plain}.items():
        assert torch.equal(getattr(model, name), wanted), name
    assert not any(p.is_meta for p in real().parameters()), "outside, all is as ever"


def test_num29_one_parameter_registered_twice_stays_one() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            w = nn.Parameter(torch.ones(3))
            w.kind = "mine"  # type: ignore[attr-defined]
            self.a, self.list = w, nn.ParameterList([w, nn.Parameter(torch.ones(2))])
            self.none = nn.Linear(2, 2, bias=False)

    with autopar.without_weights():
        model = Twice()
    assert model.a is model.list[0] and model.a.is_meta and model.a.kind == "mine"
    assert model.none.bias is None and len(list(model.parameters())) == 3


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_num29_loaded_it_trains_as_the_model_itself(ranks: int) -> None:
    """Buffers on every rank, another batch that makes it plan again, gradients; the plain tensor is a constant."""
    model, empty = real().double(), weightless().double()
    graph = captured(copy.deepcopy(empty), words())
    options = Options(precision="fp64")
    for name in ("zero3", "tp") if ranks < 4 else ("dp2tp2",):
        plan = planned(graph, ranks, strategies(ranks)[name])

        def work(rt: Any, plan: Any = plan) -> None:
            cluster = load_cluster(f"rtx3090:{ranks}")
            module = api.compile_on(
                copy.deepcopy(empty), lambda *_: rt, cluster, (), words(), plan=plan, options=options
            )
            with pytest.raises(UserError, match="have no values yet"):
                module.full_state_dict()
            module.load_full_state_dict(model.state_dict())
            for rows in (12, 5):
                plain = copy.deepcopy(model)
                module.zero_grad()
                module(**words(rows)).backward()
                plain(**words(rows)).backward()
                agree(gradients(module), gradients(plain))
            for buffer, wanted in model.named_buffers():
                assert torch.equal(module.get_buffer(buffer), wanted), (buffer, rt.rank)

        run_threads(mesh_of(plan), work, timeout_s=120)


@pytest.mark.parametrize("kind", ["parameters bf16", "precision bf16", "fp32"])
def test_num29_dtypes_are_kept(kind: str) -> None:
    """Frequencies stay float32 beside bfloat16 parameters; what trains is stored in float32 (docs/precision.md)."""
    empty = weightless(plain=False)
    if kind == "parameters bf16":
        for module in (empty.embed, empty.mix):
            module.to(torch.bfloat16)
        empty.head.weight = empty.embed.weight
        empty.scale = empty.scale.bfloat16()
    precision: Any = "fp32" if kind == "fp32" else "bf16"
    graph = api.capture(empty, words(), options=Options(precision=precision))
    plan = planned(graph, 2, {"dp": 2}, precision)
    source = api.emit_captured(graph, plan)

    def work(rt: Any) -> tuple[torch.dtype, torch.dtype, Tensor]:
        module = ParallelModule(graph, plan, source, empty, rt)
        return module.freqs.dtype, module.mix.weight.dtype, module.freqs.clone()

    for buffer, weight, values in run_threads(mesh_of(plan), work):
        assert buffer == torch.float32 and torch.equal(values, real().freqs)
        assert weight == torch.float32


def test_num29_all_on_meta_is_refused_by_name_and_can_be_given() -> None:
    """Under torch.device("meta") values are lost: said at the first call and at a save; they can be given by name."""
    with torch.device("meta"):
        lost = Rotated(plain=False).double()
    model = real(plain=False).double()
    graph = captured(lost, words())
    plan = planned(graph, 2, {"dp": 2})
    source = api.emit_captured(graph, plan)
    given = {**model.state_dict(), "freqs": model.freqs}

    def work(rt: Any) -> None:
        for load in ("load_full_state_dict", "load_state_dict"):
            module = ParallelModule(graph, plan, source, copy.deepcopy(lost), rt)
            getattr(module, load)(model.state_dict())
            for use in (lambda m=module: m(**words()), module.full_state_dict):
                with pytest.raises(UserError, match=r"first: freqs.*autopar\.without_weights\(\)"):
                    use()
            getattr(module, load)(given)
            assert module(**words()).item() == pytest.approx(float(model(**words()).detach()), rel=1e-10)
            with pytest.raises(UserError, match=r"unexpected \['frqs'\]"):
                getattr(module, load)({**model.state_dict(), "frqs": model.freqs})

    run_threads(mesh_of(plan), work)


def test_num29_a_plain_tensor_on_meta_is_refused_with_its_line() -> None:
    with torch.device("meta"):
        lost = Rotated()
    line = Rotated.forward.__code__.co_firstlineno + 7
    with pytest.raises(CaptureError, match=rf"test_num_buffers\.py:{line}: .*self\.plain.*without_weights\(\)"):
        autopar.search(lost, load_cluster("rtx3090:2"), example_inputs=words())


LLAMA = {
    "vocab_size": 24, "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 6, "max_position_embeddings": 16, "use_cache": False, "tie_word_embeddings": False,
}  # fmt: skip


def load_there(file: str) -> tuple[bool, float, float]:
    """On every rank: (buffers are those of the plain model, loss, the plain model's)."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**LLAMA)).double()
    with autopar.without_weights():
        empty = LlamaForCausalLM(LlamaConfig(**LLAMA)).double()
    ids = words(6)["ids"]
    batch = {"input_ids": ids, "labels": ids}
    module = autopar.compile(
        empty, load_cluster(f"rtx3090:{dist.get_world_size()}"), example_inputs=batch, options=Options(precision="fp64")
    )
    module.load_safetensors(file)
    buffers = dict(plain.named_buffers())
    assert buffers and not set(buffers) & set(plain.state_dict())
    same = all(
        torch.equal(module.get_buffer(n), x) and module.get_buffer(n).dtype == x.dtype for n, x in buffers.items()
    )
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (same, float(module(**batch).loss.detach())))
    assert len(set(everywhere)) == 1
    return same, everywhere[0][1], float(plain(**batch).loss.detach())


@pytest.mark.ranks
@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_num29_a_published_architecture_from_a_file(ranks: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    save_file(LlamaForCausalLM(LlamaConfig(**LLAMA)).state_dict(), tmp_path / "weights.safetensors")
    same, loss, wanted = launch(load_there, ranks, (str(tmp_path / "weights.safetensors"),), timeout_s=100)
    assert same and loss == pytest.approx(wanted, rel=1e-6)  # the model itself sums its loss in float32

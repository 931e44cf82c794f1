"""Does capturing a deep model take longer than a shallow one? python benchmarks/capture_depth.py

A Llama of 70B's widths with 2 and with 80 layers, on the meta device, captured in turns. Prints median seconds and
their ratio.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from autopar import api

DEPTHS = (2, 80)


def capture_s(layers: int) -> float:
    """Seconds of one capture."""
    config = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=layers, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=128256, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        tokens = torch.zeros(8, 4096, dtype=torch.long)
    start = time.perf_counter()
    api.capture(model, {"input_ids": tokens, "labels": tokens})
    return time.perf_counter() - start


def main() -> None:
    """Print a line a depth."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    capture_s(2)  # torch's own first-use work
    seen: dict[int, list[float]] = {n: [] for n in DEPTHS}
    for _ in range(rounds):
        for layers in DEPTHS:
            seen[layers].append(capture_s(layers))
    few, many = (statistics.median(seen[n]) for n in DEPTHS)
    print(f"{DEPTHS[0]} layers {few:.2f} s, {DEPTHS[1]} layers {many:.2f} s: {many / few:.2f} times")


if __name__ == "__main__":
    main()

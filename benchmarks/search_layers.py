"""Does planning take longer as layers are added? python benchmarks/search_layers.py [--stages] [--rounds N]

A small decoder of 2 to 48 layers on two nodes of eight described devices: seconds of capture and search, the best of
the rounds, and the time of 48 layers in that of 8 (wanted: 3 at most, and 60 s at most).
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

DEPTHS = (2, 4, 8, 16, 32, 48)
MOST_RATIO, MOST_S = 3.0, 60.0


def search_s(layers: int, stages: bool) -> tuple[float, autopar.Plan]:
    """Seconds of one search from the model on, and its plan."""
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=1024, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        tokens = torch.zeros(32, 128, dtype=torch.long)
    options = autopar.Options(stages=stages)
    cluster = autopar.ClusterSpec.load("dgx-h100:2")
    start = time.perf_counter()
    plan = autopar.search(model, cluster, example_inputs={"input_ids": tokens, "labels": tokens}, options=options)
    return time.perf_counter() - start, plan


def main() -> None:
    """Print a line a depth."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    asked = parser.parse_args()
    search_s(2, asked.stages)  # torch's own first-use work
    best: dict[int, float] = {}
    for layers in DEPTHS:
        for _ in range(asked.rounds):
            seconds, plan = search_s(layers, asked.stages)
            best[layers] = min(seconds, best.get(layers, seconds))
        print(
            f"{layers} layers: {best[layers]:.2f} s, {plan.mesh.pipeline} stages × {plan.mesh.axes}, "
            f"step {plan.predicted.step_time_us / 1e3:.2f} ms, gap {plan.solver.gap:.2%}",
            flush=True,
        )
    ratio = best[48] / best[8]
    fine = ratio <= MOST_RATIO and best[48] <= MOST_S
    print(f"48 layers take {ratio:.2f} times as long as 8: {'as wanted' if fine else 'too long'}")


if __name__ == "__main__":
    main()

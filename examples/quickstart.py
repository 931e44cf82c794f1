"""Train a small GPT-2 on two ranks of this machine (or on as many as you say): the loop is an ordinary one."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import autopar


def train(cluster, steps=8):
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=512, n_positions=32, use_cache=False)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = GPT2LMHeadModel(config)
    ids = torch.randint(0, 512, (8, 32))  # the global batch: each rank takes its part

    module = autopar.compile(model, cluster)  # this rank's part; compiled at the first call
    module(input_ids=ids, labels=ids)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        loss = module(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    cluster = autopar.ClusterSpec.local(ranks)  # or .load("dgx-h100:4"), and torchrun in place of launch
    losses = autopar.launch(train, ranks, (cluster,))
    print("loss", " ".join(f"{loss:.3f}" for loss in losses))

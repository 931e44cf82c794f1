"""Example inputs for Hugging Face models, built from their config: a global batch with labels, so that there is a loss.

B batch, T sequence, C channels, H image height (= width), M mel bins, F frames.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.catalogue.entries import InputKind
from autopar.errors import UserError

LEARNED_POSITIONS = {
    "gpt2": ("n_positions", 0),
    "opt": ("max_position_embeddings", 0),
    "bert": ("max_position_embeddings", 0),
    "roberta": ("max_position_embeddings", 2),
    "bart": ("max_position_embeddings", 0),
    "whisper": ("max_target_positions", 0),
}
"""model_type -> (config field that bounds the sequence, positions of it that are reserved). Others take any length."""

DEFAULT_SEQ, DEFAULT_BATCH = 2048, 16
"""For models that are not in the catalogue; the sequence is cut to what the model's positions allow."""

FIRST_WORD = 3
"""Ids below are padding, start and end in most vocabularies: random text avoids them."""


def longest_sequence(config: Any) -> int | None:
    """Most positions that the model has embeddings for; None where positions are computed."""
    rule = LEARNED_POSITIONS.get(config.model_type)
    return None if rule is None else int(getattr(config, rule[0])) - rule[1]


def checked_sequence(config: Any, seq: int | None) -> int:
    """`seq`, or the default where None. Raises UserError if the model has not so many positions."""
    most = longest_sequence(config)
    if seq is None:
        return min(DEFAULT_SEQ, most) if most else DEFAULT_SEQ
    if most is not None and seq > most:
        raise UserError(f"--seq {seq}: {config.model_type} has {most} learned positions; wanted at most {most}")
    return seq


class Maker:
    """Makes tensors of a batch: empty ones on the meta device, else random ones, unequal between samples."""

    def __init__(self, device: str, seed: int, dtype: torch.dtype) -> None:
        self._meta = device == "meta"
        self._dtype = dtype
        self._random = torch.Generator().manual_seed(seed)

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> Tensor:
        """int64 values from `low` up to but not including `high`."""
        if self._meta:
            return torch.empty(shape, dtype=torch.int64, device="meta")
        return torch.randint(min(low, high - 1), high, shape, generator=self._random)

    def floats(self, shape: tuple[int, ...]) -> Tensor:
        """Standard normal values."""
        if self._meta:
            return torch.empty(shape, dtype=self._dtype, device="meta")
        return torch.randn(shape, dtype=self._dtype, generator=self._random)

    def labels(self, vocabulary: int, shape: tuple[int, int]) -> Tensor:
        """(B, T) word ids; row i ignores its first i mod 5 (-100), so that rows weigh unequally in a mean loss."""
        labels = self.integers(FIRST_WORD, vocabulary, shape)
        if not self._meta:
            for row in range(shape[0]):
                labels[row, : min(row % 5, shape[1] - 1)] = -100
        return labels

    def mask(self, shape: tuple[int, int]) -> Tensor:
        """(B, T) attention mask; row i ends i mod 4 words early."""
        if self._meta:
            return torch.empty(shape, dtype=torch.int64, device="meta")
        mask = torch.ones(shape, dtype=torch.int64)
        for row in range(shape[0]):
            mask[row, max(1, shape[1] - row % 4) :] = 0
        return mask


def example_inputs(kind: InputKind, config: Any, *, batch: int, seq: int, make: Maker) -> dict[str, Tensor]:
    """A global batch of `batch` samples, of `seq` tokens where the kind has tokens."""
    if kind == "image-classification":
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        pixels = make.floats((batch, config.num_channels, height, width))
        return {"pixel_values": pixels, "labels": make.integers(0, config.num_labels, (batch,))}
    vocabulary = config.get_text_config().vocab_size
    labels = make.labels(vocabulary, (batch, seq))
    if kind == "speech-seq2seq":
        frames = 2 * config.max_source_positions  # the encoder's second convolution has stride 2
        return {"input_features": make.floats((batch, config.num_mel_bins, frames)), "labels": labels}
    words = {"input_ids": make.integers(FIRST_WORD, vocabulary, (batch, seq))}
    if kind == "masked-lm":
        words["attention_mask"] = make.mask((batch, seq))
    return {**words, "labels": labels}

"""Small models for tests: `tiny(name)` gives a model in training mode and a batch of keyword inputs.

Sizes divide by 2, 3 and 4 where they can: batch 12, sequence 12, hidden 48, 12 heads, intermediate 96,
vocabulary 96. Data are random and unequal; some labels are -100; dropout is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

BATCH, SEQ, HIDDEN, HEADS, FFN, VOCAB = 12, 12, 48, 12, 96, 96
Made = tuple[nn.Module, dict[str, Any]]


def _labels(vocab: int = VOCAB, seq: int = SEQ) -> torch.Tensor:
    """(BATCH, seq) labels, unequally many of them -100 in each row."""
    labels = torch.randint(0, vocab, (BATCH, seq))
    for row in range(BATCH):
        labels[row, : row % 5] = -100
    return labels


def _text(vocab: int = VOCAB) -> dict[str, Any]:
    return {"input_ids": torch.randint(3, vocab, (BATCH, SEQ)), "labels": _labels(vocab), "use_cache": False}


def _gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2, n_embd=HIDDEN, n_head=HEADS, vocab_size=VOCAB, n_positions=SEQ, n_inner=FFN, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config), _text()


def _decoder(**more: Any) -> dict[str, Any]:
    base = dict(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=4, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        attention_dropout=0.0,
    )  # fmt: skip
    return {**base, **more}


def _llama() -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_decoder())), _text()


def _qwen3() -> Made:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(**_decoder(num_key_value_heads=6, head_dim=4, tie_word_embeddings=True))
    ), _text()


def _gemma2() -> Made:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(**_decoder(head_dim=4, num_key_value_heads=12, sliding_window=4, query_pre_attn_scalar=4))
    return Gemma2ForCausalLM(config), _text()


def _opt() -> Made:
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, ffn_dim=FFN, num_hidden_layers=2, num_attention_heads=HEADS, dropout=0.0,
        attention_dropout=0.0, max_position_embeddings=32, word_embed_proj_dim=HIDDEN, layerdrop=0.0, pad_token_id=1,
    )  # fmt: skip
    return OPTForCausalLM(config), _text()


def _encoder() -> dict[str, Any]:
    return dict(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=2, num_attention_heads=HEADS,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0,
    )  # fmt: skip


def _masked() -> dict[str, Any]:
    mask = torch.ones(BATCH, SEQ, dtype=torch.int64)
    for row in range(BATCH):
        mask[row, SEQ - row % 4 :] = 0
    return {"input_ids": torch.randint(3, VOCAB, (BATCH, SEQ)), "attention_mask": mask, "labels": _labels()}


def _bert() -> Made:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**_encoder())), _masked()


def _roberta() -> Made:
    from transformers import RobertaConfig, RobertaForMaskedLM

    return RobertaForMaskedLM(RobertaConfig(**_encoder())), _masked()


def _albert() -> Made:
    from transformers import AlbertConfig, AlbertForMaskedLM

    return AlbertForMaskedLM(AlbertConfig(**_encoder(), embedding_size=24, num_hidden_groups=1)), _masked()


def _t5() -> Made:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB, d_model=HIDDEN, d_kv=4, d_ff=FFN, num_layers=2, num_heads=HEADS, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config), _text()


def _bart() -> Made:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=VOCAB, d_model=HIDDEN, encoder_layers=2, decoder_layers=2, encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS, encoder_ffn_dim=FFN, decoder_ffn_dim=FFN, dropout=0.0,
        max_position_embeddings=32,
    )  # fmt: skip
    return BartForConditionalGeneration(config), _text()


def _whisper() -> Made:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCAB, d_model=HIDDEN, encoder_layers=2, decoder_layers=2, encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS, encoder_ffn_dim=FFN, decoder_ffn_dim=FFN, dropout=0.0, num_mel_bins=8,
        max_source_positions=12, max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    batch = {"input_features": torch.randn(BATCH, 8, 24), "labels": _labels(), "use_cache": False}
    return WhisperForConditionalGeneration(config), batch


def _images() -> dict[str, Any]:
    return {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.randint(0, 12, (BATCH,))}


def _vit() -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=FFN, image_size=32,
        patch_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=12,
    )  # fmt: skip
    return ViTForImageClassification(config), _images()


def _swin() -> Made:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=32, patch_size=4, embed_dim=24, depths=[2, 2], num_heads=[6, 12], window_size=2, drop_path_rate=0.0,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=12,
    )  # fmt: skip
    return SwinForImageClassification(config), _images()


def _resnet() -> Made:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=24, hidden_sizes=[24, 48], depths=[1, 1], layer_type="basic", num_labels=12)
    return ResNetForImageClassification(config), _images()


def _convnext() -> Made:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(
        patch_size=4, num_stages=2, hidden_sizes=[24, 48], depths=[2, 2], drop_path_rate=0.0, num_labels=12,
        image_size=32, layer_scale_init_value=0.5,
    )  # fmt: skip
    return ConvNextForImageClassification(config), _images()


def _mixtral() -> Made:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**_decoder(num_local_experts=4, num_experts_per_tok=2), experts_implementation="batched_mm")
    return MixtralForCausalLM(config), _text()


def _deepseek_v3() -> Made:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        **_decoder(
            num_hidden_layers=3, num_key_value_heads=HEADS, moe_intermediate_size=24, n_routed_experts=8, n_group=2,
            topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1, q_lora_rank=24, kv_lora_rank=24,
            qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4, n_shared_experts=1,
        ),
        experts_implementation="batched_mm",
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config), _text()


def _mamba() -> Made:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, state_size=4, num_hidden_layers=2, time_step_rank=4, pad_token_id=0
    )
    batch = {"input_ids": torch.randint(3, VOCAB, (BATCH, 6)), "labels": _labels(seq=6), "use_cache": False}
    return MambaForCausalLM(config), batch


class MLP(nn.Module):
    """Two hidden layers and a cross entropy with label smoothing; gives (loss, logits)."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(24, 48)
        self.mid = nn.Linear(48, 48)
        self.down = nn.Linear(48, 12, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: (B, 24), y: (B,) classes -> loss (), logits (B, 12)."""
        logits = self.down(torch.tanh(self.mid(F.gelu(self.up(x)))))
        return F.cross_entropy(logits, y, label_smoothing=0.1), logits


class Residual(nn.Module):
    """x + fc2(gelu(fc1(norm(x)))): the block of `Tower`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, width) -> same."""
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class Tower(nn.Module):
    """`depth` equal residual blocks and a mean squared error: the smallest model with repeated blocks."""

    def __init__(self, depth: int = 4, width: int = 24) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual(width) for _ in range(depth))
        self.head = nn.Linear(width, 12)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """x: (B, width), y: (B, 12) -> loss ()."""
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(self.head(x), y)


class ConvNet(nn.Module):
    """Strided convolution, batch norm, ReLU in place, max pool, a residual, adaptive pool and a classifier (CAP-25)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(24)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.conv = nn.Conv2d(24, 24, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(24)
        self.head = nn.Linear(24, 12)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        """x: (B, 3, H, W), y: (B,) -> {"loss": (), "logits": (B, 12)}."""
        h = self.pool(self.relu(self.bn1(self.stem(x))))
        h = self.relu(h + self.bn2(self.conv(h)))
        logits = self.head(F.adaptive_avg_pool2d(h, 1).flatten(1))
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


class Recurrent(nn.Module):
    """A recurrent layer of `kind` ("GRU", "LSTM", "RNN") and a mean squared error on its last state."""

    def __init__(self, kind: str = "GRU", layers: int = 1, bidirectional: bool = False) -> None:
        super().__init__()
        self.rnn = getattr(nn, kind)(12, 24, layers, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(48 if bidirectional else 24, 12)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """x: (B, T, 12), y: (B, 12) -> loss ()."""
        out, _ = self.rnn(x)
        return F.mse_loss(self.head(out[:, -1]), y)


def _mlp() -> Made:
    y = torch.randint(0, 12, (BATCH,))
    y[::5] = -100
    return MLP(), {"x": torch.randn(BATCH, 24), "y": y}


def _tower() -> Made:
    return Tower(), {"x": torch.randn(BATCH, 24), "y": torch.randn(BATCH, 12)}


def _convnet() -> Made:
    return ConvNet(), {"x": torch.randn(BATCH, 3, 16, 16), "y": torch.randint(0, 12, (BATCH,))}


def _recurrent(kind: str) -> Callable[[], Made]:
    return lambda: (Recurrent(kind), {"x": torch.randn(BATCH, 5, 12), "y": torch.randn(BATCH, 12)})


FACTORIES: dict[str, Callable[[], Made]] = {
    "mlp": _mlp, "tower": _tower, "convnet": _convnet, "gru": _recurrent("GRU"), "lstm": _recurrent("LSTM"),
    "gpt2": _gpt2, "llama": _llama, "qwen3": _qwen3, "gemma2": _gemma2, "opt": _opt, "bert": _bert, "roberta": _roberta,
    "albert": _albert, "t5": _t5, "bart": _bart, "whisper": _whisper, "vit": _vit, "swin": _swin, "resnet": _resnet,
    "convnext": _convnext, "mixtral": _mixtral, "deepseek_v3": _deepseek_v3, "mamba": _mamba,
}  # fmt: skip
OWN = ("mlp", "tower", "convnet", "gru", "lstm")
NAMES = tuple(FACTORIES)


def tiny(name: str, *, seed: int = 0) -> Made:
    """A tiny model in training mode (fp32, seeded) and keyword inputs with labels; `loss_of` finds its loss."""
    torch.manual_seed(seed)
    model, batch = FACTORIES[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model.train(), batch


def loss_of(out: Any) -> torch.Tensor:
    """The scalar loss in what a tiny model returns."""
    if isinstance(out, torch.Tensor):
        return out
    loss = out["loss"] if isinstance(out, dict) else out[0]
    assert isinstance(loss, torch.Tensor)
    return loss

"""What one device holds: parameters, gradients, optimizer state, activations of the micro-batches in flight.

Activation bytes of a layer follow Korthikanti et al. (arXiv 2205.05198, table 2), term by term, so that other widths,
shared key-value heads, gates and fused attention come out as well; `tests/prediction/test_formulas.py` has its figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.cost_model.held import END, HELD, TRANSIENT
from autopar.ir.timeline import Timeline
from autopar.prediction.rates import LOW
from autopar.prediction.setting import Setting

FP32 = 4
STATISTIC_BYTES = 4
"""Of one fp32 number that fused attention keeps for each head and token."""
LOW_BYTES = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkMemory:
    """Of one part on one device.

    Attributes:
        own: parameters cut over tp alone; `experts` those of the experts here; `trained`: those with gradients;
            `updated`: those whose optimizer state is here.
        parameters_bytes, gradients_bytes, optimizer_bytes: throughout.
        held_bytes: of one micro-batch in flight; `transient_bytes`: while it is worked on.
    """

    own: float
    experts: float
    trained: float
    updated: float
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    held_bytes: int
    transient_bytes: int

    @property
    def resident_bytes(self) -> int:
        """Held throughout."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes


def chunk_memory(setting: Setting, plain: int, routed: int, first: bool, last: bool) -> ChunkMemory:
    """Of so many layers, with the embedding where `first` and the head where `last`."""
    model, config = setting.model, setting.config
    layers = (plain + routed) * model.attention_parameters + plain * model.dense_parameters
    tables = int(first) + int(last and not (first and model.tied))
    cut = layers + routed * model.shared_parameters + tables * model.embedding_parameters
    own = cut / config.tp
    experts = routed * model.expert_parameters / config.ep
    trained = own + experts if config.trains == "all" else 0.0
    ranks = config.sharding_ranks
    expert_ranks = max(1, min(ranks, config.tp * config.dp * config.cp // config.ep))

    def kept(stage: int, nbytes: float) -> float:
        """Bytes of a state of so many bytes an element that ZeRO cuts from `stage` on."""
        cut = config.zero >= stage
        return nbytes * (own / (ranks if cut else 1) + experts / (expert_ranks if cut else 1))

    full = config.precision == "fp32"
    updated = kept(1, 1.0) if config.trains == "all" else 0.0
    gradient = _gradient_bytes(setting)
    parameters = kept(3, setting.item_bytes)
    gradients = kept(2, gradient) if config.trains == "all" else 0.0
    state = updated * (8 if full else 12)
    layer = layer_bytes(setting)
    stored = stored_bytes(setting)
    held = (plain + routed) * stored + (setting.own_tokens * model.hidden * setting.item_bytes if first else 0)
    transient = layer - stored if config.recompute != "none" else 0.0
    if config.recompute == "selective" and config.attention == "plain":
        transient += _score_bytes(setting)
    transient += 2 * setting.own_tokens * model.hidden * setting.item_bytes
    if config.zero == 3:
        width = model.attention_parameters + max(model.dense_parameters * (plain > 0), model.shared_parameters)
        gathered = width / config.tp + (model.expert_parameters / config.ep if routed else 0)
        transient += gathered * (2 * setting.item_bytes + FP32)
    logits = setting.tokens * model.vocabulary / config.tp * (setting.item_bytes + 2 * FP32) if last else 0.0
    return ChunkMemory(
        own=own,
        experts=experts,
        trained=trained,
        updated=updated,
        parameters_bytes=round(parameters),
        gradients_bytes=round(gradients),
        optimizer_bytes=round(state),
        held_bytes=round(held),
        transient_bytes=round(max(transient, 0.0) + logits),
    )


def _gradient_bytes(setting: Setting) -> int:
    """Of one element, as it is kept until the update: 16 bits where newer software sums and reduces bf16; before, an
    fp32 sum beside what a micro-batch's backward makes."""
    precision = setting.config.precision
    if precision in ("fp16", "fp32"):
        return setting.item_bytes
    return 2 if setting.speed.newer else FP32 + 2


def layer_bytes(setting: Setting) -> float:
    """Activations that one layer's backward reads, of one micro-batch: "none" of the paper's modes.

    In 16-bit elements of own tokens × hidden (cut by sequence parallelism) and of tokens × width over tp. A plain
    GPT layer: two norms' inputs, matrices' inputs, masks of two dropouts of a byte: sbh(10 + 24/t), all of it over t
    with sequence parallelism (the 2 of 10 are the masks); attention's scores:
    5·a·s²·b, or a statistic of 4 bytes for each head and token.
    """
    model, config = setting.model, setting.config
    item = setting.item_bytes
    inputs = LOW_BYTES if config.precision in LOW else item
    hidden = setting.own_tokens * model.hidden
    cut = setting.tokens / config.tp
    query, value = model.score_sizes
    keys = model.key_value_heads * model.head_size * 2 if model.latent is None else model.heads * (query + value)
    attention = cut * ((model.heads * query + keys) * item + model.heads * value * inputs)
    scores = 0.0 if config.recompute == "selective" and config.attention == "plain" else _score_bytes(setting)
    # Norms' inputs, and inputs of the matrices cut by columns (gathered again where sequence parallel), dropout masks.
    residual = hidden * (2 * item + 2 * inputs + (2 if model.dropout else 0))
    plain = model.layers - model.routed_layers
    # Before the activation (two where gated), and after it: the second matrix's input.
    feed_forward = cut * model.width * ((model.matrices - 1) * item + inputs)
    if model.experts is not None and model.routed_layers >= plain:
        experts = model.experts
        visits = setting.own_tokens * experts.top_k
        feed_forward = visits * (model.hidden * inputs + experts.width * ((model.matrices - 1) * item + inputs))
        feed_forward += cut * model.matrices * experts.shared_width * item
    return residual + attention + scores + feed_forward


def _score_bytes(setting: Setting) -> float:
    """Of attention: a statistic of each head and token where fused, else scores, probabilities and a dropout mask."""
    model, config = setting.model, setting.config
    if config.attention == "flash":
        return setting.tokens / config.tp * model.heads * STATISTIC_BYTES
    return 5 * setting.tokens * model.heads * config.seq / config.tp


def stored_bytes(setting: Setting) -> float:
    """What one layer keeps of a micro-batch between forward and backward: its input alone where all is recomputed."""
    if setting.config.recompute == "full":
        return setting.own_tokens * setting.model.hidden * setting.item_bytes
    return layer_bytes(setting)


def end_bytes(setting: Setting, memory: ChunkMemory) -> int:
    """The update's transient: one bucket of parameters in fp32."""
    return min(round(memory.updated * FP32), 256 * 2**20)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The fullest device. `peak_bytes`: with what stands beside tensors, as its monitor shows; `parts` add up to it."""

    peak_bytes: int
    limit_bytes: int
    parts: Mapping[str, int]


def device_memory(setting: Setting, timeline: Timeline, chunks: Sequence[Sequence[ChunkMemory]]) -> DeviceMemory:
    """Of the stage that the simulated schedule fills most; `chunks[stage]`: what its parts hold."""
    fullest = max(timeline.memory, key=lambda m: (m.peak_bytes, -m.stage))
    own = chunks[fullest.stage]
    parts = {
        "parameters": sum(c.parameters_bytes for c in own),
        "gradients": sum(c.gradients_bytes for c in own),
        "optimizer state": sum(c.optimizer_bytes for c in own),
    }
    moving = dict(fullest.contributors)
    parts["activations"] = sum(size for what, size in moving.items() if what.startswith(HELD))
    parts["transients"] = sum(size for what, size in moving.items() if what in (TRANSIENT, END))
    beside = setting.speed.beside
    parts["allocator"] = round(beside.allocator * sum(parts.values()))
    parts["context and communicators"] = round(beside.fixed_bytes + beside.bytes_per_hidden * setting.model.hidden)
    peak = sum(parts.values())
    # A device's `memory_bytes` leaves out what today's contexts and communicators take.
    limit = setting.speed.device.memory_bytes + round(setting.speed.rates.memory["newer"].fixed_bytes)
    return DeviceMemory(peak_bytes=peak, limit_bytes=limit, parts=parts)

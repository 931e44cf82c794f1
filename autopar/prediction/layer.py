"""What one layer of a transformer costs one device in one micro-batch, forward and backward.

The layer is the one that training frameworks run: matrices cut by columns, then by rows, over tp; norms, residuals and
activations fused into one pass each; attention in one kernel; experts spread over ep, tokens sent to them and back.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from autopar.ir.reshard import Collective
from autopar.prediction.setting import Setting

RESIDUAL_PASSES = 9
"""Over a layer's hidden states, forward: two norms (read, write), two residual sums (the norm after reads
what the sum has just written, so that nine are left of ten)."""
ROTARY_PASSES = 2
TENSOR_FORWARD, TENSOR_BACKWARD = 4, 5
"""Transfers of a layer's hidden states: attention and feed-forward each gather and scatter; backward, inputs of the
matrices cut by columns are gathered once more for the weights' gradient (arXiv 2205.05198, section 4.2.2). Without
sequence parallelism they are there: two of these are an all-reduce then, four in all."""
EXPERT_BACKWARD_POINTWISE = 1.5
ADAPTER_FORWARD, ADAPTER_BACKWARD = (1, 4), (5, 2)
"""Passes over (inputs, outputs) of a product with a low-rank adapter beside it, whose own flops are nothing: forward
its input is read, its output written, read, and added to the product's, read and written; backward the output's
gradient is read for each of its two matrices, its input for one, and the input's gradient written, read and added to
the product's."""
BESIDE_ATTENTION, BESIDE_FEED_FORWARD = 3, 2
"""Adapters that read one input: each of queries, keys and values, and of a gated feed-forward's two, has its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """µs of each kind of work, alone. `context`, `experts`, `tensor`: communication; `host` runs beside the device."""

    matrices: float = 0.0
    attention: float = 0.0
    pointwise: float = 0.0
    casts: float = 0.0
    launches: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    experts: float = 0.0
    host: float = 0.0

    def __add__(self, other: Amounts) -> Amounts:
        return Amounts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Amounts)})

    def __mul__(self, times: float) -> Amounts:
        return Amounts(**{f.name: getattr(self, f.name) * times for f in fields(Amounts)})


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Forward and backward of one micro-batch; `recomputed` is what the backward runs again first."""

    forward: Amounts
    backward: Amounts
    recomputed: Amounts


Matrix = tuple[float, float, float, float]
"""(rows m, inputs k, outputs n, how many)."""


def layer_cost(setting: Setting, *, routed: bool) -> LayerCost:
    """Of one layer, with a routed or a plain feed-forward."""
    config, rates = setting.config, setting.speed.rates
    forward, backward = _attention(setting)
    more_forward, more_backward = _experts(setting) if routed else _feed_forward(setting)
    forward += more_forward + Amounts(launches=0.0 if routed else rates.layer_us)
    backward += more_backward + Amounts(launches=0.0 if routed else 2 * rates.layer_us)
    recomputed = Amounts()
    if config.recompute == "full":
        recomputed = forward + Amounts(launches=0.0 if setting.speed.newer else rates.recompute_us)
    elif config.recompute == "selective":
        recomputed = Amounts(attention=forward.attention)
    return LayerCost(forward, backward, recomputed)


def head_cost(setting: Setting) -> LayerCost:
    """The head's matrix, always in 16 bits or more, and the loss over logits cut over tp."""
    model, config, speed = setting.model, setting.config, setting.speed
    columns = model.vocabulary / config.tp
    matrix = (setting.tokens, float(model.hidden), columns, 1.0)
    logits = setting.tokens * columns
    # Written and read in 16 bits, and three times in fp32: maximum and sum, the loss, its gradient.
    loss = speed.memory_us(logits * (2 * setting.item_bytes + 3 * 4)) / 2
    matrices = _forward_us(setting, (matrix,), low=False), _backward_us(setting, (matrix,), low=False)
    return LayerCost(
        Amounts(matrices=matrices[0], pointwise=loss), Amounts(matrices=matrices[1], pointwise=loss), Amounts()
    )


def _attention(setting: Setting) -> tuple[Amounts, Amounts]:
    model, config, speed = setting.model, setting.config, setting.speed
    tokens, item = setting.tokens, setting.item_bytes
    matrices = tuple((tokens, k, n, 1.0) for k, n, _ in model.attention_matrices(config.tp))
    query, value = model.score_sizes
    heads = model.heads / config.tp
    scores = tokens * config.seq * heads
    flops = 2 * scores * (query + value)
    core, core_back = speed.attention_us(flops * (0.5 if model.causal else 1.0), flops, scores, value)
    hidden = setting.own_tokens * model.hidden * item
    rotary = tokens * model.hidden * (1 + model.key_value_heads / model.heads) / config.tp * item * ROTARY_PASSES
    moved = hidden * RESIDUAL_PASSES + rotary * (2 if model.gated else 1)
    pointwise = speed.pointwise_us(moved)
    casts = speed.memory_us(sum(speed.cast_bytes(m * k) for m, k, _, _ in matrices))
    tensor = _tensor_us(setting) / 2
    context = _context_us(setting)
    beside, beside_back = _attention_adapters(setting)
    forward = Amounts(
        matrices=_forward_us(setting, matrices),
        attention=core,
        pointwise=pointwise + beside,
        casts=casts,
        tensor=TENSOR_FORWARD * tensor,
        context=context,
    )
    backward = Amounts(
        matrices=_backward_us(setting, matrices),
        attention=core_back,
        pointwise=2 * pointwise + beside_back,
        casts=2 * casts,
        tensor=_tensor_backward(setting) * tensor,
        context=2 * context,
    )
    return forward, backward


def _feed_forward(setting: Setting) -> tuple[Amounts, Amounts]:
    model, config, speed = setting.model, setting.config, setting.speed
    width = model.width / config.tp
    matrices = _feed_forward_matrices(setting, setting.tokens, width, 1.0)
    pointwise = speed.pointwise_us(_activation_bytes(setting, setting.tokens, width))
    casts = speed.memory_us(speed.cast_bytes(setting.tokens * (model.hidden + width)))
    tensor = _tensor_us(setting) / 2
    beside, beside_back = _feed_forward_adapters(setting, setting.tokens, width)
    forward = Amounts(
        matrices=_forward_us(setting, matrices),
        pointwise=pointwise + beside,
        casts=casts,
        tensor=TENSOR_FORWARD * tensor,
    )
    backward = Amounts(
        matrices=_backward_us(setting, matrices),
        pointwise=2 * pointwise + beside_back,
        casts=2 * casts,
        tensor=_tensor_backward(setting) * tensor,
    )
    return forward, backward


def _attention_adapters(setting: Setting) -> tuple[float, float]:
    """(forward, backward) µs of the adapters around attention."""
    matrices = [(k, n) for k, n, _ in setting.model.attention_matrices(setting.config.tp)]
    if setting.config.trains == "adapters":
        return _adapters_us(setting, setting.tokens, [(*matrices[0], 1)])
    first = BESIDE_ATTENTION if setting.model.latent is None else 1
    return _adapters_us(setting, setting.tokens, [(*matrices[0], first), *((k, n, 1) for k, n in matrices[1:])])


def _feed_forward_adapters(setting: Setting, rows: float, width: float) -> tuple[float, float]:
    """(forward, backward) µs of the adapters in a feed-forward of so many rows."""
    if setting.config.trains != "adapters-everywhere":
        return 0.0, 0.0
    model = setting.model
    into = BESIDE_FEED_FORWARD if model.gated else 1
    return _adapters_us(setting, rows, [(model.hidden, width * into, into), (width, model.hidden, 1)])


def _adapters_us(setting: Setting, rows: float, beside: list[tuple[float, float, int]]) -> tuple[float, float]:
    """(forward, backward) µs of adapters beside products of (inputs, outputs, how many adapters read the inputs)."""
    if setting.config.trains == "all":
        return 0.0, 0.0
    inputs = rows * setting.item_bytes * sum(k * readers for k, _, readers in beside)
    outputs = rows * setting.item_bytes * sum(n for _, n, _ in beside)
    forward, backward = (
        setting.speed.memory_us(i * inputs + o * outputs) for i, o in (ADAPTER_FORWARD, ADAPTER_BACKWARD)
    )
    return forward, backward


def _experts(setting: Setting) -> tuple[Amounts, Amounts]:
    """Balanced: every expert gets its share of the tokens. Experts are whole on their rank, not cut over tp."""
    model, config, speed = setting.model, setting.config, setting.speed
    experts = model.experts
    assert experts is not None
    rates = speed.rates.experts
    tokens = setting.own_tokens
    visits = tokens * experts.top_k
    here = experts.count / config.ep
    groups = _feed_forward_matrices(setting, max(1.0, visits / here), float(experts.width), here)
    shared: tuple[Matrix, ...] = ()
    if experts.shared_width:
        shared = _feed_forward_matrices(setting, setting.tokens, experts.shared_width / config.tp, 1.0)
    dispatched = visits * model.hidden * setting.item_bytes
    moved = rates.passes * dispatched + _activation_bytes(setting, visits, experts.width)
    pointwise = speed.memory_us(moved)
    casts = speed.memory_us(speed.cast_bytes(visits * (model.hidden + experts.width)))
    exchange = 2 * setting.exchange_us(tokens * model.hidden * setting.item_bytes, experts.top_k, config.ep)
    host = rates.host_us[speed.own.host]
    slower = 1 + rates.slower_before * (1 - speed.maturity)
    beside, beside_back = _feed_forward_adapters(setting, visits, float(experts.width))
    matrices = _forward_us(setting, groups) / rates.matmul + _forward_us(setting, shared)
    back = _backward_us(setting, groups) / rates.matmul + _backward_us(setting, shared)
    forward = Amounts(matrices=matrices, pointwise=pointwise + beside, casts=casts, experts=exchange) * slower
    moved_back = EXPERT_BACKWARD_POINTWISE * pointwise + beside_back
    backward = Amounts(matrices=back, pointwise=moved_back, casts=2 * casts, experts=exchange)
    return forward + Amounts(host=host), backward * slower + Amounts(host=EXPERT_BACKWARD_POINTWISE * host)


def _feed_forward_matrices(setting: Setting, tokens: float, width: float, count: float) -> tuple[Matrix, ...]:
    model = setting.model
    into = width * (2 if model.gated else 1)
    return (tokens, float(model.hidden), into, count), (tokens, width, float(model.hidden), count)


def _activation_bytes(setting: Setting, tokens: float, width: float) -> float:
    """Read once (twice where gated) and written once."""
    return tokens * width * setting.item_bytes * (3 if setting.model.gated else 2)


def _forward_us(setting: Setting, matrices: tuple[Matrix, ...], *, low: bool = True) -> float:
    return sum(setting.speed.matmul_us(m, n, k, low=low, count=c) for m, k, n, c in matrices)


def _backward_us(setting: Setting, matrices: tuple[Matrix, ...], *, low: bool = True) -> float:
    """The gradient of the input, m × n by n × k, and of the weight, k × m by m × n; frozen weights have none."""
    speed = setting.speed
    total = sum(speed.matmul_us(m, k, n, low=low, count=c) for m, k, n, c in matrices)
    if setting.config.trains == "all":
        total += sum(speed.matmul_us(n, k, m, low=low, count=c) for m, k, n, c in matrices)
    return total


def _tensor_us(setting: Setting) -> float:
    """One gather or scatter of the hidden states over tp."""
    config = setting.config
    nbytes = setting.tokens * setting.model.hidden * setting.item_bytes
    return setting.group_us(Collective.ALL_GATHER, nbytes, config.tp, 1)


def _tensor_backward(setting: Setting) -> int:
    return TENSOR_BACKWARD if setting.config.sequence_parallel else TENSOR_FORWARD


def _context_us(setting: Setting) -> float:
    """Keys and values once around the ring, forward."""
    model, config = setting.model, setting.config
    width = 2 * model.key_value_heads * model.head_size / config.tp
    if model.latent is not None:
        width = model.heads * (model.latent.rope + model.latent.plain + model.latent.value) / config.tp
    nbytes = config.micro_batch * config.seq * width * setting.item_bytes
    return setting.group_us(Collective.ALL_GATHER, nbytes, config.cp, config.tp)

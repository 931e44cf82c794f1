"""The prediction of one configuration: step time, throughput, share of the peak, memory."""

from __future__ import annotations

from autopar.cost_model.simulate import simulate
from autopar.cost_model.tasks import Overlap
from autopar.errors import UserError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.configuration import Configuration, check_configuration
from autopar.ir.prediction import Prediction
from autopar.ir.schedules import build_schedule
from autopar.ir.transformer import Transformer
from autopar.prediction.memory import device_memory
from autopar.prediction.rates import FLOPS_PER_S, Rates, speed_of
from autopar.prediction.setting import Setting
from autopar.prediction.stage import stage_memories, stage_works


def predict(
    model: Transformer, config: Configuration, cluster: ClusterSpec, *, rates: Rates | None = None
) -> Prediction:
    """Price one configuration by simulating its step. Raises UserError where it cannot be."""
    check_configuration(config, model, cluster.devices)
    device = min((g.device for g in cluster.groups), key=lambda d: max(d.peak_flops.values()))
    speed = speed_of(device, config, rates)
    setting = Setting(model, config, speed, cluster)
    try:
        schedule = build_schedule(
            config.schedule_name, stages=config.pp, micro_batches=config.micro_batches, chunks=config.chunks
        )
    except ValueError as error:
        raise UserError(str(error)) from None
    works = stage_works(setting, schedule)
    timeline = simulate(schedule, works, overlap=Overlap(compute=speed.rates.overlapped_compute))
    memory = device_memory(setting, timeline, stage_memories(setting, schedule))
    tokens = config.global_batch * config.seq
    seconds = timeline.step_us / 1e6
    used, full = (
        model.flops_per_token(config.seq, halved=h) * tokens / seconds / cluster.devices for h in (True, False)
    )
    peak = speed.peak(config.precision) * FLOPS_PER_S
    return Prediction(
        model=model.name,
        cluster=cluster.name,
        configuration=config,
        step_time_us=timeline.step_us,
        tokens_per_s=tokens / seconds,
        flops_per_s=used,
        mfu=used / peak,
        mfu_full=full / peak,
        peak_memory_bytes=memory.peak_bytes,
        memory_bytes=memory.parts,
        limit_bytes=memory.limit_bytes,
        fits=memory.peak_bytes <= memory.limit_bytes,
        breakdown_us=dict(timeline.breakdown_us),
        cost_source="calibrated" if speed.known else "estimated",
        notes=_notes(setting),
        timeline=timeline,
    )


def _notes(setting: Setting) -> tuple[str, ...]:
    config, model = setting.config, setting.model
    found = []
    if not setting.speed.known:
        found.append(
            f"no rates for {setting.speed.device.name}: estimated from its peaks and another device's fractions"
        )
    if config.global_batch % (config.dp * config.micro_batch):
        found.append(
            f"global batch {config.global_batch} is not a multiple of dp × micro-batch; "
            f"{config.micro_batches} micro-batches, all priced whole"
        )
    parts = config.pp * config.chunks
    if model.layers % parts:
        found.append(f"{model.layers} layers over {parts} parts: some hold one more than others")
    if model.experts is not None:
        found.append("tokens are taken to be spread evenly over experts")
    return tuple(found)

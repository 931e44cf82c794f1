"""Hand-made plans for tests of the front: a Llama-like model on 2×2 devices."""

from __future__ import annotations

from autopar.ir.cluster import ClusterSpec, Device, DeviceGroup, LinkLevel
from autopar.ir.plan import (
    Plan,
    PlanCluster,
    PlanInput,
    PlanMesh,
    PlanModel,
    PlanNote,
    PlanParameter,
    PlanPrediction,
    PlanRequest,
    PlanReshard,
    PlanSchedule,
    PlanSolver,
    PlanStage,
)

LAYERS = 4
ROLES = {
    "self_attn.q_proj": ("ZeRO-3 + column", "dp:S(1) tp:S(0)"),
    "self_attn.o_proj": ("ZeRO-3 + row", "dp:S(0) tp:S(1)"),
    "mlp.up_proj": ("ZeRO-3 + column", "dp:S(1) tp:S(0)"),
    "mlp.down_proj": ("ZeRO-3 + row", "dp:S(0) tp:S(1)"),
    "input_layernorm": ("data parallel", "dp:R tp:R"),
}


def sample_plan() -> Plan:
    """A plan with every field filled, whose parts add up."""
    parameters = {"model.embed_tokens.weight": _parameter("ZeRO-3 + column", "dp:S(1) tp:S(0)", 2**26)}
    for layer in range(LAYERS):
        for name, (role, layout) in ROLES.items():
            parameters[f"model.layers.{layer}.{name}.weight"] = _parameter(role, layout, 2**22)
    parameters["model.norm.weight"] = _parameter("data parallel", "dp:R tp:R", 2**14)
    memory = {"parameters": 2**28, "gradients": 2**28, "optimizer": 2**29, "activations": 2**31, "working set": 2**26}
    return Plan(
        model=PlanModel(name="sample-llama", parameters=123_456_789, graph_hash="0123abcd"),
        cluster=PlanCluster(name="dgx-h100:1", devices=4, spec=_cluster()),
        mesh=PlanMesh(pipeline=1, axes={"dp": 2, "tp": 2}, levels={"dp": 1, "tp": 0}),
        schedule=PlanSchedule(),
        stages=[
            PlanStage(
                index=0,
                devices=4,
                blocks=[("model.layers", LAYERS)],
                peak_memory_bytes=sum(memory.values()),
                saved_count=40,
            )
        ],
        parameters=parameters,
        predicted=PlanPrediction(
            step_time_us=130_000.0,
            tokens_per_s=252_061.5,
            mfu=0.413,
            peak_memory_bytes=sum(memory.values()),
            breakdown_us={"compute": 100_000.0, "communication": 22_000.0, "optimizer": 8_000.0},
            breakdown_bytes=memory,
            cost_source="H100 datasheet; estimates",
        ),
        solver=PlanSolver(
            status="optimal",
            objective_us=130_000.0,
            bound_us=129_900.0,
            gap=100 / 130_000,
            time_s=1.2,
            memory_price=1e-6,
        ),
        notes=[
            PlanNote(
                kind="replicated",
                where=f"modeling_llama.py:{line} (model.layers.*.self_attn)",
                message="aten.sort.default runs whole on every rank: no rule says how to split it",
            )
            for line in range(60, 64)
        ]
        + [PlanNote(kind="whole", where="lm_head.weight", message="(50257, 64) is stored whole on tp=2: 50257 is odd")],
        strategies={},
        inputs={"top": {"input:input_ids": "dp:S(0) tp:R"}},
        outputs={"top": {"0": "dp:R tp:R"}},
        conversions=[
            _reshard(
                "model.layers.0.mlp.up_proj.weight", "dp:S(1) tp:S(0)", "dp:R tp:S(0)", "all_gather(dp, 1)", 900.0
            ),
            _reshard(
                "add_3", "dp:S(0) tp:P", "dp:S(0) tp:R", "all_reduce(tp)", 2000.0, "model.layers.*.self_attn (add)"
            ),
            _reshard("add_5", "dp:S(0) tp:P", "dp:S(0) tp:R", "all_reduce(tp)", 2000.0),
        ],
        pins={"tp": "2"},
        precision="bf16",
        request=PlanRequest(
            model="sample-llama",
            seq=1024,
            global_batch=32,
            inputs=dict.fromkeys(("input_ids", "labels"), PlanInput(shape=(32, 1024), dtype="int64")),
            options={"memory_limit": 5 * 2**30, "pins": {"tp": 2}, "precision": "bf16"},
        ),
    )


def _cluster() -> ClusterSpec:
    device = Device(
        name="H100", memory_bytes=80 * 2**30, peak_flops={"bfloat16": 1e15}, memory_bytes_per_us=3e6,
        kernel_floor_us=5.0, matmul_efficiency=0.7, memory_efficiency=0.8, source="a <sample>",
    )  # fmt: skip
    levels = (("nvlink4", 2, 2.0, 4e5), ("infiniband", 2, 5.0, 5e4))
    return ClusterSpec(
        name="dgx-h100:1",
        groups=(DeviceGroup(count=4, device=device),),
        levels=tuple(LinkLevel(name=n, size=k, latency_us=t, bytes_per_us=b, source="none") for n, k, t, b in levels),
    )


def _parameter(role: str, layout: str, size: int) -> PlanParameter:
    return PlanParameter(stage=0, layout=layout, bytes_per_device=size, optimizer_bytes_per_device=2 * size, role=role)


def _reshard(value: str, before: str, after: str, step: str, us: float, where: str = "") -> PlanReshard:
    return PlanReshard(
        graph="block_0", value=value, before=before, after=after, steps=[step], count=LAYERS, us=us, where=where
    )

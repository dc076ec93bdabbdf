"""From a row of a table to a run of the planner's model, or the reason why there is none."""

from __future__ import annotations

from dataclasses import replace

from cubeloom.base.errors import UserError
from cubeloom.plan.cost_model.recompute import Recompute
from cubeloom.plan.hardware import Cluster, Dtype, Software
from cubeloom.plan.model.decoder import DecoderSizes
from cubeloom.plan.validate.systems import machine, system
from cubeloom.plan.validate.table import NEEDED, VTRAIN, Row, Run, Skipped, WrongCell, number

_GPT2 = 50257
_VOCABULARY = 51200  # the same, padded so that any tensor axis cuts it
_ANY: tuple[Recompute, ...] = (False, "attention", True)


def run_of(row: Row, where: str) -> Run:
    """A wrong cell of vTrain's columns is refused; tables of many sources have words in places, whose rows are skipped."""
    if VTRAIN["devices"] in row:
        return _vtrain(row, where)
    try:
        return _published(row, where)
    except WrongCell as wrong:
        raise Skipped(f"{wrong.name} is not a number") from None


def _vtrain(row: Row, where: str) -> Run:
    """GPTs trained as Megatron-LM does, with all activations computed again; the table does not name its vocabulary."""
    n = {name: int(number(row, title, where)) for name, title in VTRAIN.items()}
    if n["tensor"] * n["data"] * n["pipeline"] != n["devices"]:
        raise UserError(f"{where}: its parallelisms do not multiply to its # GPUs")
    if n["global_batch"] % (n["data"] * n["micro_batch"]):
        raise UserError(f"{where}: its global batch is not made of whole micro-batches")
    of = system("vtrain")
    found = machine("A100-80", of, None)
    assert found is not None
    h, vocabulary = n["hidden"], _GPT2 if n["tensor"] == 1 else _VOCABULARY
    return Run(
        sizes=DecoderSizes(
            layers=n["layers"], hidden=h, heads=n["heads"], kv_heads=n["heads"], mlp=4 * h, vocabulary=vocabulary,
            sequence=n["sequence"], tied=True,
        ),
        cluster=found, dtype="fp16", devices=n["devices"], tensor=n["tensor"], data=n["data"], shards=1, kept=False,
        pipe=n["pipeline"], chunks=1, sharded=False, microbatch=n["micro_batch"], batch=n["global_batch"], wide=False,
        recompute=(True,), assumed=("vocabulary", "recompute"),
    )  # fmt: skip


def _published(row: Row, where: str) -> Run:
    _skip_others(row)
    for name in NEEDED:
        if not row[name]:
            raise Skipped(f"no {name}")
    sizes, assumed = _sizes(row, where)
    of = system(row["system"], row.get("notes", ""))
    per_node = _whole(row, "devices_per_node", where)
    found = machine(row["device"], of, per_node)
    if found is None:
        raise Skipped(f"no constants of {row['device']}")
    devices, tensor, pipe = (_whole(row, name, where) for name in ("devices", "tensor", "pipeline"))
    assert devices is not None
    if tensor is None or pipe is None:
        raise Skipped("no tensor or pipeline parallelism")
    if devices % (tensor * pipe):
        raise Skipped("parallelisms that do not multiply to the devices")
    data, shards, kept = _shards(row, where, devices // (tensor * pipe), found)
    batch = _whole(row, "global_batch", where)
    assert batch is not None
    micro = _whole(row, "micro_batch", where)
    if micro is None:
        micro, assumed = _microbatch(batch, data * shards), (*assumed, "micro_batch")
    recompute, share = _recompute(row["recompute"], of.blocks)
    if len(recompute) > 1:
        assumed = (*assumed, "recompute")
    if sizes.layers < pipe * (_whole(row, "virtual_pipeline", where) or 1):
        raise Skipped("more stages than layers")
    if micro * data * shards > batch:
        raise Skipped("fewer samples than the devices take")
    dtype, software = _numbers(row["precision"] or of.precision, found)
    if row["data_sharding"] == "none":
        software = replace(software, zero=False)
    if row["data_sharding"] == "zero1":
        software = replace(software, zero_ranks=_whole(row, "data_sharding_size", where) or 0)
    return Run(
        sizes=sizes,
        cluster=replace(found, software=software),
        dtype=dtype,
        devices=devices,
        tensor=tensor,
        data=data,
        shards=shards,
        kept=kept,
        pipe=pipe,
        chunks=_whole(row, "virtual_pipeline", where) or 1 if pipe > 1 else 1,
        sharded=tensor > 1 and row["sequence_parallel"] != "no",
        microbatch=micro,
        batch=batch,
        wide=of.wide and dtype != "fp16",
        recompute=recompute,
        share=share,
        assumed=assumed,
    )


def _skip_others(row: Row) -> None:
    if row["task"] and row["task"] != "pretrain":
        raise Skipped(f"{row['task']}: samples of unknown lengths, or frozen weights")
    if row["expert"] not in ("", "1") or _has_experts(row["model"]):
        raise Skipped("experts")
    if row["context"] not in ("", "1"):
        raise Skipped("context parallelism")


def _has_experts(model: str) -> bool:
    """Models of experts, and those with layers of state spaces, by their names."""
    names = ("moe", "deepseek", "kimi", "gpt oss", "gpt-oss", "mixtral", "grok", "llama4", "a3b", "a22b", "nemotron_3")
    others = ("nemotron v3", "nemotron-h", "nemotron_h", "qwen3_next", "glm", "minimax")
    return any(name in model.lower() for name in (*names, *others))


def _sizes(row: Row, where: str) -> tuple[DecoderSizes, tuple[str, ...]]:
    layers, hidden, heads, sequence = (
        int(number(row, name, where)) for name in ("layers", "hidden", "heads", "sequence")
    )
    kv_heads = _whole(row, "kv_heads", where) or heads
    mlp = _whole(row, "mlp_hidden", where) or 4 * hidden
    vocabulary = _whole(row, "vocab", where)
    if hidden % heads or heads % kv_heads:
        raise Skipped("heads that do not divide")
    found = DecoderSizes(
        layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, mlp=mlp, vocabulary=vocabulary or _VOCABULARY,
        sequence=sequence,
    )  # fmt: skip
    gated = replace(found, gated=True, rotary=True)
    if row["parameters"]:
        told = number(row, "parameters", where)
        choose = min((found, gated), key=lambda each: abs(each.parameters / told - 1))
    else:
        choose = found if mlp == 4 * hidden else gated
    # As Megatron-LM does: each rank has a multiple of 128 entries.
    unit = 128 * (_whole(row, "tensor", where) or 1)
    choose = replace(choose, vocabulary=-(-choose.vocabulary // unit) * unit)
    return choose, () if vocabulary else ("vocabulary",)


def _whole(row: Row, name: str, where: str) -> int | None:
    return int(number(row, name, where)) if row.get(name) else None


def _shards(row: Row, where: str, replicas: int, machine: Cluster) -> tuple[int, int, bool]:
    """Ranks of data and of z; and whether gathered weights are kept."""
    sharding, size = row["data_sharding"], _whole(row, "data_sharding_size", where)
    if sharding.startswith("hsdp"):
        shards = size or min(replicas, machine.devices_per_node)
    elif "fsdp" in sharding and not sharding.startswith("none"):
        shards = size or replicas
    else:
        return replicas, 1, False
    if replicas % shards:
        raise Skipped("shards that do not divide the replicas")
    return replicas // shards, shards, "grad" in sharding


def _microbatch(batch: int, replicas: int) -> int:
    """One that is common: the largest of at most four samples that divides."""
    return next((size for size in (4, 2, 1) if batch % (size * replicas) == 0), 1)


def _recompute(said: str, blocks: float) -> tuple[tuple[Recompute, ...], float]:
    """What is computed again, and of which share of the blocks."""
    if said.startswith("full"):
        return (True,), 1.0
    if said.startswith("selective"):
        return ((True,), blocks) if blocks < 1 else (("attention",), 1.0)
    return ((False,), 1.0) if said == "none" else (_ANY, 1.0)


def _numbers(precision: str, found: Cluster) -> tuple[Dtype, Software]:
    if "fp4" in precision:
        raise Skipped("products in FP4")
    if "fp8" in precision:
        if not found.device.fp8:
            raise Skipped(f"no FP8 rate of {found.device.name}")
        return "bf16", replace(found.software, products="fp8")
    return "fp16" if precision.startswith("fp16") else "bf16", found.software

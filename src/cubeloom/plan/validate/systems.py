"""Which software a measured run had, and what the page of its source says of the machine, by the name of the system."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from cubeloom.plan.hardware import Cluster, Software, cluster, device

# Megatron-LM until 2022: fused softmax, bias and GELU by the TorchScript compiler; eager dispatch of the rest.
MEGATRON = Software(
    name="Megatron-LM until 2022",
    attention="unfused",
    traffic=1.5,
    dropout=True,
    operators=3.3,
    hides_input_gradient=False,
    hides_reduction=False,
    zero=False,
    recomputes_last=True,
    hands_shards=True,
    accumulates=6.0,
    update_bytes=37.0,  # besides AdamW: gradients copied to float32 and scaled, their norm, weights copied back
)
MEGATRON_CORE = Software(
    name="Megatron-Core",
    attention="best",
    traffic=1.2,
    operators=1.3,
    hides_tensor=0.8,
    hands_shards=True,
    hides_gather=True,
    update_bytes=32.0,
)
FSDP = Software(
    name="torch FSDP, eager",
    attention="flash2",
    traffic=2.0,
    operators=2.5,
    hides_gather=True,
    accumulates=6.0,
    recomputes_last=True,
)
"""Operators of PyTorch one at a time: norms in float32, rotary positions and gates as several."""
LLAMA = replace(FSDP, name="torch FSDP, the Llama of its examples", composed_norms=True)


@dataclass(frozen=True)
class System:
    software: Software
    machine: dict[str, Any] = field(default_factory=dict)  # of the cluster's file, what the source says otherwise
    precision: str = "bf16"  # where a row does not say
    wide: bool = True  # gradients of bfloat16 weights are summed in float32
    blocks: float = 1.0  # that are computed again where recomputation is "selective"; 1: attention is, in all of them


_COMPILED = 1.25  # of Cubeloom's traffic and operators: blocks are compiled one by one


_MACHINES = {
    "V100-32": "dgx-2",
    "A100-40": "dgx-a100",
    "A100-80": "dgx-a100",
    "H100-80": "dgx-h100",
    "H100-SXM": "dgx-h100",
    "H100-500W": "dgx-h100",
    "H200": "dgx-h200",
    "B200": "dgx-b200",
    "GB200": "gb200-nvl72",
    "GB300": "gb300-nvl72",
    "MI300X": "mi300x-8",
}
_DEVICES = {"A100-40": "a100-40", "H100-500W": "h100-500w"}
HDR4 = {"nics": 4, "nic_bandwidth": 2.2e10}
ROCE100 = {"nics": 4, "nic_bandwidth": 1.1e10}
# BigScience's experiments/bandwidth: all-reduces over 16 nodes of Jean Zay get 44 to 57 Gb/s of four Omni-Path ports of 100,
# which is twice that in the ring.
JEAN_ZAY = {"nics": 4, "nic_bandwidth": 3.5e9}
_SYSTEMS: dict[str, System] = {
    "vtrain": System(MEGATRON, HDR4),
    "Megatron-DeepSpeed": System(replace(MEGATRON, zero=True), JEAN_ZAY),
    "Megatron-LM (Core": System(MEGATRON_CORE),
    "Megatron-LM/NeMo": System(MEGATRON_CORE),
    "Megatron-LM": System(MEGATRON),
    "Megatron-Bridge": System(MEGATRON_CORE, precision="fp8"),
    "fms-fsdp": System(LLAMA, {"nics": 2}, blocks=0.5, wide=False),
    "InternEvo": System(
        replace(
            FSDP,
            name="InternEvo",
            attention="flash",
            update_bytes=44.0,
            step=0.15,
            hides_gather=False,
            owns_tensors=True,
            bucket=512 * 2**20,
        ),
        ROCE100,
        wide=False,
    ),
    "llm-foundry": System(replace(FSDP, name="llm-foundry", attention="flash")),
    "torchtitan": System(replace(LLAMA, name="torchtitan"), blocks=0.5),
    "nanotron": System(replace(FSDP, name="nanotron")),
    "NeMo AutoModel": System(replace(FSDP, name="NeMo AutoModel", attention="best", traffic=1.3)),
}


def system(name: str, notes: str = "") -> System:
    """`notes` say whether a program was compiled, and whether products are cut up to hide collectives (async TP)."""
    found = next((each for prefix, each in _SYSTEMS.items() if name.startswith(prefix)), System(MEGATRON_CORE))
    software = found.software
    if "torch.compile" in notes and "no torch.compile" not in notes:
        software = replace(software, traffic=_COMPILED, operators=_COMPILED, composed_norms=False)
    if "async tp" in notes.lower() or "asynctp" in notes.lower():
        software = replace(software, hides_tensor=MEGATRON_CORE.hides_tensor)
    return replace(found, software=software)


def machine(name: str, of: System, per_node: int | None) -> Cluster | None:
    """The cluster of devices of this name; None where there is no file of it."""
    known = max((key for key in _MACHINES if name.startswith(key)), key=len, default=None)
    if known is None:
        return None
    found = cluster(_MACHINES[known])
    if known in _DEVICES:
        found = replace(found, device=device(_DEVICES[known]))
    if per_node is not None:
        found = replace(found, devices_per_node=per_node)
    return replace(found, software=of.software, **of.machine)

"""How much of the devices' peak a run uses: model FLOPs utilisation (MFU).

The FLOPs of a token are those that the model needs, not those that a run executes:
- a multiplication and an addition are two FLOPs;
- the backward has two matmuls for each matmul of the forward, so a step counts as three forwards;
- attention scores are counted in full, even if a causal mask hides half of them;
- recomputation is not counted, nor are norms, activation functions and lookups.

This follows the formula of Narayanan et al. 2021 (Megatron-LM, arXiv 2104.04473, appendix). Their step has four
forwards because it recomputes; ours has three.
"""

from __future__ import annotations

import re

import torch
from torch import nn

from cubeloom.base.torch_private import FlopCounter
from cubeloom.models import ModelSource, OurModel, skeleton
from cubeloom.parallel import Batch
from cubeloom.parallel.traced import Tracing
from cubeloom.plan.hardware import Device, Dtype, device, devices
from cubeloom.plan.model.derive import derive
from cubeloom.plan.model.flops import flops
from cubeloom.train.job import Job

_DTYPES: dict[str, Dtype] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
# Words in a device's name that do not determine its speed.
_MAKERS = {"nvidia", "amd", "tesla", "instinct", "hbm2", "hbm2e", "hbm3", "hbm3e"}


def flops_per_token(job: Job) -> float:
    """Forward and backward, from the sizes of the model's layers. For a model of images a sample counts as one token."""
    source, batch = job.source(), job.batch
    if isinstance(source, OurModel):
        return flops(derive(source.name, source), batch.sequence) / tokens_of(source, batch)
    model = skeleton(source)
    cut = source.cut(model)
    if isinstance(cut, Tracing):
        return 3 * cut.traced(model, job.grid, batch).flops / tokens_of(source, batch)
    return 3 * _counted(source, model, batch) / tokens_of(source, batch)


def tokens_of(source: ModelSource, batch: Batch) -> int:
    """Tokens per sample."""
    return 1 if source.positions is None else batch.sequence


def _counted(source: ModelSource, model: nn.Module, batch: Batch) -> float:
    """torch's count for a forward of one sample, run without values."""
    data = source.samples(Batch(1, batch.sequence), 0, 0, torch.get_default_dtype())
    with FlopCounter() as counter, torch.no_grad(), torch.device("meta"):
        model(**{name: each.to("meta") for name, each in data.items()})
    return float(counter.total)


def mfu(tokens_per_s: float, flops_per_token: float, peak: float | None, ranks: int) -> float | None:
    """The share of all ranks' peak that the model used; None if the peak is unknown."""
    return None if peak is None else tokens_per_s * flops_per_token / (peak * ranks)


def peak_of(device_name: str, dtype: str) -> float | None:
    """The FLOP/s of a device, by the name that torch reports and the name of a torch dtype; None if unknown.

    From the planner's device files, if the value was published by the maker: an estimate would be a guess, and a
    measured value holds for one machine. A file must match every word of the name: an H100 on PCIe is another device
    than one on SXM, and a slice of a GPU is not the GPU.
    """
    if dtype not in _DTYPES:
        return None
    facts = [each.facts[_DTYPES[dtype]] for each in map(device, devices()) if _is(device_name, each)]
    peaks = {fact.value if fact.confidence == "published" else None for fact in facts}
    return peaks.pop() if len(peaks) == 1 else None


def _is(name: str, known: Device) -> bool:
    words = _words(name)
    model = known.name.partition("-")[0].lower()
    return model in words and words <= _words(f"{known.name} {known.about}") | _MAKERS


def _words(text: str) -> set[str]:
    """In lowercase, with `40 GB` as one word, and SXM without its generation."""
    joined = re.sub(r"(\d+)\s+gb\b", r"\1gb", text.lower())
    return {re.sub(r"^sxm\d$", "sxm", word) for word in re.findall(r"[a-z0-9.]+", joined)}

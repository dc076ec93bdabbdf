"""Tensor3D and AxoNN (Singh, Sating and Bhatele 2023) against Megatron-LM, on Perlmutter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from cubeloom.base.divisors import divisors
from cubeloom.parallel.config import FREED, ParallelConfig
from cubeloom.parallel.specs import AttentionSpec, LinearSpec
from cubeloom.plan.cost_model.volume import step_bytes
from cubeloom.plan.hardware import Cluster
from cubeloom.plan.hardware import cluster as known
from cubeloom.plan.model import Model, load
from cubeloom.plan.reproduce import published as paper
from cubeloom.plan.reproduce.grids import ITEM, Decomposition, Step, largest, step, steps
from cubeloom.plan.reproduce.report import Report, Row
from cubeloom.plan.reproduce.unet import as_tensor3d

# The U-Net of the first version: batch 2048, 32 ranks per copy and so 8 copies, recalled with low confidence.
UNET, UNET_BATCH, UNET_PLANE, UNET_COPIES = "unet-28b", 2048, 32, 8
# The GPT: at least 64 ranks per copy and recomputation from the authors' scripts; 1,024 sequences are our assumption.
GPT, GPT_BATCH, GPT_SEQUENCE, GPT_RANKS, GPT_LEAST = "gpt-80b", 1024, 2048, 1024, 64
_MICROBATCHES = (1, 2, 4)


def reproduce() -> Report:
    cluster = known("perlmutter")
    ours, megatron = unet(cluster)
    best, rival = gpt(cluster)
    rows = (
        Row(paper.UNET_OVER_MEGATRON, megatron.seconds / ours.seconds),
        Row(paper.GPT_OVER_MEGATRON, rival.seconds / best.seconds),
        Row(paper.GPT_OF_PEAK, gpt_flops(load(GPT)) / (best.seconds * GPT_RANKS * cluster.device.bf16)),
    )
    return Report(
        "tensor3d",
        "Tensor3D and AxoNN (Singh et al. 2023) on Perlmutter",
        rows,
        (
            ours.share("U-Net, Tensor3D"),
            megatron.share("U-Net, Megatron-LM"),
            best.share("GPT, AxoNN"),
            rival.share("GPT, Megatron-LM"),
        ),
        (
            "Nothing is calibrated. 'x % over' is read as so much faster: 1.60 and 1.26.",
            f"U-Net: batch {UNET_BATCH} on {UNET_COPIES} copies of {UNET_PLANE} ranks, recalled; Tensor3D on the plane that "
            "moves fewest bytes, two strands; Megatron-LM cuts one way only.",
            f"GPT: {GPT_BATCH} sequences of {GPT_SEQUENCE}, assumed; recomputation and at least {GPT_LEAST} ranks a copy, as "
            "in the authors' scripts. Each side has its best grid by the same model; stages may be uneven by a block.",
        ),
        tuple(row.point.name for row in rows),
    )


def unet(cluster: Cluster) -> tuple[Step, Step]:
    """Tensor3D, and Megatron-LM, which is the plane of x = 1; in parts of a batch that are as large as fit Tensor3D's
    memory.
    """
    model = as_tensor3d(load(UNET))
    planes = [(x, UNET_PLANE // x) for x in divisors(UNET_PLANE)]
    x, y = min(planes, key=lambda plane: _plane_bytes(model, *plane))
    plane = Decomposition(data=UNET_COPIES, y=y, x=x, ways=2)
    size = largest(model, plane, UNET_BATCH // UNET_COPIES, cluster)
    grids = (
        replace(plane, microbatch=size),
        Decomposition(data=UNET_COPIES, y=UNET_PLANE, microbatch=size),
    )
    ours, megatron = (step(model, grid, UNET_BATCH, 1, cluster, again=False) for grid in grids)
    return ours, megatron


def gpt(cluster: Cluster) -> tuple[Step, Step]:
    """The best of AxoNN's grids, and the best of Megatron-LM's."""
    model = load(GPT)
    ours = steps(model, list(_axonn(model)), GPT_BATCH, GPT_SEQUENCE, cluster, again=True)
    rivals = [step(model, grid, GPT_BATCH, GPT_SEQUENCE, cluster, again=True) for grid in _megatron(model)]
    return min(ours, key=lambda each: each.seconds), min(rivals, key=lambda each: each.seconds)


def gpt_flops(model: Model) -> float:
    """FLOPs of a step as the authors count them, by Megatron-LM's formula, with a second forward."""
    up = next(layer for layer in model.kinds[model.row[1]].layers if isinstance(layer, LinearSpec))
    head = next(layer for layer in model.kinds[model.row[-1]].layers if isinstance(layer, LinearSpec))
    hidden, vocabulary, layers = up.k, head.n, len(model.row) - 2
    ends = 1 + GPT_SEQUENCE / (6 * hidden) + vocabulary / (16 * layers * hidden)
    return 96 * GPT_BATCH * GPT_SEQUENCE * layers * hidden**2 * ends


def _plane_bytes(model: Model, x: int, y: int) -> float:
    """What a rank receives of activations in a step: the authors' communication model."""
    s = ParallelConfig(
        data=UNET_COPIES, z=1, y=y, x=x, samples=UNET_BATCH, sequence=1, sharded=False, weights=FREED, item=ITEM,
        gradients="model",
    )  # fmt: skip
    return sum(float(size) for axes, size in step_bytes(model, s).items() if "data" not in axes)


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def _axonn(model: Model) -> Iterator[Decomposition]:
    """Powers of two with enough ranks per copy and whole heads."""
    heads = _heads(model)
    for x, y, z in product(_powers(GPT_RANKS), repeat=3):
        copy = x * y * z
        if not GPT_LEAST <= copy <= GPT_RANKS or heads % y:
            continue
        data = GPT_RANKS // copy
        if GPT_BATCH % (data * z) == 0:
            yield Decomposition(data=data, z=z, y=y, x=x)


def _megatron(model: Model) -> Iterator[Decomposition]:
    heads = _heads(model)
    for tensor, pipe in product(_powers(GPT_LEAST), repeat=2):
        copy = tensor * pipe
        # Larger copies only wait more for each other.
        if copy not in (GPT_LEAST, 2 * GPT_LEAST) or heads % tensor or pipe > len(model.row) - 2:
            continue
        for microbatch in _MICROBATCHES:
            yield Decomposition(data=GPT_RANKS // copy, y=tensor, pipe=pipe, microbatch=microbatch)


def _heads(model: Model) -> int:
    return next(layer.heads for layer in model.kinds[model.row[1]].layers if isinstance(layer, AttentionSpec))

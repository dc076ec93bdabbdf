"""The cost of a piece of a model on one device in PyTorch as of 2021: float32, attention not fused.

The list of layers and its closed form give matmuls, norms and activation functions. Added is what fused attention
avoids: it writes the scores of all pairs of tokens to memory, several times, and keeps some.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from cubeloom.parallel.config import ParallelConfig
from cubeloom.parallel.specs import AttentionSpec
from cubeloom.plan import costs
from cubeloom.plan.cost_model.compute import Machine, issue, seconds
from cubeloom.plan.cost_model.memory import room
from cubeloom.plan.hardware import Device
from cubeloom.plan.model import Piece

ITEM = 4  # bytes per element
# Product, scale, mask, softmax, dropout: each reads and writes the scores, and so does its backward.
_PASSES = 10
# A block keeps three copies of the scores: the profile of a BERT-large block that Chimera's authors ship (prof/, P100)
# has
# 11.0 MiB of activations a sample, of which a block with fused attention keeps 8.0, and scores are 1.0 MiB.
_KEPT = 3


class Part(NamedTuple):
    """Of one micro-batch: seconds, bytes that it keeps and sends, and numbers of parameters."""

    forward: float
    backward: float
    activations: float
    numbers: float
    handed: float


@cache
def part(piece: Piece, samples: int, sequence: int, device: Device) -> Part:
    s = ParallelConfig(
        data=1, z=1, y=1, x=1, samples=samples, sequence=sequence, sharded=False, item=ITEM, gradients="model"
    )
    machine = Machine(device, "fp32")
    layers = [issue(seconds(layer, s, machine), s, machine) for layer in piece.layers]
    heads = sum(layer.heads for layer in piece.layers if isinstance(layer, AttentionSpec))
    scores = samples * heads * sequence**2 * ITEM
    passes = float(costs.memory_bound(device, _PASSES * scores)) if heads else 0.0
    space = room(piece, s)
    return Part(
        sum(float(each.forward) for each in layers) + passes,
        sum(float(each.input_grad + each.weight_grad) for each in layers) + passes,
        float(space.activations) + _KEPT * scores,
        float(space.parameters),
        float(sum(samples * sequence * each.numbers * ITEM for each in piece.outputs)),
    )

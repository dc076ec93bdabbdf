"""The tensors that the pieces of a model send to each other, from the layouts of their layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from cubeloom.base.grid import Grid
from cubeloom.models.pieces import Carry, Piece
from cubeloom.parallel.config import Batch, ParallelConfig, ShardingPolicy
from cubeloom.parallel.specs import EdgeSpec, EmbeddingSpec, ImageNormSpec, LayerSpec, LinearSpec, Side
from cubeloom.pipeline.runtime.partition import belongs
from cubeloom.pipeline.volume import StageOutput

_PLAIN = ParallelConfig.exact(Grid(), ShardingPolicy(activations="replicated"), Batch(1, 1), item=1)


def stage_outputs(model: nn.Module, specs: Sequence[LayerSpec]) -> list[tuple[StageOutput, ...]]:
    """The tensors that each piece of a model sends to the next."""
    pieces: list[Piece] = model.pieces()  # type: ignore[operator]
    if not hasattr(model, "example"):
        # A Transformer sends the residual stream, which has the layout of the embedding's output.
        embedding = next(spec for spec in specs if isinstance(spec, EmbeddingSpec))
        return [(StageOutput(numbers=embedding.features, side="x", always=False),)] * len(pieces)
    samples = 2
    data = model.example(samples)  # type: ignore[operator]
    carry: Carry = {}
    known: dict[str, StageOutput] = {}
    found = []
    for piece in pieces:
        before = carry
        with torch.no_grad():
            carry = piece.run(before, data)
        last = _last([spec for spec in specs if belongs(spec.name, piece.modules)])
        for name, tensor in carry.items():
            if tensor is not before.get(name):
                output = replace(last, numbers=tensor.numel() // samples)
                known[name] = replace(output, side=None) if name in piece.whole else output
        found.append(tuple(known[name] for name in carry))
    return found


def _last(specs: Sequence[LayerSpec]) -> StageOutput:
    """The side of the features after the last of these layers, and whether it always cuts rows further."""
    linears = [spec for spec in reversed(specs) if isinstance(spec, LinearSpec | EdgeSpec) and _side(spec) is not None]
    norms = [spec for spec in specs if isinstance(spec, ImageNormSpec)]
    spec = next(iter(linears or norms))
    given = spec.gives(_PLAIN)
    assert given is not None
    return StageOutput(numbers=0, side=_side(spec), always=len(given.axes("rows")) > 2)


def _side(spec: LayerSpec) -> Side | None:
    given = spec.gives(_PLAIN)
    cutting = () if given is None else given.axes("features")
    return cutting[0] if cutting else None  # type: ignore[return-value]

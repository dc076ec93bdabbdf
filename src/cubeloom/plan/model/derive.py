"""The list of layers from the real modules, on the meta device: their specs, and what else is seen in a run of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from cubeloom.base.grid import Grid
from cubeloom.models import AttentionCore, ModelSource, SwiGLU, preset, skeleton
from cubeloom.models.pieces import Piece as TorchPiece
from cubeloom.parallel.config import Batch, ParallelConfig, ShardingPolicy
from cubeloom.parallel.layers.declared import FoundCut
from cubeloom.parallel.recomputed import blocks_of
from cubeloom.parallel.resolution import specs_of
from cubeloom.parallel.specs import (
    AttentionSpec,
    DropoutSpec,
    FeedForwardSpec,
    LayerSpec,
    LinearSpec,
    LossSpec,
    PointwiseSpec,
    ReplicatedSpec,
    Side,
    SquaredLossSpec,
)
from cubeloom.pipeline.runtime.partition import belongs, counted_costs, partition
from cubeloom.pipeline.runtime.stage_outputs import stage_outputs
from cubeloom.plan.model.model import Model, Piece

# Numbers of stages that the list has the cut for; `store` makes others when they are asked for.
STAGES = (*range(1, 17), *range(20, 65, 4), 72, 80, 88, 96, 112, 128)
Seen = Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]  # shapes of each module's input and output, two samples
_PLAIN = ParallelConfig.exact(Grid(), ShardingPolicy(activations="replicated"), Batch(1, 1), item=1)


def derive(name: str, source: ModelSource | None = None) -> Model:
    """The layers of a preset, or of a model of other sizes under a name of its own. Of equal pieces only one is described."""
    chosen = source or preset(name)
    model = skeleton(chosen)
    seen = _run(model, chosen)
    specs = _written_specs(model, chosen)
    pieces: list[TorchPiece] = model.pieces()  # type: ignore[operator]
    blocks = blocks_of(model, specs)
    found = [
        Piece(
            layers=tuple(_layers(model, piece, specs, seen)),
            outputs=outputs,
            tokens=chosen.positions is not None,
            losses=sum(isinstance(s, LossSpec | SquaredLossSpec) and belongs(s.name, piece.modules) for s in specs),
            block=set(piece.modules) <= set(blocks),
        )
        for piece, outputs in zip(pieces, stage_outputs(model, specs), strict=True)
    ]
    anonymous = [_without_place(piece, torch_piece) for piece, torch_piece in zip(found, pieces, strict=True)]
    kinds = list(dict.fromkeys(anonymous))
    costs = counted_costs([piece.modules for piece in pieces], specs)
    return Model(
        name=name,
        sequence=chosen.positions or 1,
        kinds=tuple(kinds),
        row=tuple(map(kinds.index, anonymous)),
        # `store` could not make others for a model that has no preset.
        cuts={n: _ends(partition(costs, n)) for n in range(1, len(pieces) + 1) if n in STAGES or source is not None},
    )


def stages_of(name: str, count: int) -> tuple[int, ...]:
    """Where each of so many stages of a preset ends."""
    source = preset(name)
    model = skeleton(source)
    specs = _written_specs(model, source)
    return _ends(partition(counted_costs([piece.modules for piece in model.pieces()], specs), count))  # type: ignore[operator]


def _written_specs(model: nn.Module, source: ModelSource) -> list[LayerSpec]:
    cut = source.cut(model)
    if isinstance(cut, FoundCut):
        raise TypeError(f"the cut of {source.name} is found for a plane: see derive_found")
    return specs_of(model, cut)


def _ends(ranges: Sequence[range]) -> tuple[int, ...]:
    return tuple(each.stop for each in ranges)


def _run(model: nn.Module, source: ModelSource) -> Seen:
    """Shapes that every module without children takes and gives, for two samples, or for two sequences of four tokens."""
    seen: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def watch(name: str) -> Any:
        def note(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            seen[name] = tuple(inputs[0].shape), tuple(output.shape)

        return note

    hooks = [
        module.register_forward_hook(watch(name))
        for name, module in model.named_modules()
        if not list(module.children())
    ]
    data = source.samples(Batch(2, 1 if source.positions is None else 4), 0, 0, torch.float32)
    with torch.no_grad():
        model(**{name: tensor.to("meta") for name, tensor in data.items()})
    for hook in hooks:
        hook.remove()
    return seen


def _layers(model: nn.Module, piece: TorchPiece, specs: Sequence[LayerSpec], seen: Seen) -> Iterator[LayerSpec]:
    """In the order of the modules, those without a spec between those with one."""
    by_name = {spec.name: spec for spec in specs}
    side: Side | None = "x"  # of the features that the layer before left; None: whole
    always = False
    for name, module in model.named_modules():
        if not belongs(name, piece.modules):
            continue
        if name in by_name:
            spec = by_name[name]
            if isinstance(spec, LossSpec):
                spec = replace(spec, classes=seen[name][0][-1])
            if isinstance(spec, DropoutSpec) and spec.probability:
                yield spec
            if not isinstance(spec, DropoutSpec | FeedForwardSpec):
                side, always = _leaves(spec, side, always)
                yield spec
        elif isinstance(module, AttentionCore):
            yield _attention(name, module, by_name, seen)
        elif isinstance(module, nn.GELU | nn.SiLU | SwiGLU):
            yield _pointwise(name, module, seen, side, always)


def _leaves(spec: LayerSpec, side: Side | None, always: bool) -> tuple[Side | None, bool]:
    """Where features lie behind a layer, and whether rows are cut further in any case."""
    given = spec.gives(_PLAIN)
    if given is None or not given.dims or isinstance(spec, LossSpec | SquaredLossSpec):
        return side, always
    if isinstance(spec, ReplicatedSpec):
        return None, always
    cutting = given.axes("features")
    if not cutting:
        return side, always
    by_heads = isinstance(spec, LinearSpec) and spec.heads is not None
    return cutting[0], len(given.axes("rows")) > 2 and not by_heads  # type: ignore[return-value]


def _attention(name: str, core: AttentionCore, by_name: Mapping[str, LayerSpec], seen: Seen) -> AttentionSpec:
    projection = by_name[f"{name.rpartition('.')[0]}.qkv"]
    assert isinstance(projection, LinearSpec)
    group = (core.queries_per_key + 2) * core.head_dim
    kv_heads = seen[name][0][-1] // group
    return AttentionSpec(
        name=name,
        heads=kv_heads * core.queries_per_key,
        kv_heads=kv_heads,
        head_dim=core.head_dim,
        head_axis=projection.head_axis,
        rotary=core.rotary_base is not None,
        causal=core.causal,
        length=None if projection.pixels is None else projection.pixels[1],
    )


def _pointwise(name: str, module: nn.Module, seen: Seen, side: Side | None, always: bool) -> PointwiseSpec:
    into, out = seen[name]
    image = len(into) == 4
    inputs, outputs = (into[1], out[1]) if image else (into[-1], out[-1])
    # A gated unit keeps what came in and the activated gate; others what came in.
    kept = inputs + outputs if isinstance(module, SwiGLU) else inputs
    return PointwiseSpec(
        name=name,
        side=side or "x",
        inputs=inputs,
        outputs=outputs,
        kept=kept,
        pixels=prod(into[2:]) if image else None,
        always=always,
        whole=side is None,
    )


def _without_place(piece: Piece, of: TorchPiece) -> Piece:
    """The piece with names that do not say where it stands, unless it stands alone: so that equal ones are equal."""
    (first, *rest) = of.modules
    if rest:
        return piece
    return replace(
        piece, layers=tuple(replace(layer, name=layer.name.removeprefix(f"{first}.")) for layer in piece.layers)
    )

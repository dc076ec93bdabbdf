"""Blocks whose forward is recomputed in the backward: each keeps only its inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

from torch import nn

from cubeloom.parallel.specs import LayerSpec, last_linear
from cubeloom.parallel.traced.units import units_of
from cubeloom.parallel.weave import recompute


def blocks_of(model: nn.Module, layers: Sequence[LayerSpec]) -> tuple[str, ...]:
    """The modules of a model's row of blocks, by name. Raises UserError if there is none.

    For a model that lists its pieces: all pieces but the first and the last.
    """
    if hasattr(model, "pieces"):
        return tuple(name for piece in model.pieces()[1:-1] for name in piece.modules)  # type: ignore[operator]
    units = units_of(model, [layer.name for layer in layers])
    return tuple(unit for unit in units.units if unit in units.blocks)


def layers_of(block: str, layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    return [layer for layer in layers if layer.name == block or layer.name.startswith(f"{block}.")]


def recompute_blocks(
    model: nn.Module,
    blocks: Collection[str],
    layers: Sequence[LayerSpec],
    kept: Mapping[str, frozenset[str]] | None = None,
) -> None:
    """Make these blocks of a model, whose layers have been replaced, recompute their forward, one by one."""
    for name in blocks:
        block = model.get_submodule(name)
        early_stop = last_linear(layers_of(name, layers)) is not None
        keeps = (kept or {}).get(name, frozenset[str]())
        block.forward = partial(recompute, block.forward, early_stop=early_stop, keeps=keeps)

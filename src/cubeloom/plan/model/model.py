"""A model as its list of layers: the specs of one block of each kind, and their number. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from cubeloom.parallel.config import ParallelConfig
from cubeloom.parallel.layout import Axes
from cubeloom.parallel.specs import ImageNormSpec, LayerSpec
from cubeloom.pipeline.volume import StageOutput


@dataclass(frozen=True)
class PlaneOutput:
    """What a piece of a traced model hands to the next: numbers of a sample, or of all that are alike, and what cuts them."""

    numbers: float
    of_samples: bool
    cutting: Axes

    def elements(self, tokens: bool, c: ParallelConfig) -> Any:
        """On one rank."""
        return self.numbers / c.size(*self.cutting) * (c.samples_of if self.of_samples else 1)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A unit that a pipeline does not cut: a block, or what comes before or after the blocks."""

    layers: tuple[LayerSpec, ...]
    outputs: tuple[StageOutput | PlaneOutput, ...]
    tokens: bool = True  # rows are tokens; otherwise pixels of samples
    losses: int = 0  # the number of losses whose targets are counted over the ranks, once a step
    block: bool = False  # one of the model's row of blocks, which can be recomputed

    @cached_property
    def weights(self) -> frozenset[str]:
        """Names of the weights that it uses; other pieces may use them too."""
        return frozenset(f"{getattr(layer, 'shares', None) or layer.name}.weight" for layer in self.layers)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A row of pieces, each of one of a few `kinds`."""

    name: str
    sequence: int  # the longest, if rows are tokens; otherwise 1
    kinds: tuple[Piece, ...]
    row: tuple[int, ...]  # the kind of each piece
    cuts: dict[int, tuple[int, ...]]  # for each number of stages, the last piece of each stage
    planes: frozenset[tuple[int, int]] | None = None  # the values of x and y for which its cut was found; None: all
    others: tuple[Model, ...] = ()  # the same model with its layouts on other planes

    @property
    def tokens(self) -> bool:
        return self.kinds[0].tokens

    @property
    def variants(self) -> tuple[Model, ...]:
        return self, *self.others

    def on(self, x: int, y: int) -> Model:
        """The model with its layouts on this plane. Raises KeyError if there is none."""
        for each in self.variants:
            if each.planes is None or (x, y) in each.planes:
                return each
        raise KeyError((x, y))

    @cached_property
    def tied(self) -> frozenset[str]:
        """Names of the weights that two layers share."""
        shared = {getattr(layer, "shares", None) for kind in self.kinds for layer in kind.layers}
        return frozenset(f"{owner}.weight" for owner in shared if owner is not None)

    @cached_property
    def has_batch_norm(self) -> bool:
        return any(
            isinstance(layer, ImageNormSpec) and layer.groups is None for kind in self.kinds for layer in kind.layers
        )

    def stages(self, count: int) -> tuple[tuple[int, ...], ...]:
        """The number of pieces of each kind in each stage."""
        ends = self.cuts[count]
        starts = (0, *ends[:-1])
        return tuple(
            tuple(self.row[start:end].count(kind) for kind in range(len(self.kinds)))
            for start, end in zip(starts, ends, strict=True)
        )


def refusals(model: Model, c: ParallelConfig) -> Iterator[tuple[str, Any]]:
    """Sizes that do not divide, each with the decompositions. `c.samples` are those of one strand of a micro-batch."""
    yield "batch over data and z", np.asarray(c.samples % (c.data * c.z) != 0)
    for kind in model.kinds:
        for layer in kind.layers:
            for rule in layer.rules(c):
                yield rule.label, np.asarray(rule.broken).astype(bool)

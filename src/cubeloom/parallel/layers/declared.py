"""How a cut says what a layer is, and how layers are made of that.

Each kind of layer is one file: its declaration, which looks at the plain module and gives the layer's spec; and the layer that
computes it on the cube, made by a function that is registered for the spec.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import singledispatch
from typing import TYPE_CHECKING

from torch import Tensor, nn

from cubeloom.base.grid import Grid
from cubeloom.parallel.config import Batch
from cubeloom.parallel.parameter import Block
from cubeloom.parallel.specs import LayerSpec
from cubeloom.parallel.state import CubeState
from cubeloom.parallel.weight import Weight

if TYPE_CHECKING:
    from cubeloom.parallel.traced.row import Row


@dataclass(frozen=True)
class Seen:
    """What a declaration may ask of the model besides the module."""

    pixels: tuple[int, int] | None = None  # of a sample, into and out of the layer; None: its rows are tokens
    shares: str | None = None  # the layer before it that has the same weight


class Declared(ABC):
    """What a cut says of a layer."""

    @abstractmethod
    def spec(self, name: str, module: nn.Module, seen: Seen) -> LayerSpec | None:
        """The spec of this module, without values; None if the declaration cannot mean such a module."""


def written(declared: Declared) -> str:
    """As a user writes it: `Expand(heads=12)`."""
    given = (
        f"{each.name}={getattr(declared, each.name)!r}"
        for each in fields(declared)  # type: ignore[arg-type]
        if getattr(declared, each.name) != each.default
    )
    return f"{type(declared).__name__}({', '.join(given)})"


class FoundCut(ABC):
    """In the place of a cut that somebody wrote: one that is found for a grid."""

    @abstractmethod
    def specs(self, model: nn.Module, grid: Grid, batch: Batch) -> list[LayerSpec]:
        """Raises CutError where there is none."""

    @abstractmethod
    def row(self, model: nn.Module, grid: Grid, batch: Batch) -> Row:
        """Where a pipeline can cut the model. Raises UserError where it cannot."""

    @abstractmethod
    def finish(
        self, model: nn.Module, grid: Grid, batch: Batch, state: CubeState, fill: Callable[[str, Block], Tensor]
    ) -> None:
        """What is left to do where the layers of a model, or of a stage of it, have been replaced."""


Cut = Mapping[str, Declared]  # by module name, `*` standing for a number
AnyCut = Cut | FoundCut


@dataclass(frozen=True)
class Making:
    """What the layer in the place of a plain one is made of, on one rank."""

    plain: nn.Module
    state: CubeState
    parameter: Callable[[str], nn.Parameter | None]  # `weight` or `bias`, distributed; None if there is none
    weights: dict[str, Weight] = field(default_factory=dict)  # of the layers made so far: two may share one

    def weight(self, owner: str, over_z: bool = True) -> Weight:
        """One that is gathered along z for its use, if it is cut there."""
        if owner not in self.weights:
            parameter, state = self.parameter("weight"), self.state
            assert parameter is not None
            mode = state.rest.weights if over_z else "replicated"
            self.weights[owner] = Weight(parameter, state.network.axis("z"), mode, state.prefetch_order, owner)
        return self.weights[owner]


@singledispatch
def make_layer(spec: LayerSpec, making: Making) -> nn.Module:
    """The layer of a spec. Each kind registers its own."""
    raise TypeError(f"no layer is registered for {type(spec).__name__}")

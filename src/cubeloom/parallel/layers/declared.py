"""How a cut declares a layer, and how the sharded layer is created from the declaration.

Each kind of layer is one file. Its declaration inspects the plain module and returns the layer's spec. A function
registered for the spec creates the layer that computes it on the cube.
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
from cubeloom.parallel.outputs import Outputs
from cubeloom.parallel.parameter import Block
from cubeloom.parallel.specs import LayerSpec
from cubeloom.parallel.state import CubeState
from cubeloom.parallel.weight import Weight

if TYPE_CHECKING:
    from cubeloom.parallel.traced.row import Row


@dataclass(frozen=True)
class Seen:
    """What a declaration may know of the model besides the module."""

    pixels: tuple[int, int] | None = None  # per sample, of the input and the output; None: rows are tokens
    shares: str | None = None  # an earlier layer with the same weight


class Declared(ABC):
    """The declaration of a layer in a cut."""

    @abstractmethod
    def spec(self, name: str, module: nn.Module, seen: Seen) -> LayerSpec | None:
        """The spec of this module, without values; None if the declaration does not apply to such a module."""


def written(declared: Declared) -> str:
    """The declaration as a user writes it: `Expand(heads=12)`."""
    given = (
        f"{each.name}={getattr(declared, each.name)!r}"
        for each in fields(declared)  # type: ignore[arg-type]
        if getattr(declared, each.name) != each.default
    )
    return f"{type(declared).__name__}({', '.join(given)})"


class FoundCut(ABC):
    """A cut that is found for a grid, in place of a hand-written one."""

    @abstractmethod
    def specs(self, model: nn.Module, grid: Grid, batch: Batch) -> list[LayerSpec]:
        """Raises CutError if there is none."""

    @abstractmethod
    def outputs(self, model: nn.Module, grid: Grid, batch: Batch) -> Outputs:
        """How what the model gives lies."""

    @abstractmethod
    def row(self, model: nn.Module, grid: Grid, batch: Batch) -> Row:
        """The blocks at which a pipeline can cut the model. Raises UserError if there are none."""

    @abstractmethod
    def finish(
        self,
        model: nn.Module,
        grid: Grid,
        batch: Batch,
        state: CubeState,
        fill: Callable[[str, Block], Tensor],
        compile: bool = False,
    ) -> None:
        """Complete a model, or a stage of it, after its layers have been replaced. `compile`: its blocks, too."""


Cut = Mapping[str, Declared]  # by module name, in which `*` stands for a number
AnyCut = Cut | FoundCut


@dataclass(frozen=True)
class Making:
    """What the layer that replaces a plain one is created from, on one rank."""

    plain: nn.Module
    state: CubeState
    parameter: Callable[[str], nn.Parameter | None]  # `weight` or `bias`, distributed; None if the module has none
    weights: dict[str, Weight] = field(default_factory=dict)  # of the layers created so far: two may share one

    def weight(self, owner: str, over_z: bool = True) -> Weight:
        """The weight, which is all-gathered along z for its use if z cuts it."""
        if owner not in self.weights:
            parameter, state = self.parameter("weight"), self.state
            assert parameter is not None
            mode = state.rest.weights if over_z else "replicated"
            self.weights[owner] = Weight(parameter, state.network.axis("z"), mode, state.prefetch_order, owner)
        return self.weights[owner]


@singledispatch
def make_layer(spec: LayerSpec, making: Making) -> nn.Module:
    """Create the layer of a spec. Each kind registers its own function."""
    raise TypeError(f"no layer is registered for {type(spec).__name__}")

"""A proposal for a module that others wrote, as a value that can be read and applied."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from cubeloom.base.errors import UserError
from cubeloom.base.grid import Grid
from cubeloom.comm import Network
from cubeloom.parallel.foreign.apply import replace_layers
from cubeloom.parallel.foreign.cost import add, data_parallel_volume, layer_volume, loss_volume, whole_volume
from cubeloom.parallel.foreign.placed import Placed, Whole
from cubeloom.parallel.foreign.report import bytes_by_axis, number, table
from cubeloom.parallel.replace import Fill
from cubeloom.parallel.state import CubeState
from cubeloom.parallel.volume import Volume


@dataclass(frozen=True)
class Proposal:
    """Which layer gets what, and what a step moves. `item`: bytes of one number."""

    model: str
    grid: Grid
    layers: tuple[Placed, ...]
    whole: tuple[Whole, ...]
    item: int
    losses: int = 0  # inside the model, whose targets ranks count together

    def volume(self) -> Volume:
        """Bytes that a rank receives along each axis in one forward and backward, with the sum of gradients and the loss."""
        return add(
            *(layer_volume(layer, self.grid, self.item) for layer in self.layers),
            *(whole_volume(each, self.grid, self.item) for each in self.whole),
            *(1 + self.losses) * [loss_volume(self.grid)],
        )

    def data_parallel_volume(self) -> Volume:
        """The same for data parallelism on as many ranks, each of which would hold the whole model."""
        return data_parallel_volume(self.numbers, self.grid, self.item)

    @property
    def numbers(self) -> int:
        """In all parameters."""
        return sum(layer.numbers for layer in self.layers) + sum(each.numbers for each in self.whole)

    @property
    def held(self) -> int:
        """Numbers of parameters that one rank has."""
        return sum(layer.held(self.grid) for layer in self.layers) + sum(each.numbers for each in self.whole)

    def apply(self, module: nn.Module, network: Network, fill: Fill | None = None) -> CubeState:
        """Cut the module over the network's ranks, in place; on every rank. Gives what its layers share.

        Each rank takes its blocks from the module's values, or, where it is on the meta device, from `fill`, which is asked
        for buffers too.
        """
        if network.grid.sizes != self.grid.sizes:
            raise UserError(f"this proposal is for the grid {self.grid}, and the network is {network.grid}")
        return replace_layers(module, self.layers, network, fill)

    def __str__(self) -> str:
        both = f"{len(self.layers)} layers cut, {len(self.whole)} modules left whole"
        beside = bytes_by_axis(self.data_parallel_volume())
        return "\n".join(
            (
                f"{self.model} on {self.grid}: {both}",
                *table(self.layers, self.whole, self.grid, self.item),
                f"a rank holds {number(self.held)} of {number(self.numbers)} numbers",
                f"a rank receives in a step, in bytes: {bytes_by_axis(self.volume())}",
                f"data parallelism on {self.grid.world} ranks, each with all numbers: {beside}",
            )
        )

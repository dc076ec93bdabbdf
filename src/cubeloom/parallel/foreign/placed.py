"""Where a layer of a foreign model lies, as pure values."""

from __future__ import annotations

from dataclasses import dataclass

from cubeloom.base.grid import Grid
from cubeloom.parallel.config import Batch, ParallelConfig, ShardingPolicy
from cubeloom.parallel.foreign.known import Sizes
from cubeloom.parallel.foreign.trace import Call
from cubeloom.parallel.specs import LinearSpec, Side, other, parameters


@dataclass(frozen=True)
class Placed:
    """A layer that is cut. It takes its part of whole features if it `enters`, and makes them whole again if it `leaves`."""

    spec: LinearSpec
    sharded: bool  # the weight is cut over z, too
    dim: int  # that is features
    enters: bool
    leaves: bool
    calls: tuple[Call, ...]
    why: str  # it leaves, in words

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def numbers(self) -> int:
        """In its parameters."""
        spec = self.spec
        return spec.k * spec.n * spec.kernel_numel + (spec.n if spec.bias else 0)

    def held(self, grid: Grid) -> int:
        """Of these, one rank's."""
        config = config_of(grid, self.sharded)
        return int(sum(each.numbers(config) for each in parameters(self.spec, config).values()))

    @property
    def gradient(self) -> bool:
        """Whether the gradient of its input is ever wanted."""
        return any(call.gradient for call in self.calls)


@dataclass(frozen=True)
class Whole:
    """A module whose own parameters every rank of the plane has in full, and computes with."""

    name: str
    kind: str
    why: str
    numbers: int  # of its parameters that no module before it has
    summed: int  # of these, trained by the example


# Gradients of what is left whole are averaged over the plane too: its ranks compute the same, but a GPU does not repeat its
# rounding (in the backward of attention, for instance), and replicas would drift apart.
WHOLE_AXES = ("data", "z", "x", "y")


def bias_axes(spec: LinearSpec) -> tuple[str, ...]:
    """The axes over which the gradient of a bias is reduced: those that do not cut it."""
    return ("data", "z", other(spec.bias_axis))


def config_of(grid: Grid, sharded: bool, item: int = 1) -> ParallelConfig:
    """Activations rest replicated, rows are never cut further: one sample on each rank of data and z."""
    rest = ShardingPolicy(activations="replicated", weights="freed" if sharded else "replicated")
    return ParallelConfig.exact(grid, rest, Batch(grid.data * grid.z, 1), item)


def spec_of(name: str, sizes: Sizes, side: Side) -> LinearSpec:
    return LinearSpec(
        name=name,
        k=sizes.k,
        n=sizes.n,
        side=side,
        bias=sizes.bias,
        kernel_numel=sizes.kernel_numel,
        transposed=sizes.transposed,
    )


def sharded(spec: LinearSpec, grid: Grid) -> bool:
    """Whether z divides the weight, too."""
    return not problems(spec, grid, weight_over_z=True)


def problems(spec: LinearSpec, grid: Grid, weight_over_z: bool = False) -> list[str]:
    """What the grid does not divide. Nothing here depends on the batch."""
    config = config_of(grid, weight_over_z)
    return [rule.words() for rule in spec.rules(config) if rule.broken]

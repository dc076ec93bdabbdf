"""A traced model, as a value that can be read and applied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cubeloom.base import torch_private
from cubeloom.base.errors import UserError
from cubeloom.base.grid import Grid
from cubeloom.comm import Network
from cubeloom.parallel.boundary import Boundary, at_boundary
from cubeloom.parallel.check.tracked import Factor
from cubeloom.parallel.config import Batch, ParallelConfig, ShardingPolicy
from cubeloom.parallel.cut import CutError, pattern_of
from cubeloom.parallel.outputs import Outputs
from cubeloom.parallel.replace import Fill, replace_layers
from cubeloom.parallel.specs import LayerSpec, Parameter, TracedLinearSpec, WholeSpec, cut_share, parameters
from cubeloom.parallel.state import CubeState
from cubeloom.parallel.traced.build import specs_of, tied_layers
from cubeloom.parallel.traced.choices import Choices
from cubeloom.parallel.traced.compiling import compile_blocks
from cubeloom.parallel.traced.known import held_elsewhere, known
from cubeloom.parallel.traced.loss import average_losses
from cubeloom.parallel.traced.parts import buffers_to_cut
from cubeloom.parallel.traced.report import table
from cubeloom.parallel.traced.row import Row, watched_row
from cubeloom.parallel.traced.search import Samples, Search, Watch
from cubeloom.parallel.traced.slices import OwnParts, part_of
from cubeloom.parallel.traced.styles import Origin, Plan, origin, planned
from cubeloom.parallel.traced.values import own_values, place_buffers, refuse_different_values
from cubeloom.parallel.traced.without_values import asking_no_values
from cubeloom.parallel.volume import Volume, step_volume

REST = ShardingPolicy(activations="replicated")
_LEAST = 4  # samples


@dataclass(frozen=True)
class Traced:
    """How each layer of a model is sharded on a grid, for a batch like the example's."""

    model: str
    grid: Grid
    specs: tuple[LayerSpec, ...]
    item: int  # bytes per element
    flops_between: tuple[float, float]  # FLOPs between layers for one sample: in total, and on one rank
    choices: Choices = field(default_factory=Choices)  # for modules, besides their layers
    samples: int = 1  # of the example, on one rank
    rest: ShardingPolicy = REST
    origins: Mapping[str, Origin] = field(default_factory=dict)  # who decided the placement of each layer
    outputs: Outputs = field(default_factory=dict)  # the layouts of what the model gives
    averaged: frozenset[str] = frozenset()  # outputs that are a mean over a rank's own samples
    again: Callable[[nn.Module, Watch], object] | None = None  # runs the model again, on some of its samples

    def row(self, model: nn.Module) -> Row:
        """Its row of blocks. Raises UserError if there is none, and CutError if its samples cannot be cut."""
        if self.again is None:
            raise CutError(f"{self.model} was not traced, so that its row of blocks is not known")
        try:
            return watched_row(model, [spec.name for spec in self.specs], self.again)
        except CutError as error:
            raise CutError(
                f"{self.model}: micro-batches cut samples, and this model would compute something else of some samples than of"
                f" all: {error}"
            ) from None

    @property
    def config(self) -> ParallelConfig:
        """For a batch like the example's on each rank of data and z."""
        batch = Batch(self.samples * self.grid.data * self.grid.z, 1)
        return ParallelConfig.exact(self.grid, self.rest, batch, self.item)

    def volume(self) -> Volume:
        """Bytes that a rank receives along each axis in one forward and backward."""
        return step_volume(self.specs, self.config)

    def parameters(self) -> dict[str, Parameter]:
        config = self.config
        return {name: each for spec in self.specs for name, each in parameters(spec, config).items()}

    @property
    def numbers(self) -> int:
        """The number of elements of all parameters."""
        return int(sum(prod(each.shape) for each in self.parameters().values()))

    @property
    def held(self) -> int:
        """The number of elements of the parameters on one rank."""
        return int(sum(each.numbers(self.config) for each in self.parameters().values()))

    @property
    def cut_share(self) -> float:
        """The share of the parameters that every axis of the cube cuts."""
        return cut_share(self.specs, self.config)

    @property
    def flops(self) -> float:
        """FLOPs of the forward of one sample of the whole model."""
        return float(sum(spec.flops(1) for spec in self.specs) + self.flops_between[0])

    @property
    def flops_share(self) -> float:
        """The share of the FLOPs of a forward that one rank computes."""
        cut = sum(spec.flops(1) for spec in self.specs if isinstance(spec, TracedLinearSpec))
        alike = sum(spec.flops(1) for spec in self.specs if isinstance(spec, WholeSpec))
        own = cut / (self.grid.x * self.grid.y) + alike + self.flops_between[1]
        return float(own / max(self.flops, 1.0) / (self.grid.data * self.grid.z))

    def apply(self, model: nn.Module, network: Network, fill: Fill | None = None, compile: bool = False) -> CubeState:
        """Shard the model over the network's ranks, in place, on every rank. Without `fill` blocks get the module's
        values. `compile`: torch compiles the blocks, between their layers.
        """
        if network.grid.sizes != self.grid.sizes:
            raise UserError(f"this model was traced for the grid {self.grid}, and the network is {network.grid}")
        if fill is None:
            refuse_different_values(model, network)
        state = CubeState.of(network, REST)
        fill = fill or own_values(model)
        replace_layers(model, self.specs, state, fill)
        self.finish(model, state, fill, compile)
        network.models.add(model)
        at_boundary(model, Boundary(network, self.outputs))
        return state

    def finish(self, model: nn.Module, state: CubeState, fill: Fill, compile: bool = False) -> None:
        """Adjust modules' numbers, buffers and losses after layers have been replaced."""
        patches = self.choices.patch_of
        for name, module in model.named_modules():
            pattern = pattern_of(name)
            if (patch := patches.get(pattern)) is not None:
                patch.apply(module)
            if slices := self.choices.slices.get(pattern):
                own = OwnParts(slices, state.network.coordinates)
                module.register_forward_pre_hook(own, with_kwargs=True)
        place_buffers(model, state.network, fill)
        self._cut_buffers(model, state.network)
        if compile:
            compile_blocks(model, self.specs)
        average_losses(model, state, self.averaged)

    def _cut_buffers(self, model: nn.Module, network: Network) -> None:
        for name, buffer in buffers_to_cut(model).items():
            cut = self.choices.parameters.get(pattern_of(name))
            if cut is not None:
                owner, _, attribute = name.rpartition(".")
                dim = (Factor(buffer.shape[cut.place], cut.cutting),)
                own = part_of(buffer, cut.place, dim, network.coordinates).clone()
                torch_private.buffers_of(model.get_submodule(owner))[attribute] = own

    def __str__(self) -> str:
        lines = table(
            self.model, self.specs, self.config, self.cut_share, self.flops_share, self.volume(), self.origins
        )
        return "\n".join(lines)


def trace(
    model: nn.Module,
    grid: Grid,
    example: Mapping[str, Any],
    say: Callable[[str], None] | None = None,
    plan: Plan | None = None,
) -> Traced:
    """Find out how to shard a model while it computes `example`, the keyword arguments of a forward of one rank's
    samples.

    `plan`: a user's plan for layers. For layers that it does not name, the plan that the model carries is the starting
    point. Raises CutError if a rank's samples would give other results than within the whole batch.
    """
    _refuse(model)
    kinds = {name: kind for name, each in model.named_modules() if name and (kind := known(each)) is not None}
    inputs = {name: _on_host(each) for name, each in example.items()}
    sizes = {axis: grid.size(axis) for axis in ("x", "y")}
    tied = tied_layers(model)
    inputs, samples = _several(inputs)
    with asking_no_values(model):
        found = Search(model, kinds, sizes, inputs, tied, planned(model, kinds, plan), say).find()
        for placed in found.placed.values():
            for use in placed.uses:
                use.fixed = False
        some = Samples(model, kinds, sizes, inputs, tied, found, samples)
        why = some.cut() if samples > 1 else None
    if why is not None and grid.data * grid.z > 1:
        raise CutError(
            f"{type(model).__name__} on {grid}: data and z cut samples, and this model would compute something else of some"
            f" samples than of all: {why}"
        )
    item = next((parameter.element_size() for parameter in model.parameters()), 4)
    specs = tuple(specs_of(model, found, tied, samples))

    def again(model: nn.Module, watch: Watch) -> None:
        if samples < 2:
            raise CutError(f"{type(model).__name__} was run without samples, so that they cannot be cut")
        with asking_no_values(model):
            replace(some, model=model).part(watch)

    given = next((each.shape[0] for each in example.values() if isinstance(each, Tensor) and each.dim()), 1)
    between = found.flops[0] / max(1, samples), found.flops[1] / max(1, samples)
    plans = found.choices.planned
    origins = {
        name: origin(plans.get(pattern_of(name)), placed.side, placed.given, placed.left_whole)
        for name, placed in found.placed.items()
    }
    return Traced(
        type(model).__name__,
        grid,
        specs,
        item,
        between,
        found.choices,
        given,
        origins=origins,
        outputs=found.outputs,
        averaged=found.averaged,
        again=again,
    )


def _refuse(model: nn.Module) -> None:
    """What cannot be cut, whatever it computes."""
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise UserError(f"this {type(model).__name__} is cut already")
    for name, each in model.named_modules():
        if (where := held_elsewhere(each)) is not None:
            raise CutError(
                f"{name} ({type(each).__name__}) holds its parameters in {where} too, where they cannot be cut"
            )


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) and not value.is_meta else value


def _several(inputs: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """An even number of samples, at least four, and their number: so that half of them are also several."""
    samples = next((each.shape[0] for each in inputs.values() if isinstance(each, Tensor) and each.dim()), 0)
    if not samples:
        return dict(inputs), samples
    times = -(-_LEAST // samples)
    times *= 1 + samples * times % 2

    def of_samples(value: Any) -> bool:
        return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == samples

    return {
        name: torch.cat([each] * times) if of_samples(each) else each for name, each in inputs.items()
    }, samples * times

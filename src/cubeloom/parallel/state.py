"""What the layers of one model share on one rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cubeloom.comm import Network
from cubeloom.parallel.agreement import agreement
from cubeloom.parallel.config import Batch, ParallelConfig, ShardingPolicy
from cubeloom.parallel.gradients import Gradients
from cubeloom.parallel.parameter import check_unchanged, local_of, version_of
from cubeloom.parallel.weight import PrefetchOrder

if TYPE_CHECKING:
    from cubeloom.parallel.fp8 import AmaxHistory


@dataclass
class Clock:
    """The position in the training, for random numbers that must not depend on the grid."""

    seed: int = 0
    step: int | None = None  # must be set before each step of a model with dropout
    first_row: int = 0  # of this micro-batch, among this z rank's rows of the whole batch
    rows: int | None = None  # of one z rank in the whole batch, if it is divided into micro-batches


@dataclass
class CubeState:
    network: Network
    rest: ShardingPolicy
    gradients: Gradients
    prefetch_order: PrefetchOrder = field(default_factory=PrefetchOrder)
    clock: Clock = field(default_factory=Clock)
    # shared by several layers, gathered once, by the gathering layer
    inputs: dict[str, Any] = field(default_factory=dict)
    # The share of each loss in the whole batch's mean, if the batch is divided.
    shares: dict[str, Tensor] = field(default_factory=dict)
    portioned: bool = False  # a step's batch is divided, even if only losses between layers are affected
    counting: list[Tensor] | None = None  # if set, such losses only count their targets
    amax: AmaxHistory | None = None  # of the layers whose operands are rounded to FP8
    hides_weight_gradients: bool = True  # overlaps them with the input gradient's collective; off only for measurements
    # Weights change between a forward and its backward, so saved tensors must not share memory with a parameter.
    updates_under_way: bool = False

    @classmethod
    def of(cls, network: Network, rest: ShardingPolicy) -> CubeState:
        """For a model in a user's own training loop, in which ranks may use different modules in a step."""
        prefetch_order = PrefetchOrder()
        return cls(network, rest, Gradients(rest.gradients, agreement(network, prefetch_order)), prefetch_order)

    @cached_property
    def config(self) -> ParallelConfig:
        """The grid and how operands are stored, for specs; without a batch."""
        return ParallelConfig.exact(self.network.grid, self.rest, Batch(1, 1), item=1)

    @property
    def staggers(self) -> bool:
        """Whether strands start one turn apart: gathers and scatters of rows in the plane follow each other closely."""
        grid = self.network.grid
        return self.rest.activations == "sharded" and grid.x * grid.y > 1

    def local(self, parameter: nn.Parameter) -> Tensor:
        """A small parameter's local block, inside autograd."""
        return _Local.apply(parameter, self.gradients, self.updates_under_way)


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, gradients: Gradients, copied: bool) -> Tensor:
        ctx.parameter, ctx.gradients, ctx.use = parameter, gradients, gradients.use(parameter)
        ctx.version = None if copied else version_of(parameter)
        return local_of(parameter).clone() if copied else local_of(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        if ctx.version is not None:
            check_unchanged(ctx.parameter, ctx.version, f"a parameter of shape {list(ctx.parameter.shape)}")
        ctx.gradients.add(ctx.parameter, gradient)
        ctx.use.done()
        return None, None, None

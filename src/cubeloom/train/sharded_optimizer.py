"""An optimizer whose state is sharded over the data axis (ZeRO-1).

Replicas along the data axis hold the same weights and sum the same gradients; each updates only its part of a weight. So
gradients are reduce-scattered and updated weights gathered, as many bytes as the all-reduce they replace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from cubeloom.comm import Network
from cubeloom.cube.gradients import Gradients
from cubeloom.cube.parameter import like, local_of, own_part


class ShardedOptimizer:
    """`make` builds any optimizer that treats elements one by one (AdamW, SGD), on the parts.

    Weights whose first local dimension does not divide by the data axis, and small vectors that are also replicated along
    other axes, are updated by everybody.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        network: Network,
        gradients: Gradients,
        make: Callable[[list[nn.Parameter]], Optimizer],
    ) -> None:
        self._gradients = gradients
        self._axis = network.axis("data")
        self._mesh = network.mesh["x", "y", "z", "data"]
        self._parts = {parameter: self._part(parameter) for parameter in parameters}
        self.optimizer = make(list(self._parts.values()))
        gradients.scatter_to(self._receive)

    def part(self, parameter: nn.Parameter) -> nn.Parameter:
        """What this rank updates of a parameter, with its gradient: a part of it, or all."""
        return self._parts[parameter]

    def step(self) -> None:
        self.optimizer.step()
        self._gather()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def _part(self, parameter: nn.Parameter) -> nn.Parameter:
        if not self._gradients.scatters(parameter, self._axis):
            return parameter
        assert isinstance(parameter, DTensor)
        # A view: what the optimizer writes into the part is in the parameter.
        part = DTensor.from_local(
            own_part(self._axis)(local_of(parameter)),
            self._mesh,
            [*parameter.placements, Shard(0)],
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        return nn.Parameter(part)

    def _receive(self, parameter: nn.Parameter, summed: Tensor) -> None:
        part = self._parts[parameter]
        gradient = summed.view_as(local_of(part))
        if part.grad is None:
            part.grad = like(part, gradient.clone())
        else:
            local_of(part.grad).add_(gradient)
        parameter.grad = None

    @torch.no_grad()
    def _gather(self) -> None:
        """Everybody's parts, in one message for each dtype."""
        sharded = [parameter for parameter, part in self._parts.items() if part is not parameter]
        for dtype in sorted({parameter.dtype for parameter in sharded}, key=str):
            same = [parameter for parameter in sharded if parameter.dtype == dtype]
            parts = [local_of(self._parts[parameter]).flatten() for parameter in same]
            rows = self._axis.all_gather(torch.cat(parts)[None], 0, "parameters").wait()  # [data, all parts]
            pieces = rows.split([len(part) for part in parts], dim=1)
            for parameter, piece in zip(same, pieces, strict=True):
                local = local_of(parameter)
                local.copy_(piece.reshape(local.shape))

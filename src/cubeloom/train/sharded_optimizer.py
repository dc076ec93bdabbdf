"""An optimizer whose state is sharded over the replicas of each parameter (ZeRO-1).

Ranks that reduce a parameter's gradient together hold the same block of it: those along the data axis, and in a
bidirectional pipeline the workers of the stage's other replicas. Each updates only its part, so a replica costs weights
and no optimizer state. Gradients are reduce-scattered and updated weights all-gathered: as many bytes as the all-reduce
they replace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cubeloom.comm import Axis
from cubeloom.parallel.gradients import Gradients
from cubeloom.parallel.parameter import local_of
from cubeloom.train.offload import stepper
from cubeloom.train.part import Part


class ShardedOptimizer:
    """`make` builds any element-wise optimizer (AdamW, SGD) on the parts.

    Blocks whose first dimension the number of replicas does not divide are updated by every replica.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        gradients: Gradients,
        make: Callable[[list[nn.Parameter]], Optimizer],
        fp32_master_weights: bool = True,
        offload: bool = False,
    ) -> None:
        self._gradients = gradients
        self.parts = {each: Part.of(each, self._rows(each), fp32_master_weights, offload) for each in parameters}
        self.optimizer = make([part.tensor for part in self.parts.values()])
        self._update = stepper(self.optimizer, self.parts.values(), offload)
        gradients.scatter_to(self._receive)

    def step(self) -> None:
        for parameter, part in self.parts.items():
            part.take_gradient(parameter)  # unless a reduce-scatter has already brought it to the part
        self._update()
        self._gather()

    def replicas(self, parameter: nn.Parameter) -> int:
        """The number of ranks over which a parameter's state is sharded."""
        return self._gradients.axis(parameter).size if self._gradients.scatters(parameter) else 1

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        for parameter in self.parts:
            parameter.grad = None

    def _rows(self, parameter: nn.Parameter) -> slice:
        rows = len(local_of(parameter))
        if not self._gradients.scatters(parameter):
            return slice(0, rows)
        axis = self._gradients.axis(parameter)
        size = rows // axis.size
        return slice(axis.index * size, (axis.index + 1) * size)

    def _receive(self, parameter: nn.Parameter, summed: Tensor) -> None:
        part = self.parts[parameter].tensor
        gradient = summed.view_as(part)
        if part.grad is None:
            part.grad = gradient.to(part.dtype)
        else:
            part.grad.add_(gradient)
        parameter.grad = None

    @torch.no_grad()
    def _gather(self) -> None:
        """All-gather the parts, one message per axis and dtype; all are started before the first is awaited."""
        alike: dict[tuple[Axis, torch.dtype], list[nn.Parameter]] = {}
        for parameter in self.parts:
            if self._gradients.scatters(parameter):
                alike.setdefault((self._gradients.axis(parameter), parameter.dtype), []).append(parameter)
        arriving = []
        for (axis, _), parameters in alike.items():
            parts = [self.parts[parameter].block.flatten() for parameter in parameters]
            arriving.append((parameters, parts, axis.all_gather(torch.cat(parts)[None], 0, "parameters")))
        for parameters, parts, pending in arriving:
            pieces = pending.wait().split([len(part) for part in parts], dim=1)  # each [replicas, part]
            for parameter, piece in zip(parameters, pieces, strict=True):
                local_of(parameter).view(len(piece), -1).copy_(piece)

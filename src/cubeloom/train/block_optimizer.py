"""Any element-wise optimizer, applied to the blocks that this rank holds.

torch's optimizers work on distributed tensors, but for every operation on every tensor they ask how it is distributed.
An element-wise update does not need that: here the optimizer sees plain tensors that share memory with the parameters'
blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn
from torch.optim import Optimizer

from cubeloom.parallel.parameter import local_of
from cubeloom.train.offload import stepper
from cubeloom.train.part import Part


class BlockOptimizer:
    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        make: Callable[[list[nn.Parameter]], Optimizer],
        fp32_master_weights: bool = True,
        offload: bool = False,
    ) -> None:
        self.parts = {
            each: Part.of(each, slice(0, len(local_of(each))), fp32_master_weights, offload) for each in parameters
        }
        self.optimizer = make([part.tensor for part in self.parts.values()])
        self._update = stepper(self.optimizer, self.parts.values(), offload)

    def step(self) -> None:
        for parameter, part in self.parts.items():
            part.tensor.grad = None
            part.take_gradient(parameter)
        self._update()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        for parameter in self.parts:
            parameter.grad = None

"""Any optimizer that treats elements one by one, on the blocks that this rank holds.

torch's optimizers work on distributed tensors as they are, but ask for every operation on every tensor how it distributes.
An element-wise update needs no such question: here it sees plain tensors that share memory with the parameters' blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn
from torch.optim import Optimizer

from cubeloom.cube.parameter import local_of


class BlockOptimizer:
    def __init__(self, parameters: Iterable[nn.Parameter], make: Callable[[list[nn.Parameter]], Optimizer]) -> None:
        self._blocks = {parameter: nn.Parameter(local_of(parameter)) for parameter in parameters}
        self.optimizer = make(list(self._blocks.values()))

    def step(self) -> None:
        for parameter, block in self._blocks.items():
            block.grad = None if parameter.grad is None else local_of(parameter.grad)
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        for parameter in self._blocks:
            parameter.grad = None

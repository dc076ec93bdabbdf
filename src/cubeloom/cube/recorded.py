"""A forward and backward recorded once and replayed as a whole, so that a GPU never waits for Python to launch its kernels.

Worth it where kernels are short. The recording has its data, its activations and its gradients in memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn


class RecordedStep:
    """`function` of the data gives the loss. Calls do what the first one did, with other values: no step may depend on Python.

    So there must be no dropout, whose masks change with the step, and no communication. Gradients begin anew in every call.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        parameters: Iterable[nn.Parameter],
        data: Mapping[str, Tensor],
        warm_ups: int = 3,
    ) -> None:
        self._function = function
        self._parameters = list(parameters)
        self._data = {name: tensor.clone() for name, tensor in data.items()}
        # What is compiled, or allocated once, must be so before.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(warm_ups):
                self._pass()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self._graph = torch.cuda.CUDAGraph()
        # Other threads, such as the one that watches a communicator, may go on meanwhile.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._loss = self._pass()
        self._gradients = [parameter.grad for parameter in self._parameters]

    def __call__(self, **data: Tensor) -> Tensor:
        """The loss; its tensor, and those of the gradients, hold until the next call."""
        for name, tensor in data.items():
            self._data[name].copy_(tensor)
        self._graph.replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return self._loss

    def _pass(self) -> Tensor:
        for parameter in self._parameters:
            parameter.grad = None
        loss = self._function(**self._data)
        loss.backward()
        return loss.detach()

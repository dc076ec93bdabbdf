"""GroupNorm and BatchNorm of a traced model, with the serial model's statistics, wherever samples and features lie.

A module keeps its own forward, which may do more than normalise, such as an activation behind it: what it calls of torch to
normalise is computed here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from cubeloom.base import torch_private
from cubeloom.parallel import weave
from cubeloom.parallel.collective import Collective
from cubeloom.parallel.layers.declared import Making, make_layer
from cubeloom.parallel.layers.image_norms import centred_batch, normalised_groups, scaled
from cubeloom.parallel.layers.norm import at_least_float32
from cubeloom.parallel.specs import TracedChannelNormSpec
from cubeloom.parallel.specs.spec import ROWS
from cubeloom.parallel.state import CubeState

_OWN = "_cubeloom_norm"


class _ChannelNorm(TorchFunctionMode):
    """While it lasts, norms of channels are those of the cube."""

    def __init__(self, spec: TracedChannelNormSpec, state: CubeState, group_of: Tensor | None) -> None:
        super().__init__()
        self._spec, self._state, self._group_of = spec, state, group_of
        network = state.network
        self._axes = [network.axis(axis) for axis in spec.axes]
        self._rows = network.axis(*ROWS)
        along = self._rows if spec.groups is None else network.axis(*sorted(spec.axes))
        self._woven = False
        self._sum = Collective("sum", along, spec.name)

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is functional.batch_norm:
            return self._batch_norm(*args, **(kwargs or {}))
        if function is functional.group_norm:
            return self._group_norm(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def _local(self, *parameters: nn.Parameter | None) -> list[Tensor | None]:
        return [None if each is None else self._state.local(each) for each in parameters]

    def _own(self, whole: Tensor) -> Tensor:
        """Of a number for each feature, those of this rank's."""
        for axis in self._axes:
            size = len(whole) // axis.size
            whole = whole.narrow(0, axis.index * size, size)
        return whole

    def _whole(self, own: Tensor) -> Tensor:
        for axis in reversed(self._axes):
            if axis.size > 1:
                own = axis.all_gather(own, 0, f"{self._spec.name} running").wait()
        return own

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: nn.Parameter | None = None,
        bias: nn.Parameter | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        own_weight, own_bias = self._local(weight, bias)
        if not training:
            assert running_mean is not None and running_var is not None
            mean, spread = self._own(running_mean), self._own(running_var)
            return functional.batch_norm(input, mean, spread, own_weight, own_bias, False, momentum, eps)
        strand, ways = weave.place()
        self._woven |= ways > 1
        weave.refuse_to_guess(self._spec.name, self._woven)
        total = partial(weave.meet, self._sum)
        centred, mean, spread, count = centred_batch(at_least_float32(input), ways * self._rows.size, total)
        first = strand == 0 and not weave.replaying()
        if first and running_mean is not None and running_var is not None:
            found = torch.stack([mean.detach(), spread.detach() * (count / (count - 1))], -1)
            for running, new in zip((running_mean, running_var), self._whole(found).unbind(-1), strict=True):
                running.lerp_(new.to(running.dtype), momentum)
        shape = (-1, *[1] * (input.dim() - 2))
        return scaled((centred * torch.rsqrt(spread + eps).view(shape)).to(input.dtype), own_weight, own_bias)

    def _group_norm(
        self,
        input: Tensor,
        num_groups: int,
        weight: nn.Parameter | None = None,
        bias: nn.Parameter | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        own_weight, own_bias = self._local(weight, bias)
        if self._group_of is None:
            return functional.group_norm(input, num_groups // self._sum.axis.size, own_weight, own_bias, eps)
        group_of, size = self._group_of.to(input.device), self._spec.features // num_groups
        y = normalised_groups(at_least_float32(input), self._own(group_of), num_groups, size, self._sum, eps)
        return scaled(y.to(input.dtype), own_weight, own_bias)


@make_layer.register
def _(spec: TracedChannelNormSpec, making: Making) -> nn.Module:
    """The plain module, with another forward."""
    module, state = making.plain, making.state
    for kind, there in (("weight", spec.weight), ("bias", spec.bias)):
        if there:
            torch_private.parameters_of(module)[kind] = making.parameter(kind)
    group_of = None
    if spec.groups is not None and not spec.whole_groups(state.config):
        group_of = torch.arange(spec.features, device="cpu") // (spec.features // spec.groups)
    kind_of = type(module)

    def forward(self: nn.Module, *arguments: Any, **named: Any) -> Any:
        with vars(self)[_OWN]:
            return kind_of.forward(self, *arguments, **named)

    module.__class__ = type(kind_of.__name__, (kind_of,), {"forward": forward})
    object.__setattr__(module, _OWN, _ChannelNorm(spec, state, group_of))
    return module

"""GroupNorm and BatchNorm of cut features, with exactly the statistics of the serial model.

First the mean, then the spread around it: sums over the ranks with other features of a group, or other samples of a
batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from cubeloom.base.turns import order
from cubeloom.parallel import weave
from cubeloom.parallel.collective import Collective
from cubeloom.parallel.layers.declared import Making, make_layer
from cubeloom.parallel.layers.norm import at_least_float32
from cubeloom.parallel.parameter import distribute, local_of, own_part
from cubeloom.parallel.specs import ImageNormSpec, rows_of
from cubeloom.parallel.state import CubeState


class CubeGroupNorm(nn.Module):
    """`group_of`: the group of each of this rank's features; None if the rank's groups are whole and in order."""

    def __init__(
        self,
        spec: ImageNormSpec,
        state: CubeState,
        weight: nn.Parameter | None,
        bias: nn.Parameter | None,
        eps: float,
        group_of: Tensor | None,
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self._state = state
        self._eps = eps
        assert spec.groups is not None
        self._groups = spec.groups
        self._size = spec.features // spec.groups
        self._group_of = group_of
        self._axis = state.network.axis(spec.side)
        self._sum = Collective("sum", self._axis, spec.name)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (None if each is None else self._state.local(each) for each in (self.weight, self.bias))
        if self._group_of is None:
            return functional.group_norm(x, self._groups // self._axis.size, weight, bias, self._eps)
        y = normalised_groups(
            at_least_float32(x), self._group_of.to(x.device), self._groups, self._size, self._sum, self._eps
        ).to(x.dtype)
        return scaled(y, weight, bias)


def scaled(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Features are the second dimension."""
    shape = (-1, *[1] * (y.dim() - 2))
    if weight is not None:
        y = y * weight.view(shape)
    return y if bias is None else y + bias.view(shape)


def normalised_groups(
    x: Tensor, group_of: Tensor, groups: int, size: int, total: Callable[[Tensor], Tensor], eps: float
) -> Tensor:
    """`groups` of `size` features each; `total` sums over the ranks that have other features of them."""
    # Autocast would take the sums over groups for products of a linear, and round what goes into them.
    with torch.autocast(x.device.type, enabled=False):
        rows = x.flatten(2)  # [samples, own features, pixels]
        count = size * rows.shape[2]
        # [own features, groups]. A product adds in a fixed order, where adding at an index on a GPU does not.
        member = functional.one_hot(group_of, groups).to(x.dtype)
        mean = total(rows.sum(2) @ member) / count  # [samples, groups]
        centred = rows - (mean @ member.t()).unsqueeze(2)
        spread = total(centred.square().sum(2) @ member) / count
        scale = torch.rsqrt(spread + eps) @ member.t()
        return (centred * scale.unsqueeze(2)).view_as(x)


def centred_batch(x: Tensor, ranks: int, total: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor, int]:
    """What lies around the mean of each feature; mean, spread and of how many numbers. `total` sums over so many ranks."""
    others = [dim for dim in range(x.dim()) if dim != 1]
    count = ranks * (x.numel() // x.shape[1])
    mean = total(x.sum(others)) / count
    centred = x - mean.view(-1, *[1] * (x.dim() - 2))
    return centred, mean, total(centred.square().sum(others)) / count, count


class CubeBatchNorm(nn.Module):
    """Statistics over all samples, of all ranks and strands. Running statistics are sharded as features are."""

    running_mean: Tensor | None
    running_var: Tensor | None

    def __init__(
        self,
        spec: ImageNormSpec,
        state: CubeState,
        weight: nn.Parameter | None,
        bias: nn.Parameter | None,
        plain: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d,
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self._state = state
        self._eps = plain.eps
        self._momentum = plain.momentum
        self._rows = state.network.axis(*rows_of(spec.side, state.config.sharded))
        self._sum = Collective("sum", self._rows, spec.name)
        dtype = torch.float32 if weight is None else weight.dtype
        for name, value in (("running_mean", 0.0), ("running_var", 1.0)):
            own = torch.full((spec.features // state.network.axis(spec.side).size,), value, dtype=dtype)
            whole = distribute(state.network, own.to(state.network.device), (spec.features,), {spec.side: 0}).detach()
            self.register_buffer(name, whole if plain.track_running_stats else None)
        self.batches = 0
        self._name, self._woven = spec.name, False

    def forward(self, x: Tensor) -> Tensor:
        shape = (-1, *[1] * (x.dim() - 2))
        wide = at_least_float32(x)
        if self.training or self.running_mean is None or self.running_var is None:
            _, ways = weave.place()
            self._woven |= ways > 1
            weave.refuse_to_guess(self._name, self._woven)
            total = partial(weave.meet, self._sum)
            centred, mean, spread, count = centred_batch(wide, ways * self._rows.size, total)
            self._remember(mean.detach(), spread.detach(), count)
        else:
            mean, spread = local_of(self.running_mean), local_of(self.running_var)
            centred = wide - mean.view(shape)
        y = (centred * torch.rsqrt(spread + self._eps).view(shape)).to(x.dtype)
        weight, bias = (None if each is None else self._state.local(each) for each in (self.weight, self.bias))
        return scaled(y, weight, bias)

    def _remember(self, mean: Tensor, spread: Tensor, count: int) -> None:
        """Once for all strands, and not in a recomputed forward."""
        strand, _ = weave.place()
        if self.running_mean is None or self.running_var is None or strand > 0 or weave.replaying():
            return
        self.batches += 1
        share = 1 / self.batches if self._momentum is None else self._momentum
        for running, found in ((self.running_mean, mean), (self.running_var, spread * count / (count - 1))):
            local_of(running).lerp_(found.to(running.dtype), share)


@make_layer.register
def _(spec: ImageNormSpec, making: Making) -> nn.Module:
    state, plain = making.state, making.plain
    vectors = making.parameter("weight"), making.parameter("bias")
    if isinstance(plain, nn.GroupNorm):
        own = None if spec.whole_groups(state.config) else own_part(state.network.axis(spec.side))(groups_of(spec))
        return CubeGroupNorm(spec, state, *vectors, plain.eps, own)
    assert isinstance(plain, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
    return CubeBatchNorm(spec, state, *vectors, plain)


def groups_of(spec: ImageNormSpec) -> Tensor:
    """The group of each feature."""
    assert spec.groups is not None
    plain = torch.arange(spec.features) // (spec.features // spec.groups)
    return plain if spec.joined is None else plain[torch.tensor(order(*spec.joined))]

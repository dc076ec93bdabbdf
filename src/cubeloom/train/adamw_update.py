"""The element-wise update of AdamW with stochastic rounding: one pass over weight, gradient and moments.

On a CPU it runs block by block, in plain operations. On a GPU it is compiled: each tensor is read and written once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cubeloom.base import counter
from cubeloom.comm import devices

_BLOCK = 1 << 16  # elements that a CPU updates at a time, so that temporary tensors stay in its cache
_TOGETHER = 8  # tensors of one shape that a GPU's compiled function updates


@dataclass(frozen=True, eq=False)
class Place:
    """The positions of a tensor's elements: the outer sum of `rows` and `columns`, which hold int64."""

    key: int  # of the tensor
    rows: Tensor
    columns: Tensor


class Hyper(NamedTuple):
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class Factors(NamedTuple):
    """The numbers of one update of a tensor: floats, or tensors without dimensions on a GPU."""

    decay: Any  # of the weight
    size: Any  # the learning rate, with the bias correction of the first moment
    root: Any  # the bias correction of the second moment's root
    new1: Any  # 1 - β1
    keep2: Any  # β2
    new2: Any
    eps: Any


def factors_of(hyper: Hyper, first: Any, second: Any) -> Factors:
    """`first`, `second`: β1 and β2 to the power of the number of updates."""
    decay, new1, new2 = 1 - hyper.lr * hyper.weight_decay, 1 - hyper.beta1, 1 - hyper.beta2
    return Factors(decay, hyper.lr / (1 - first), (1 - second) ** 0.5, new1, hyper.beta2, new2, hyper.eps)


class Values(NamedTuple):
    """A tensor's weight and moments."""

    weight: Tensor
    mean: Tensor
    square: Tensor


def updated(old: Values, gradient: Tensor, index: Tensor, seed: Any, factors: Factors, scale: Any) -> Values:
    """The new values. Multiplications, additions and roots only, which round alike in every loop of a CPU."""
    random = counter.bits(seed, index)
    wide = torch.promote_types(old.weight.dtype, torch.float32)
    gradient = gradient.to(wide) / scale
    mean = old.mean.to(wide)
    mean = mean + (gradient - mean) * factors.new1
    square = old.square.to(wide) * factors.keep2 + gradient * gradient * factors.new2
    change = mean / (square.sqrt() / factors.root + factors.eps)
    weight = old.weight.to(wide) * factors.decay - change * factors.size
    if old.weight.dtype == torch.bfloat16:
        weight = counter.rounded(weight, random >> 32)
    # One draw has 64 random bits, and each of three roundings takes 16.
    return Values(weight.to(old.weight.dtype), counter.rounded(mean, random), counter.rounded(square, random >> 16))


def update(
    weights: list[Tensor],
    gradients: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    places: Sequence[Place],
    steps: Tensor,
    hyper: Hyper,
    scale: Tensor | None,
    forbidden: Tensor | None,
) -> None:
    """Update all of them in place, unless `forbidden` is 1. `steps`: the number of this update, for each tensor."""
    keys, rows, columns = ([getattr(place, name) for place in places] for name in ("key", "rows", "columns"))
    if steps.is_cuda:
        flat = _flattened(weights, gradients, means, squares, rows, columns)
        _on_a_gpu(flat, keys, steps, hyper, scale, forbidden)
    else:
        _on_a_cpu(weights, gradients, means, squares, rows, columns, keys, steps, list(hyper), scale, forbidden)


# One operation, so that a rehearsal, which has no values, counts no temporary memory.
@torch.library.custom_op("cubeloom::adamw", mutates_args=("weights", "means", "squares"))
def _on_a_cpu(
    weights: list[Tensor],
    gradients: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    rows: list[Tensor],
    columns: list[Tensor],
    keys: list[int],
    steps: Tensor,
    hyper: list[float],
    scale: Tensor | None,
    forbidden: Tensor | None,
) -> None:
    if forbidden is not None and forbidden.item():
        return
    by, numbers = 1.0 if scale is None else scale.item(), Hyper(*hyper)
    flat = _flattened(weights, gradients, means, squares, rows, columns)
    for each, key, step in zip(flat, keys, map(int, steps.tolist()), strict=True):
        seed = int(counter.bits(key, torch.tensor(step)).item())
        factors = factors_of(numbers, numbers.beta1**step, numbers.beta2**step)
        for block in each.blocks():
            new = updated(block.values, block.gradient, block.positions, seed, factors, by)
            for mine, value in zip(block.values, new, strict=True):
                mine.copy_(value)


@_on_a_cpu.register_fake
def _(*_: object) -> None:
    pass


class _Flat(NamedTuple):
    """A tensor as [rows, other dims]."""

    values: Values
    gradient: Tensor
    rows: Tensor  # the index of each row's first element
    columns: Tensor

    @property
    def positions(self) -> Tensor:
        return self.rows[:, None] + self.columns

    def blocks(self) -> Iterator[_Flat]:
        """Some rows at a time."""
        size = max(1, _BLOCK // max(1, len(self.columns)))
        for first in range(0, len(self.rows), size):
            some = slice(first, first + size)
            values = Values(*(each[some] for each in self.values))
            yield _Flat(values, self.gradient[some], self.rows[some], self.columns)


def _flattened(*lists: list[Tensor]) -> list[_Flat]:
    """Of weights, gradients, moments, rows and columns."""
    found = []
    for weight, gradient, mean, square, rows, columns in zip(*lists, strict=True):
        shape = len(rows), len(columns)
        values = Values(weight.view(shape), mean.view(shape), square.view(shape))
        found.append(_Flat(values, gradient.reshape(shape), rows, columns))
    return found


def _on_a_gpu(
    flat: list[_Flat], keys: list[int], steps: Tensor, hyper: Hyper, scale: Tensor | None, forbidden: Tensor | None
) -> None:
    """The host waits for nothing: numbers that the device knows stay there."""
    counts = steps.double()
    seeds = counter.bits(devices.put(torch.tensor(keys), steps.device), steps.long())
    powers = factors_of(hyper, hyper.beta1**counts, hyper.beta2**counts)
    numbers = torch.stack([each if isinstance(each, Tensor) else torch.full_like(counts, each) for each in powers], 1)
    one = torch.ones((), device=steps.device)
    scale, forbidden = one if scale is None else scale, one - 1 if forbidden is None else forbidden
    alike: dict[object, list[int]] = {}
    for place, each in enumerate(flat):
        alike.setdefault((each.gradient.shape, each.gradient.dtype, each.values.weight.dtype), []).append(place)
    for places in alike.values():
        full = len(places) - len(places) % _TOGETHER
        groups = [places[first : first + _TOGETHER] for first in range(0, full, _TOGETHER)]
        # Lists of two lengths: the compiler makes other code for each length.
        for some in [*groups, *([place] for place in places[full:])]:
            mine = [numbers[place] for place in some], [seeds[place] for place in some]
            compiled()([flat[place] for place in some], *mine, scale, forbidden)


@cache
def compiled() -> Any:
    """For any shape, because a model has many."""
    return torch.compile(update_group, dynamic=True)


def update_group(
    flat: list[_Flat], numbers: list[Tensor], seeds: list[Tensor], scale: Tensor, forbidden: Tensor
) -> None:
    """`numbers`: the factors of each tensor, in float64."""
    for each, own, seed in zip(flat, numbers, seeds, strict=True):
        wide = torch.promote_types(each.values.weight.dtype, torch.float32)
        factors = Factors(*own.to(wide).unbind())
        new = updated(each.values, each.gradient, each.positions, seed, factors, scale.to(wide))
        for mine, value in zip(each.values, new, strict=True):
            mine.copy_(torch.where(forbidden > 0, mine, value))

"""Turns the loss of a traced model, the mean over the rank's own samples, into that of the whole batch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from cubeloom.base import torch_private
from cubeloom.comm.batch import Mean
from cubeloom.parallel import weave
from cubeloom.parallel.check.results import mapped
from cubeloom.parallel.layers.logits import cut_cross_entropy
from cubeloom.parallel.layers.loss import share_of
from cubeloom.parallel.state import CubeState

# Losses that are means over all their elements.
MEANS = {
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
    functional.soft_margin_loss,
}


def _mean_over_batch(loss: Tensor, state: CubeState, targets: int | Tensor = 1) -> Tensor:
    """The mean over the samples of all ranks of data and z, the same number on every rank.

    `targets`: the number of targets of which `loss` is the mean, if ranks have different numbers of them (for example
    because of ignored tokens). A rank without targets, whose mean is NaN, contributes zero. If no rank has targets, the
    mean is NaN, as in torch, and gradients are 0.
    """
    wide = loss.double()
    count = torch.as_tensor(targets, dtype=torch.float64, device=wide.device)
    wide = torch.where(count > 0, wide, 0.0)
    everybody = state.network.axis("data", "z")

    def mean(total: Tensor, count: Tensor) -> Tensor:
        found: Tensor = Mean.apply(total, count, everybody, everybody.size, "loss")
        return found

    return weave.meet(mean, wide * count, count).to(loss.dtype)


def average_losses(module: nn.Module, state: CubeState, means: Collection[str] = ()) -> None:
    """From now on a cross-entropy inside the module's forward is the mean over all targets of the whole batch.

    `means`: which of the tensors that it returns are means over a rank's own samples. Strands of a weave give one number,
    too: a loss that nobody counted is the mean of theirs.
    """
    kind = type(module)
    alone = state.network.grid.data * state.network.grid.z == 1 and not state.portioned

    def averaged(path: str, value: Tensor) -> Tensor:
        return _mean_over_batch(value, state) if path in means else value

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *arguments: Any, **named: Any) -> Any:
        ways = weave.place()[1]
        if alone and ways == 1:
            return kind.forward(self, *arguments, **named)
        with _CountedLosses(state):
            found = kind.forward(self, *arguments, **named)
        if means and not alone and state.counting is None:
            found = mapped(averaged, found)
        return found if ways == 1 else with_losses(found, functools.partial(_mean_of_strands, ways))

    module.__class__ = type(kind.__name__, (kind,), {"forward": forward})


def with_losses(found: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """What a forward gave, with its losses changed: tensors without dimensions, and `.loss` of an object."""

    def changed(value: Any) -> Any:
        if isinstance(value, Tensor):
            return change(value) if not value.dim() and value.is_floating_point() else value
        if isinstance(loss := getattr(value, "loss", None), Tensor):
            value.loss = change(loss)
        return value

    return torch_private.tree_map(changed, found)


def _mean_of_strands(ways: int, loss: Tensor) -> Tensor:
    return weave.meet(lambda total: total / ways, loss)


class _CountedLosses(TorchFunctionMode):
    def __init__(self, state: CubeState) -> None:
        super().__init__()
        self._state, self._losses = state, 0

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is functional.cross_entropy or function is functional.nll_loss:
            count = _targets(*args, **kwargs)
        else:
            count = _elements(function, *args, **kwargs) if function in MEANS else None
        if count is None:
            return function(*args, **kwargs)
        if self._state.counting is not None:
            self._state.counting.append(count.double())
            return torch.zeros((), device=count.device)
        mean = cut_cross_entropy(*args, **kwargs) if function is functional.cross_entropy else None
        if mean is None:
            mean = _mean_over_batch(function(*args, **kwargs), self._state, count)
        self._losses += 1
        return share_of(mean, self._state.shares.get(share_name(self._losses - 1)))


def share_name(loss: int) -> str:
    """The name of a portion's share in the mean of its group, for one cross-entropy of the forward."""
    return f"cross-entropy {loss}"


def _elements(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor | None:
    """The number of elements of which it is the mean; None if it is not a mean."""
    given = inspect.signature(function).bind(*args, **kwargs).arguments
    if given.get("reduction", "mean") != "mean" or given.get("size_average") is False or given.get("reduce") is False:
        return None
    return torch.tensor(given["input"].numel(), device=given["input"].device)


def _targets(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """The number by which torch divides the sum of the losses; None if it does not divide."""
    if reduction != "mean" or size_average is False or reduce is False:
        return None
    if target.is_floating_point():  # class probabilities
        return target.new_tensor(target.numel() // input.shape[1 if input.dim() > 1 else 0])
    counted = target != ignore_index
    return counted.sum() if weight is None else weight[target.masked_fill(~counted, 0)].mul(counted).sum()

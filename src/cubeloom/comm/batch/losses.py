"""Losses of the whole batch, from the sums of each rank's samples."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from cubeloom.comm.batch.call import NOT_FOLLOWED, Call
from cubeloom.comm.batch.numbers import over, pointwise
from cubeloom.comm.batch.parts import Parts
from cubeloom.comm.batch.sums import Mean, Sum, used_by_each

_ELEMENTWISE = """
mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div gaussian_nll_loss
poisson_nll_loss soft_margin_loss
"""
# Of these a `weight` is what the sum is divided by, too.
_WEIGHTED_MEANS = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")


def _given(call: Call) -> dict[str, Any] | None:
    """The arguments by name; None where they say in an old way what becomes of the numbers."""
    given = inspect.signature(call.function).bind(*call.args, **call.kwargs)
    given.apply_defaults()
    old = given.arguments.get("size_average") is not None or given.arguments.get("reduce") is not None
    return None if old else given.arguments


def elementwise(call: Call) -> Any:
    given = _given(call)
    if given is None or (given.get("weight") is not None and call.name in _WEIGHTED_MEANS):
        return NOT_FOLLOWED
    reduction = given["reduction"]
    each = pointwise(Call(call.name, call.function, (), {**given, "reduction": "none"}))
    if reduction == "none" or each is NOT_FOLLOWED:
        return each
    if reduction == "batchmean":
        return each.sum() / given["input"].shape[0]
    return each.mean() if reduction == "mean" else each.sum()


def cross_entropy(call: Call) -> Any:
    """Also `nll_loss`. Classes are dimension 1, and every rank has those of its samples."""
    given = _given(call)
    if given is None or not isinstance(given["input"], Parts) or given["input"].cut == (len(given["input"].sizes) > 1):
        return NOT_FOLLOWED
    logits, target, weight = given["input"], given["target"], given["weight"]
    probabilities = target.is_floating_point()
    cut = logits.cut if probabilities or not logits.cut else logits.cut - 1
    if isinstance(target, Parts) and target.cut != cut:
        return NOT_FOLLOWED
    target = target.part if isinstance(target, Parts) else Call("loss", call.function, (logits,), {}).at(target, cut)
    if weight is not None:
        weight = used_by_each(weight, call.axis)
    own = {**given, "input": logits.part, "target": target, "weight": weight}
    if given["reduction"] == "none":
        return logits.like(call.function(**own), 0 if not logits.cut else logits.cut - 1)
    total = call.function(**{**own, "reduction": "sum"})
    if given["reduction"] == "sum":
        return call.value(over(Sum, total, call.axis, call.name))
    wide = total.float() if total.dtype.itemsize < 4 else total
    count = _counted(logits, target, weight, given["ignore_index"], probabilities).to(wide.dtype)
    device = call.axis.device
    mean = Mean.apply(wide.to(device), count.to(device), call.axis, call.axis.size, call.name)
    return call.value(mean.to(total))


def _counted(logits: Parts, target: Tensor, weight: Tensor | None, ignored: int, probabilities: bool) -> Tensor:
    """What torch divides the sum of this rank's losses by."""
    if probabilities:
        return torch.tensor(target.numel() // logits.sizes[1])
    counted = target != ignored
    return counted.sum() if weight is None else weight[target.masked_fill(~counted, 0)].mul(counted).sum()


RULES = {
    **dict.fromkeys(_ELEMENTWISE.split(), elementwise),
    **dict.fromkeys(("cross_entropy", "nll_loss"), cross_entropy),
}

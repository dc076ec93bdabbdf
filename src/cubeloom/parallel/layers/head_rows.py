"""The steps of a cross-entropy on some rows, between matmuls and collectives: `[rows, V/y]`.

The fused head applies them to a chunk of rows and keeps gradients ("slopes") of the logits. A separate loss applies
them to all rows and keeps exponentials.

Each step is a function of tensors only, so that it can be compiled into one kernel that reads the logits once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from torch import Tensor

from cubeloom.parallel.layers.classes import largest_of, value_at_target
from cubeloom.parallel.layers.norm import at_least_float32


def largest(logits: Tensor) -> Tensor:
    """The maximum logit of each row, `[rows, 1]`."""
    return at_least_float32(largest_of(logits)).unsqueeze(-1)


def sums(logits: Tensor, largest: Tensor, safe: Tensor, here: Tensor, smoothing: float) -> Tensor:
    """The sums to reduce over the parts of the vocabulary, `[2 or 3, rows]`, of logits minus the maximum.

    They are the exponentials, the target's logit where it is `here`, and with smoothing all logits.
    """
    shifted = at_least_float32(logits) - largest
    return torch.stack(
        [shifted.exp().sum(-1), value_at_target(shifted, safe, here)] + ([shifted.sum(-1)] if smoothing else [])
    )


def exponentials(
    logits: Tensor, largest: Tensor, safe: Tensor, here: Tensor, smoothing: float
) -> tuple[Tensor, Tensor]:
    """The exponentials of logits minus the maximum, and `sums`."""
    wide = at_least_float32(logits)
    shifted = wide - largest
    found = shifted.exp()
    numbers = [found.sum(-1), value_at_target(shifted, safe, here)] + ([shifted.sum(-1)] if smoothing else [])
    return found, torch.stack(numbers)


def slopes(
    exponentials: Tensor,
    total: Tensor,
    safe: Tensor,
    here: Tensor,
    rows: Tensor,
    smoothing: float,
    classes: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The gradients of the losses, times each row's value in `rows`; and separately, unrounded, those at the targets."""
    found = exponentials / total.unsqueeze(-1)
    target = (value_at_target(found, safe, here) - smoothing / classes - (1 - smoothing)) * rows
    found -= smoothing / classes
    found *= rows.unsqueeze(-1)
    return found.to(dtype), target


def losses(sums: Tensor, counted: Tensor, smoothing: float, classes: int) -> Tensor:
    """The sum of the losses of the rows that count."""
    logarithm = sums[0].log()
    found = logarithm - sums[1]
    if smoothing:
        # Each entry's smoothed target is its share of `smoothing`; the true one also gets the rest.
        found = (1 - smoothing) * found + smoothing * (logarithm - sums[2] / classes)
    return found.masked_fill(~counted, 0).sum()


def slope(logits: Tensor, largest: Tensor, sums: Tensor, smoothing: float, classes: int) -> Tensor:
    """Overwrite the logits with the gradient of the loss, except at the target; return the target's gradient, `[rows]`."""
    logarithm = sums[0].log()
    probabilities = (at_least_float32(logits) - largest - logarithm.unsqueeze(-1)).exp()
    logits.copy_(probabilities - smoothing / classes)
    return slope_at_target(sums[1] - logarithm, smoothing, classes)


def slope_at_target(logarithm: Tensor, smoothing: float, classes: int) -> Tensor:
    """The gradient at the target, from its log-probability. Unrounded, because near one the difference to it matters."""
    return logarithm.exp() - smoothing / classes - (1 - smoothing)


def put_target(slopes: Tensor, safe: Tensor, here: Tensor, at_target: Tensor) -> None:
    if not slopes.shape[-1]:
        return
    place = safe.unsqueeze(-1)
    value = torch.where(here.unsqueeze(-1), at_target.unsqueeze(-1).to(slopes.dtype), slopes.gather(-1, place))
    slopes.scatter_(-1, place, value)


def scale(tensor: Tensor, by: Tensor) -> Tensor:
    """Multiply a tensor by a number in place: in the number's precision, rounded once."""
    # As a vector of one element: torch would first round a GPU scalar to the tensor's dtype.
    return torch.mul(tensor, by.reshape(1), out=tensor)


def alone(
    logits: Tensor, safe: Tensor, here: Tensor, counted: Tensor, smoothing: float, wants_slope: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """All steps on a whole vocabulary: the sum of the losses; if needed, the gradients, and those at the targets.

    torch's two softmax kernels read the logits once each, so that even uncompiled, tensors of the logits' size are read
    and written only a few times.
    """
    classes = logits.shape[-1]
    logarithms = logits.log_softmax(-1, torch.promote_types(logits.dtype, torch.float32))
    target = value_at_target(logarithms, safe, here)
    found = -target
    if smoothing:
        found = (1 - smoothing) * found - smoothing * logarithms.mean(-1)
    loss = found.masked_fill(~counted, 0).sum()
    if not wants_slope:
        return loss, None, None
    del logarithms  # as large as the logits, in a wider dtype
    slopes = logits.softmax(-1)
    if smoothing:
        slopes -= smoothing / classes
    return loss, slopes, slope_at_target(target, smoothing, classes)


@dataclass(frozen=True)
class Steps:
    """The functions above, compiled or not."""

    largest: Callable[..., Tensor] = largest
    sums: Callable[..., Tensor] = sums
    losses: Callable[..., Tensor] = losses
    slope: Callable[..., Tensor] = slope
    alone: Callable[..., tuple[Tensor, Tensor | None, Tensor | None]] = alone
    exponentials: Callable[..., tuple[Tensor, Tensor]] = exponentials
    slopes: Callable[..., tuple[Tensor, Tensor]] = slopes
    scale: Callable[[Tensor, Tensor], Tensor] = scale

    def compiled(self, backend: str) -> Steps:
        run = partial(torch.compile, backend=backend, dynamic=False)
        made = {each.name: run(getattr(self, each.name)) for each in fields(self)}
        return replace(self, **made)

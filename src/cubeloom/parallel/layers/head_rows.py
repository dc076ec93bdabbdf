"""What a cross-entropy computes on some rows, between matmuls and collectives: `[rows, V/y]`.

A head that is one with its loss computes it on a chunk of rows, and keeps slopes; a loss behind its head on all rows, and keeps
exponentials.

Each step is a function of tensors alone, so that it can be compiled into one kernel that reads the logits once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from cubeloom.parallel.layers.classes import largest_of, value_at_target
from cubeloom.parallel.layers.norm import at_least_float32


def largest(logits: Tensor) -> Tensor:
    """The largest logit of each row, `[rows, 1]`."""
    return at_least_float32(largest_of(logits)).unsqueeze(-1)


def sums(logits: Tensor, largest: Tensor, safe: Tensor, here: Tensor, smoothing: float) -> Tensor:
    """What is to be summed over parts of the vocabulary, `[2 or 3, rows]`, of logits less the largest.

    The exponentials, the target's logit where it is `here`, and with smoothing all logits.
    """
    shifted = at_least_float32(logits) - largest
    return torch.stack(
        [shifted.exp().sum(-1), value_at_target(shifted, safe, here)] + ([shifted.sum(-1)] if smoothing else [])
    )


def exponentials(
    logits: Tensor, largest: Tensor, safe: Tensor, here: Tensor, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Of logits less the largest; and `sums`."""
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
    """The slopes of the losses, each row's times its number in `rows`; and apart, in full digits, those of the targets."""
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
        # The smoothed target gives each entry a share of `smoothing`, and the true one the rest.
        found = (1 - smoothing) * found + smoothing * (logarithm - sums[2] / classes)
    return found.masked_fill(~counted, 0).sum()


def slope(logits: Tensor, largest: Tensor, sums: Tensor, smoothing: float, classes: int) -> Tensor:
    """Put the slope of the loss in the logits' place, but for the target's entry: that one's, `[rows]`."""
    logarithm = sums[0].log()
    probabilities = (at_least_float32(logits) - largest - logarithm.unsqueeze(-1)).exp()
    logits.copy_(probabilities - smoothing / classes)
    return slope_at_target(sums[1] - logarithm, smoothing, classes)


def slope_at_target(logarithm: Tensor, smoothing: float, classes: int) -> Tensor:
    """From the logarithm of its probability. In full digits: near one the difference to it is what matters."""
    return logarithm.exp() - smoothing / classes - (1 - smoothing)


def put_target(slopes: Tensor, safe: Tensor, here: Tensor, at_target: Tensor) -> None:
    if not slopes.shape[-1]:
        return
    place = safe.unsqueeze(-1)
    value = torch.where(here.unsqueeze(-1), at_target.unsqueeze(-1).to(slopes.dtype), slopes.gather(-1, place))
    slopes.scatter_(-1, place, value)


def scale(tensor: Tensor, by: Tensor) -> Tensor:
    """A tensor times a number, in its place: multiplied in the number's digits and rounded once."""
    # As a vector of one: torch would first round a number that lies on a GPU by itself to the tensor's type.
    return torch.mul(tensor, by.reshape(1), out=tensor)


def alone(
    logits: Tensor, safe: Tensor, here: Tensor, counted: Tensor, smoothing: float, wants_slope: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """All steps on a whole vocabulary: the sum of the losses; if slopes are wanted, all, and those at the targets.

    Torch's two softmax kernels read the logits once each: also where nothing is compiled, what is as large as they are is
    read and written but a few times.
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
    del logarithms  # as large as the logits, and wider
    slopes = logits.softmax(-1)
    if smoothing:
        slopes -= smoothing / classes
    return loss, slopes, slope_at_target(target, smoothing, classes)


@dataclass(frozen=True)
class Steps:
    """The functions above, as they are or compiled."""

    largest: Callable[..., Tensor] = largest
    sums: Callable[..., Tensor] = sums
    losses: Callable[..., Tensor] = losses
    slope: Callable[..., Tensor] = slope
    alone: Callable[..., tuple[Tensor, Tensor | None, Tensor | None]] = alone
    exponentials: Callable[..., tuple[Tensor, Tensor]] = exponentials
    slopes: Callable[..., tuple[Tensor, Tensor]] = slopes
    scale: Callable[[Tensor, Tensor], Tensor] = scale

    def compiled(self, backend: str) -> Steps:
        made = {each.name: torch.compile(getattr(self, each.name), backend=backend) for each in fields(self)}
        return replace(self, **made)

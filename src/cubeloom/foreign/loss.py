"""The loss of a foreign model is the mean over the rank's own samples; this makes it that of the whole batch."""

from __future__ import annotations

import torch
from torch import Tensor

from cubeloom.cube.loss import Mean
from cubeloom.cube.state import CubeState


def mean_over_batch(loss: Tensor, state: CubeState, targets: int = 1) -> Tensor:
    """The mean over the samples of all ranks of data and z, the same number on every rank; call `backward` on it.

    `targets`: of how many targets `loss` is the mean, where ranks have different numbers of them (ignored tokens, say). A rank
    without any, whose mean is NaN, adds nothing; without any on all ranks the mean is NaN, as torch's, and gradients are 0.
    """
    wide = loss.double()
    count = wide.new_tensor(float(targets))
    wide = torch.where(count > 0, wide, 0.0)
    everybody = state.network.axis("data", "z")
    return Mean.apply(wide * count, count, everybody, everybody.size, "loss").to(loss.dtype)

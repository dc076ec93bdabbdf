"""A weight gradient that is still to be computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cubeloom.comm import Pending


@dataclass(frozen=True)
class WeightGradient:
    """How to compute a parameter's gradient: its matmul, and the reduce-scatter of the result if z shards the weight.

    The matmul adds to an earlier gradient, or rounds its result to a dtype once; a product of many steps may leave it
    wider. The strands of a weave sum their products before one reduce-scatter.
    """

    parameter: nn.Parameter
    layer: str  # two layers may share a weight
    product: Callable[[Tensor | None, torch.dtype], Tensor]
    scatter: Callable[[Tensor], Pending] | None = None
    strands: int = 1


# Weight gradients that were deferred.
DeferredWeightGrads = deque[WeightGradient]

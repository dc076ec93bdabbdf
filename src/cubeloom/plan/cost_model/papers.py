"""The performance models of the three papers as printed, for comparison: ours are these, summed over layers and
schedules.
"""

from __future__ import annotations

from math import log2, sqrt
from typing import Any


def tensor3d_layer(k: int, n: int, rows: Any, gi: Any, go: Any, replicas: Any = 1) -> Any:
    """Elements that a rank receives for a layer `[rows, k] · [k, n]` on gi × go ranks and `replicas` (Tensor3D,
    equation 1).

    gi parts of the input's features and go of the output's; a transposed layer exchanges them.
    """
    return 2 * rows / (gi * go * replicas) * ((gi - 1) * n + (go - 1) * k)


def tensor3d_block(hidden: int, rows: Any, gi: Any, go: Any, replicas: Any = 1) -> Any:
    """The four linears of a Transformer block."""
    return 8 * rows * hidden / (gi * go * replicas) * ((go - 1) + 3 * (gi - 1))


def tensor3d_best(ranks: int) -> tuple[float, float]:
    """The rule for Transformers: the numbers of parts of input and output features that move the fewest elements."""
    return sqrt(ranks / 3), sqrt(3 * ranks)


def cube_layer(m: int, k: int, n: int, gm: int, gk: int, gn: int) -> tuple[float, float, float]:
    """Elements of X, W and Y that a rank receives in a forward on a gm × gk × gn cube (Bian et al.); a backward moves
    as many.
    """
    x = (gn - 1) / gn * m * k / (gm * gk)
    w = (gm - 1) / gm * k * n / (gk * gn)
    y = (gk - 1) / gk * m * n / (gm * gn)
    return x, w, y


def chimera_step(
    forward: float, backward: float, message: float, stages: int, microbatches: int, unoverlapped: float = 0.0
) -> float:
    """Seconds of a step (Chimera, equation 1), for one pair of pipelines and a multiple of D micro-batches, in
    consecutive units.

    D forwards and 2D - 2 backwards of the first unit are on the critical path; each further one has 2 and 2D - 2 more.
    """
    units = microbatches / stages
    forwards = stages + 2 * (units - 1)
    backwards = units * (2 * stages - 2)
    return (forward + message) * forwards + (backward + message) * backwards + unoverlapped


def chimera_all_reduce(nbytes: float, replicas: int, latency: float, seconds_per_byte: float) -> float:
    """Rabenseifner's all-reduce, as in Chimera's model."""
    if replicas == 1:
        return 0.0
    return 2 * log2(replicas) * latency + 2 * (replicas - 1) / replicas * nbytes * seconds_per_byte

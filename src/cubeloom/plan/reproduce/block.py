"""One transformer block on ranks that wait for every collective, as the code of 2021 did: 1-D, 2-D and 3-D.

1-D and 3-D are settings of the library's closed form. SUMMA is not, and has its own: panels are broadcast along rows
and columns, one after another, and each is used when it has arrived.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from cubeloom.parallel import specs
from cubeloom.parallel.config import ParallelConfig
from cubeloom.parallel.specs import LayerSpec, collectives
from cubeloom.plan import costs
from cubeloom.plan.cost_model.compute import Machine, issue, seconds
from cubeloom.plan.cost_model.timing import duration
from cubeloom.plan.hardware import Cluster, Dtype
from cubeloom.plan.hardware.device import SIZES
from cubeloom.plan.model import Piece, load

_FROM = "gpt2"  # the preset whose block is resized: 768 features


class Spent(NamedTuple):
    """Seconds of a forward and a backward of one block."""

    computed: float
    communicated: float

    @property
    def total(self) -> float:
        return self.computed + self.communicated

    def __add__(self, other: tuple[object, ...]) -> Spent:
        more = Spent(*other)  # type: ignore[arg-type]
        return Spent(self.computed + more.computed, self.communicated + more.communicated)


def block(hidden: int, heads: int) -> Piece:
    """The GPT block of that size: all widths of its list of layers scale with the hidden size."""
    (_, small, *_) = (load(_FROM).kinds[kind] for kind in dict.fromkeys(load(_FROM).row))
    (norm, *_) = (layer for layer in small.layers if isinstance(layer, specs.NormSpec))

    def wide(size: int) -> int:
        return size * hidden // norm.features

    def resized(layer: LayerSpec) -> LayerSpec:
        match layer:
            case specs.LinearSpec():
                return replace(layer, k=wide(layer.k), n=wide(layer.n), heads=layer.heads and heads)
            case specs.NormSpec():
                return replace(layer, features=hidden)
            case specs.AttentionSpec():
                return replace(layer, heads=heads, kv_heads=heads, head_dim=hidden // heads)
            case specs.PointwiseSpec():
                return replace(layer, inputs=wide(layer.inputs), outputs=wide(layer.outputs), kept=wide(layer.kept))
        raise ValueError(f"a block has no {type(layer).__name__}")

    return replace(small, layers=tuple(map(resized, small.layers)))


def cut(piece: Piece, s: ParallelConfig, cluster: Cluster, dtype: Dtype) -> Spent:
    """On a grid of the library. Activations are recomputed: the forward counts twice, and so do its collectives."""
    return sum((_layer(layer, s, cluster, dtype) for layer in piece.layers), start=Spent(0.0, 0.0))


def summa(piece: Piece, s: ParallelConfig, q: int, cluster: Cluster, dtype: Dtype) -> Spent:
    """On a plane of q · q ranks, with the ranks of a row adjacent. `s` has samples and sequence.

    Other operations work on rows / q and features / q of everything, with norm statistics summed along a row.
    """
    plane = replace(s, z=q, y=1, x=q, sharded=True, rank_stride={"x": 1, "y": 1, "z": q, "data": q * q})
    found = Spent(0.0, 0.0)
    for layer in piece.layers:
        if isinstance(layer, specs.LinearSpec):
            found += _panels(s.rows() * s.data * s.z, layer.k, layer.n, q, cluster, dtype)
        else:
            found += _layer(layer, plane, cluster, dtype)
    return found


def _layer(layer: LayerSpec, s: ParallelConfig, cluster: Cluster, dtype: Dtype) -> Spent:
    machine = Machine(cluster.device, dtype)
    forward, input_grad, weight_grad, *_ = issue(seconds(layer, s, machine), s, machine)
    waited = sum((1 + (each.phase == "F")) * float(duration(each, s, cluster)) for each in collectives(layer, s))
    return Spent(float(2 * forward + input_grad + weight_grad), waited)


def _panels(rows: float, k: int, n: int, q: int, cluster: Cluster, dtype: Dtype) -> Spent:
    """Forward: X along rows, W along columns. For each gradient one of them is broadcast and the result reduced."""
    m, k, n = rows / q, k / q, n / q  # type: ignore[assignment]
    size = SIZES[dtype]
    x, w = _broadcast(cluster, m * k * size, q, 1), _broadcast(cluster, k * n * size, q, q)
    device = cluster.device
    forward = costs.matmul(device, m, n, k, dtype)
    gradients = costs.matmul(device, m, k, n, dtype) + costs.matmul(device, k, n, m, dtype)
    return Spent(q * float(2 * forward + gradients), q * (2 + 2) * (x + w))


def _broadcast(cluster: Cluster, nbytes: float, group: int, rank_stride: int) -> float:
    """Through a ring in pieces: every rank passes on everything; in a gather it passes on all but its own share."""
    return float(costs.all_gather(cluster, nbytes * group / (group - 1), group, rank_stride))

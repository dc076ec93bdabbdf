"""The blocks of a transformer on ranks that wait for every collective, as the code of 2021 did: 1-D, 2-D and 3-D.

1-D and 3-D are settings of the library, timed by the planner's cost model. SUMMA is not: panels are broadcast along
rows and columns, one after another, and each is used when it has arrived. Its other layers are timed like all others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from cubeloom.parallel.config import FREED, ParallelConfig
from cubeloom.parallel.specs import LinearSpec, collectives
from cubeloom.plan import costs
from cubeloom.plan.cost_model.timing import duration, times
from cubeloom.plan.hardware import Cluster, Dtype
from cubeloom.plan.hardware.device import SIZES
from cubeloom.plan.model import Model, Piece
from cubeloom.plan.model.decoder import DecoderSizes, decoder

DTYPE: Dtype = "fp32"
VOCABULARY = 51200  # of the whole model; the blocks do not depend on it


@dataclass(frozen=True)
class SetUp:
    """A GPT of so many blocks on so many ranks, and the samples of a step."""

    ranks: int
    samples: int
    hidden: int
    heads: int
    layers: int
    sequence: int

    @property
    def model(self) -> Model:
        h = self.hidden
        return decoder(DecoderSizes(self.layers, h, self.heads, self.heads, 4 * h, VOCABULARY, self.sequence))


class Spent(NamedTuple):
    """Seconds of a step's forward and backward, and those of both in which a rank communicates."""

    forward: float
    backward: float
    forward_waits: float
    backward_waits: float

    @property
    def total(self) -> float:
        return self.forward + self.backward

    @property
    def waited(self) -> float:
        return self.forward_waits + self.backward_waits


def one_d(run: SetUp, cluster: Cluster) -> Spent:
    """Megatron-LM on a line of ranks: each keeps a share of the inputs to be recomputed from, and gathers them again."""
    s = _settings(run, y=run.ranks)
    whole = run.samples * run.sequence * run.hidden * s.item
    gathered = float(costs.all_gather(cluster, whole, run.ranks, 1))
    return _step(run, _library(_block(run), s, cluster), _waiting(gathered))


def two_d(run: SetUp, cluster: Cluster) -> Spent:
    """SUMMA on a square of ranks, of which a tile of two by two lies next to each other, as its script asks for.

    Operations between products work on rows / q and features / q, with a norm's statistics summed along a row.
    """
    q = round(run.ranks**0.5)
    s = _settings(run, z=q, x=q, rank_stride={"z": 2, "x": 2})
    block = _block(run)
    linears = [layer for layer in block.layers if isinstance(layer, LinearSpec)]
    others = replace(block, layers=tuple(layer for layer in block.layers if layer not in linears))
    rows = run.samples * run.sequence
    return _step(run, _library(others, s, cluster), *(panels(rows, each.k, each.n, q, cluster) for each in linears))


def three_d(run: SetUp, cluster: Cluster) -> Spent:
    """The cube as its first release has it: operands rest sharded and are gathered for each product, the output's
    gradient once for each of two products. Ranks along the weights' axis lie next to each other.
    """
    q = round(run.ranks ** (1 / 3))
    strides = {"z": 1, "y": q, "x": q * q}
    s = replace(_settings(run, z=q, y=q, x=q, rank_stride=strides), sharded=True, regathered=True)
    block = _block(run)
    moves = [move for layer in block.layers if isinstance(layer, LinearSpec) for move in collectives(layer, s)]
    gradients = [move for move in moves if move.phase == "I" and move.operation == "all_gather" and not move.of_weight]
    again = sum(float(duration(move, s, cluster)) for move in gradients)
    return _step(run, _library(block, s, cluster), _waiting(again))


def _block(run: SetUp) -> Piece:
    return next(kind for kind in run.model.kinds if kind.block)


def _settings(
    run: SetUp, z: int = 1, y: int = 1, x: int = 1, rank_stride: dict[str, int] | None = None
) -> ParallelConfig:
    return ParallelConfig(
        data=1, z=z, y=y, x=x, samples=run.samples, sequence=run.sequence, sharded=False, weights=FREED,
        item=SIZES[DTYPE], rank_stride={"x": 1, "y": 1, "z": 1, "data": run.ranks} | (rank_stride or {}),
    )  # fmt: skip


def _library(block: Piece, s: ParallelConfig, cluster: Cluster) -> Spent:
    """One block on a grid of the library; the backward computes the forward once more."""
    time = times(block, s, cluster, DTYPE)
    forward, backward = float(time.forward), float(time.redone + time.weight_grad - time.redone_saved)
    waits = {"F": 0.0, "I": 0.0}
    for layer in block.layers:
        for move in collectives(layer, s):
            waits["F" if move.phase == "F" else "I"] += float(duration(move, s, cluster))
    return Spent(forward, backward, waits["F"], waits["F"] + waits["I"])


def panels(rows: float, k: float, n: float, q: int, cluster: Cluster) -> Spent:
    """A product of SUMMA: X is broadcast along rows, W along columns. For each gradient one of them is broadcast and
    the result reduced.
    """
    m, k, n = rows / q, k / q, n / q
    moved = _broadcast(cluster, m * k * SIZES[DTYPE], q) + _broadcast(cluster, k * n * SIZES[DTYPE], q)
    forward = q * float(costs.matmul(cluster.device, m, n, k, DTYPE))
    gradients = q * float(costs.matmul(cluster.device, m, k, n, DTYPE) + costs.matmul(cluster.device, k, n, m, DTYPE))
    sent = q * moved
    return Spent(forward + sent, forward + gradients + 3 * sent, sent, 3 * sent)


def _broadcast(cluster: Cluster, nbytes: float, group: int) -> float:
    """Through a ring in pieces: every rank passes on everything; in a gather it passes on all but its own share."""
    return float(costs.all_gather(cluster, nbytes * group / (group - 1), group, 2))


def _waiting(seconds: float) -> Spent:
    """A collective of a block's backward."""
    return Spent(0.0, seconds, 0.0, seconds)


def _step(run: SetUp, *parts: Spent) -> Spent:
    """All blocks, of what one consists of."""
    return Spent(*(run.layers * sum(values) for values in zip(*parts, strict=True)))

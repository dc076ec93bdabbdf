"""3-D tensor parallelism (Bian et al. 2021) against 1-D and 2-D, on 64 V100 of Longhorn."""

from __future__ import annotations

from cubeloom.parallel.config import FREED, ParallelConfig
from cubeloom.plan.hardware import Cluster, Dtype
from cubeloom.plan.hardware import cluster as known
from cubeloom.plan.reproduce import published as paper
from cubeloom.plan.reproduce.block import Spent, block, cut, summa
from cubeloom.plan.reproduce.report import Report, Row, Share

# Strong scaling as it is recalled, with low confidence: hidden 3072, batch 24. 512 tokens, float32 and recomputation are the
# benchmark script's of the same group's 2-D paper. 64 heads, as 1-D cuts heads over all ranks.
HIDDEN, HEADS, SAMPLES, SEQUENCE = 3072, 64, 24, 512
DTYPE: Dtype = "fp32"
RANKS, SIDE, PLANE = 64, 4, 8


def reproduce() -> Report:
    cluster = known("longhorn")
    runs = times(cluster)
    one, two, three = runs.values()
    rows = (
        Row(paper.CUBE_OVER_1D, one.total / three.total),
        Row(paper.CUBE_OVER_2D, two.total / three.total),
        Row(paper.SUMMA_OVER_1D, one.total / two.total),
    )
    return Report(
        "cube",
        "3-D tensor parallelism (Bian et al. 2021) on Longhorn",
        rows,
        tuple(
            Share(f"one block: {name}", {"computed": run.computed, "communicated": run.communicated})
            for name, run in runs.items()
        ),
        (
            "Nothing is calibrated.",
            f"Set-up: hidden {HIDDEN}, batch {SAMPLES}, recalled; {SEQUENCE} tokens, {DTYPE}, recomputation, "
            "from the script of the 2-D paper.",
            "The four ranks of a node share its NICs. A 1-D all-reduce crosses them once for the node, a 3-D gather once "
            "for each rank: a rank receives a third of the bytes, a node about as many.",
        ),
        tuple(row.point.name for row in rows),
    )


def times(cluster: Cluster, hidden: int = HIDDEN, heads: int = HEADS, samples: int = SAMPLES) -> dict[str, Spent]:
    """Of one block, forward and backward: 1-D Megatron, 2-D SUMMA, and the cube as the paper stores it.

    On the cube operands rest sharded and are gathered again for each product; axes lie as in the authors' code: that of the
    weights inside a node, the others across.
    """
    piece = block(hidden, heads)

    def settings(z: int, y: int, x: int, sharded: bool, rank_stride: dict[str, int]) -> ParallelConfig:
        return ParallelConfig(
            data=1, z=z, y=y, x=x, samples=samples, sequence=SEQUENCE, sharded=sharded, weights=FREED,
            regathered=sharded, item=4, rank_stride={**rank_stride, "data": RANKS},
        )  # fmt: skip

    line = settings(1, RANKS, 1, False, {"x": 1, "y": 1, "z": RANKS})
    solid = settings(SIDE, SIDE, SIDE, True, {"z": 1, "y": SIDE, "x": SIDE * SIDE})
    return {
        "1-D": cut(piece, line, cluster, DTYPE),
        "2-D": summa(piece, line, PLANE, cluster, DTYPE),
        "3-D": cut(piece, solid, cluster, DTYPE),
    }

"""Divides the pieces of a model among stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from cubeloom.base.errors import UserError, counted
from cubeloom.parallel.specs import AttentionSpec, EmbeddingSpec, LayerSpec


def partition(costs: Sequence[float], stages: int) -> list[range]:
    """Divide a row of pieces so that the most expensive stage is as cheap as possible; each stage gets at least one
    piece.

    Exact, by dynamic programming: `best[s][i]` is the smallest possible maximum cost of the first i pieces in s stages.
    """
    return partitions(costs, [stages])[stages]


def partitions(costs: Sequence[float], counts: Sequence[int]) -> dict[int, list[range]]:
    """`partition` for several numbers of stages, which share most of the work."""
    count, stages = len(costs), max(counts)
    if not min(counts) >= 1 or stages > count:
        raise UserError(f"{counted(count, 'piece')} cannot make {stages} stages; at most {count} are possible")
    total = [0.0, *accumulate(costs)]
    best = [[float("inf")] * (count + 1) for _ in range(stages + 1)]
    cut = [[0] * (count + 1) for _ in range(stages + 1)]
    best[0][0] = 0.0
    for stage in range(1, stages + 1):
        for end in range(stage, count + 1):
            for start in range(stage - 1, end):
                worst = max(best[stage - 1][start], total[end] - total[start])
                if worst < best[stage][end]:
                    best[stage][end], cut[stage][end] = worst, start
    found = {}
    for chosen in counts:
        ends = [count]
        for stage in range(chosen, 0, -1):
            ends.append(cut[stage][ends[-1]])
        ends.reverse()
        found[chosen] = [range(start, end) for start, end in pairwise(ends)]
    return found


def counted_costs(modules: Sequence[tuple[str, ...]], specs: Sequence[LayerSpec]) -> list[float]:
    """The multiplications of each piece's layers for one row, or one sample of pixels, without those of attention.

    `modules` are the pieces' modules. A lookup counts about as much as copying its row.
    """

    def cost(spec: LayerSpec) -> float:
        if isinstance(spec, AttentionSpec):
            return 0.0
        return float(spec.features) if isinstance(spec, EmbeddingSpec) else spec.flops(sequence=1) / 2

    return [sum(cost(spec) for spec in specs if belongs(spec.name, names)) for names in modules]


def belongs(name: str, modules: tuple[str, ...]) -> bool:
    """Whether a layer of this name is one of the modules or inside one. `name.` is a module without its children."""
    return any(name == module or name.startswith(f"{module}.") or f"{name}." == module for module in modules)

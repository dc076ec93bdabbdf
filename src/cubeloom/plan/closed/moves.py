"""Communication as values: which operation, along which axes, of how many bytes, in which part of a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from cubeloom.plan.closed.settings import Settings
from cubeloom.plan.costs import Quantity

Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "exchange"]
Axes = tuple[str, ...]
Bytes = dict[Axes, Any]  # received by a rank


@dataclass(frozen=True)
class Move:
    """A collective of one micro-batch. `nbytes` are those of the whole tensor, 0 where there is none.

    An exchange is a turn's: `nbytes` are those that a rank receives. Of a forward ("F"), an input gradient ("I") or a weight
    gradient ("W").
    """

    phase: Literal["F", "I", "W"]
    operation: Operation
    axes: Axes
    nbytes: Any
    of_weight: bool = False  # gathered ahead or scattered behind, while other layers compute
    gathered_to_keep: bool = False  # only where the weight is not at hand already


@dataclass(frozen=True)
class Parameter:
    """The block that a rank holds of a parameter, in numbers; and over which axes replicas sum its gradient."""

    name: str
    numbers: Any
    axes: Axes
    exists: Any = True  # where these are the axes
    rows: Any = 1  # of the block


def received(move: Move, s: Settings) -> Quantity:
    """What a rank receives in a ring."""
    if move.operation == "exchange":
        return move.nbytes
    parts = s.size(*move.axes)
    passes = 2 if move.operation == "all_reduce" else 1
    return passes * ring(parts) * move.nbytes


def ring(parts: Any) -> Any:
    """The share of a tensor that a rank receives where a ring gathers or scatters it."""
    return (parts - 1) / parts


def add(volumes: Iterable[tuple[Axes, Any]]) -> Bytes:
    total: Bytes = {}
    for axes, size in volumes:
        total[axes] = total[axes] + size if axes in total else size
    return total

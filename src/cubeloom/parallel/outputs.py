"""What a model gives, tensor by tensor, as its run without values shows it; and how a program gets it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Plane:
    """A dimension that axes of the plane cut, too; where it is padded, `part` numbers on each rank, and `count` in all."""

    dim: int
    axes: tuple[str, ...]
    part: int = 0
    count: int = 0


@dataclass(frozen=True)
class Output:
    """`samples`: the dimension that data and z cut. `unclear`: samples are cut in a way that has no name here."""

    samples: int | None
    plane: tuple[Plane, ...] = ()
    unclear: bool = False


# By where they are in what the model gives: `logits`, `0`, `hidden_states.1`.
Outputs = Mapping[str, Output]

"""Losses: means over the whole batch, so every rank has the loss of the serial model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cubeloom.parallel.arrangement import Arrangement, padded
from cubeloom.parallel.config import ParallelConfig
from cubeloom.parallel.layout import Axes, Layout
from cubeloom.parallel.specs.linear import padded_parts, rows_divide
from cubeloom.parallel.specs.spec import ROWS, LayerSpec, Rule, Side, Touched, Transfer, other, rows_of, stream

_SCALAR = Layout.of()


def _mean(rows: Axes, c: ParallelConfig, when: object = True) -> Transfer:
    """The all-reduce of the sum and the count of a mean over all rows."""
    return Transfer("F", Layout.of(partial=rows), _SCALAR, 2, "statistic", when)


@dataclass(frozen=True, kw_only=True)
class LossSpec(LayerSpec):
    """The mean cross-entropy of logits with classes over y and rows over z and x.

    `whole`: every rank of x and y has all classes and all rows of its z rank.
    """

    whole: bool
    smoothing: float = 0.0
    ignored: int = -100  # targets with this value do not count
    head: str | None = None  # the layer that computes its logits
    classes: int = 0  # outputs of the head, or seen in a run; for the planner's time and memory

    def arrangement(self, c: ParallelConfig) -> Arrangement | None:
        """Of the classes, as in the head."""
        return padded(self.classes, int(padded_parts(c))) if self.head is not None and not self.whole else None

    def takes(self, c: ParallelConfig) -> tuple[Layout, ...]:
        logits = Layout.of(rows=ROWS, features=None) if self.whole else stream("y", True)
        return logits, Layout.of(rows=ROWS)

    def gives(self, c: ParallelConfig) -> Layout:
        return _SCALAR

    def transfers(self, c: ParallelConfig) -> Iterator[Transfer]:
        if self.whole:
            yield _mean(ROWS, c)
            return
        rows, elements = rows_of("y", True), c.samples * c.sequence
        summed, whole = Layout.of(rows=rows, partial="y"), Layout.of(rows=rows)
        yield Transfer("F", summed, whole, elements, "statistic")  # the maximum logit
        # The sum of exponentials, the target's logit and, with label smoothing, the sum of logits.
        yield Transfer("F", summed, whole, (3 if self.smoothing else 2) * elements, "statistic")
        yield _mean(rows, c)

    def touched(self, c: ParallelConfig) -> Touched:
        logits = c.rows() * self.classes / c.size("x", "y")
        return Touched(logits * (c.item + 4 * c.statistic), logits * (c.item + 3 * c.statistic), operators=8)

    def saved(self, c: ParallelConfig, logits: Any = 1) -> Any:
        """`logits`: the share of decompositions on which the logits are kept."""
        return 0.0 if self.whole else c.rows() / c.x * (self.classes / c.y * c.statistic * logits + 10)


@dataclass(frozen=True, kw_only=True)
class SquaredLossSpec(LayerSpec):
    """The mean squared error over all samples, of features that every rank of the side has whole."""

    side: Side

    def takes(self, c: ParallelConfig) -> tuple[Layout, ...]:
        return Layout.of(rows=rows_of(self.side, bool(c.sharded)), features=None), Layout.of(rows=ROWS, features=None)

    def gives(self, c: ParallelConfig) -> Layout:
        return _SCALAR

    def transfers(self, c: ParallelConfig) -> Iterator[Transfer]:
        for sharded, when in ((True, c.sharded), (False, 1 - c.sharded)):
            yield _mean(rows_of(self.side, sharded), c, when)

    def touched(self, c: ParallelConfig) -> Touched:
        return Touched()  # few elements: images have few colours

    def saved(self, c: ParallelConfig) -> Any:
        return 0.0

    def rules(self, c: ParallelConfig) -> Iterator[Rule]:
        yield from rows_divide(True, c, other(self.side), c.sharded)

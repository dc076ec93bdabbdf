"""Hanayo (Liu et al. 2023): one replica whose stages run down the workers and up again in waves; backwards go first."""

from __future__ import annotations

from cubeloom.pipeline.action import Action, Kind
from cubeloom.pipeline.costs import Costs
from cubeloom.pipeline.listing import Layout, listed
from cubeloom.pipeline.schedule import Schedule
from cubeloom.pipeline.schedules._common import at_least_one, refuse, zigzag


def hanayo(workers: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Two chunks form a wave. As in 1F1B no worker holds the activations of more than p micro-batches of its share."""
    at_least_one("hanayo", workers, microbatches)
    refuse("hanayo", "chunks", "two chunks for each wave", chunks, lambda v: v >= 2 and v % 2 == 0)
    layout = Layout.single(zigzag(workers, chunks), microbatches)
    costs = Costs.uniform(layout.stages, chunk=1 / chunks)
    return listed("hanayo", layout, costs, cap=workers, split=False, key=_oldest_backward)


def _oldest_backward(action: Action) -> tuple[float, ...]:
    return action.kind is Kind.FORWARD, action.microbatch, -action.stage

"""The optimizer's step: each replica updates its share of the weights, and all gather the others'."""

from __future__ import annotations

import numpy as np
import pytest

from cubeloom.parallel.config import FREED, REPLICATED, ParallelConfig
from cubeloom.plan import costs
from cubeloom.plan.cost_model.compute import optimizer
from cubeloom.plan.cost_model.schedules import ALONE, SHAPES
from cubeloom.plan.cost_model.step import Step, step
from cubeloom.plan.cost_model.worker_load import carry, loads
from cubeloom.plan.hardware import cluster
from cubeloom.plan.model import load
from cubeloom.plan.search.find import cost

MODEL, MACHINE = load("gpt-5b"), cluster("perlmutter")
CHIMERA = next(shape for shape in SHAPES if shape.name == "chimera")


def timed(data: float, z: float = 1.0, weights: int = FREED, pipe: int = 1) -> tuple[Step, float]:
    """A step with so many replicas, and the numbers of its weights on a rank."""
    s = ParallelConfig(
        data=np.array([data]), z=np.array([z]), y=np.array([1.0]), x=np.array([1.0]), samples=np.array([8 * data * z]),
        sequence=512, weights=np.array([weights]), sharded=np.array([True]), regathered=np.array([False]), ways=np.array([1.0]),
        rank_stride={"x": np.ones(1), "y": np.ones(1), "z": np.ones(1), "data": np.array([z]), "pipe": np.array([data * z])},
    )  # fmt: skip
    shape = ALONE if pipe == 1 else CHIMERA
    carried = carry(loads(MODEL, shape, pipe), cost(MODEL, s, MACHINE, "bf16"))
    found = step(shape, pipe, 4.0, carried, s, MACHINE, recompute=False)
    return found, float(max(np.max(each.numbers) for each in carried))


@pytest.mark.parametrize(
    ("data", "z", "weights", "pipe", "replicas"),
    [(1, 1, FREED, 1, 1), (4, 1, FREED, 1, 4), (2, 4, REPLICATED, 1, 8), (2, 1, FREED, 2, 4)],
)
def test_a_replica_updates_its_share_and_gathers_the_rest(
    data: float, z: float, weights: int, pipe: int, replicas: int
) -> None:
    found, numbers = timed(data, z, weights, pipe)
    share = optimizer(numbers / replicas, 2, MACHINE.device)
    gather = costs.all_gather(MACHINE, 2 * numbers, replicas, 1)
    assert found.update[0] == pytest.approx(share + gather, rel=1e-3)
    # What is scattered and what is gathered are the two halves of an all-reduce; gradients are in float32.
    assert found.reduction[0] == pytest.approx(costs.reduce_scatter(MACHINE, 4 * numbers, replicas, 1))
    assert found.computed + found.bubble + found.exposed == pytest.approx(found.seconds)


def test_weights_that_z_cuts_have_no_replicas() -> None:
    """Their gradients are scattered layer by layer: of large weights nothing is left to gather but what z does not cut."""
    found, _ = timed(1, 8)
    alone, numbers = timed(1)
    assert found.update[0] == pytest.approx(optimizer(numbers / 8, 2, MACHINE.device), rel=0.05)
    assert found.update[0] < alone.update[0] / 6

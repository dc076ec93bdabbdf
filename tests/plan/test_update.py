"""The optimizer's step: each replica updates its share of the weights, and all gather the others'."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cubeloom.parallel.config import FREED, REPLICATED, ParallelConfig
from cubeloom.plan import costs
from cubeloom.plan.cost_model.compute import optimizer
from cubeloom.plan.cost_model.schedules import ALONE, SHAPES
from cubeloom.plan.cost_model.step import Step, behind, step
from cubeloom.plan.cost_model.worker_load import BUCKET, carry, loads
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


def test_a_reduction_runs_behind_the_last_backward_but_for_its_last_bucket() -> None:
    one = np.ones(1)
    s = ParallelConfig(
        data=4 * one, z=one, y=one, x=one, samples=32 * one, sequence=512, weights=np.array([FREED]), sharded=one > 0,
        regathered=one < 0, ways=one, rank_stride=dict.fromkeys(("x", "y", "z", "data", "pipe"), one),
    )  # fmt: skip
    drag = MACHINE.nic_drag
    whole, nbytes = 1.0 * one, 100.0 * BUCKET
    assert behind(whole, nbytes, 10.0, s, MACHINE) == pytest.approx(max(0.01, drag))
    assert behind(whole, nbytes, 0.25, s, MACHINE) == pytest.approx(0.75)
    assert behind(whole, nbytes, 0.0, s, MACHINE) == pytest.approx(1.0)
    assert behind(0 * whole, nbytes, 10.0, s, MACHINE) == 0
    # The backward of a recorded stage is launched as a whole.
    assert behind(whole, nbytes, 10.0, replace(s, record=True), MACHINE) == pytest.approx(1.0)

"""Every grid sees the same batches, from any position; and the thread behind a loader is well behaved."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cubeloom.base.errors import UserError
from cubeloom.base.grid import Grid
from cubeloom.train.data import Loader, Mixture, Samples, Stream
from cubeloom.train.data.stream import following

STREAM = Stream(np.arange(500, dtype=np.uint16), sequence=7, seed=1)
MIXTURE = Mixture([STREAM, Stream(np.arange(500, 900, dtype=np.uint16), sequence=7)], [0.6, 0.4])
GRIDS = [Grid(), Grid(data=2), Grid(z=2, x=2), Grid(data=2, z=3), Grid(data=4, z=3, y=2), Grid(pipe=2, data=12)]
BATCH = 12


def batches(samples: Samples, grid: Grid, position: int, steps: int) -> list[Tensor]:
    """The union of the shares of all ranks, step by step; ranks that take the same share must get the same."""
    found = [torch.full((BATCH, 2, samples.sequence), -1) for _ in range(steps)]
    for rank in range(grid.world):
        share = grid.share(grid.coordinates(rank), BATCH)
        with Loader(samples, BATCH, share, position) as loader:
            for whole in found:
                made = next(loader)
                mine = torch.stack((made["tokens"], made["targets"]), 1)
                assert (whole[share] == -1).all() or torch.equal(whole[share], mine)
                whole[share] = mine
            assert loader.position == position + steps * BATCH
    return found


@pytest.mark.parametrize("samples", [STREAM, MIXTURE], ids=["stream", "mixture"])
def test_the_shares_of_any_grid_make_the_same_batches(samples: Samples) -> None:
    expected = [samples.batch(torch.arange(step * BATCH, (step + 1) * BATCH)) for step in range(3)]
    for grid in GRIDS:
        for whole, found in zip(expected, batches(samples, grid, 0, 3), strict=True):
            assert torch.equal(found, torch.stack((whole["tokens"], whole["targets"]), 1)), grid


@given(before=st.integers(0, 12), first=st.sampled_from(GRIDS), then=st.sampled_from(GRIDS))
@settings(max_examples=6, deadline=None)
def test_a_position_goes_on_on_another_grid(before: int, first: Grid, then: Grid) -> None:
    whole = batches(MIXTURE, Grid(), 0, before + 2)
    parts = batches(MIXTURE, first, 0, before) + batches(MIXTURE, then, before * BATCH, 2)
    assert all(torch.equal(one, other) for one, other in zip(whole, parts, strict=True))


class Failing:
    """Fails in the third batch."""

    sequence = 1

    def batch(self, numbers: Tensor) -> dict[str, Tensor]:
        if numbers[0] >= 8:
            raise OSError("the disk is gone")
        return following(numbers[:, None].expand(-1, 2))


def test_what_fails_in_the_thread_fails_in_the_caller_at_its_step() -> None:
    with Loader(Failing(), 4) as loader:
        assert next(loader)["tokens"].flatten().tolist() == [0, 1, 2, 3]
        next(loader)
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is gone"):
                next(loader)
        assert loader.position == 8


class Counting:
    sequence = 1

    def __init__(self) -> None:
        self.made = 0

    def batch(self, numbers: Tensor) -> dict[str, Tensor]:
        self.made += 1
        return following(numbers[:, None].expand(-1, 2))


def test_batches_are_made_ahead_but_not_without_bound() -> None:
    counting = Counting()
    with Loader(counting, 4) as loader:
        assert loader.position == 0
        wait_until(lambda: counting.made == 3)  # two in the queue, one in hand
        time.sleep(0.1)
        assert counting.made == 3
        next(loader)
        wait_until(lambda: counting.made == 4)
    with pytest.raises(RuntimeError, match="closed"):
        next(loader)
    loader.close()


def test_the_thread_ends_with_its_loader() -> None:
    def ours() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "cubeloom data"]

    loader = Loader(Counting(), 4)
    assert len(ours()) == 1
    del loader
    gc.collect()
    wait_until(lambda: not ours())


def wait_until(happens: Callable[[], bool]) -> None:
    for _ in range(200):
        if happens():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen")


@pytest.mark.parametrize("share", [slice(0, 5), slice(2, 2), slice(-1, 2)])
def test_a_share_lies_in_the_batch(share: slice) -> None:
    with pytest.raises(UserError, match="no share of a batch of 4"):
        Loader(STREAM, 4, share)

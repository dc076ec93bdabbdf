"""Large collectives cut over several communicators give what one gives, and the ledger says the same."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from cubeloom import Grid
from cubeloom.comm import Network, axis
from cubeloom.comm.ledger import Entry
from cubeloom.launch import RankPool

pytestmark = pytest.mark.timeout(120)


def _collectives(num_comm_channels: int, least: int, numbers: int) -> tuple[list[Tensor], list[Entry], int]:
    """`least` bytes are worth a channel."""
    with patch.object(axis, "CHANNEL_BYTES", least):
        return _all(num_comm_channels, numbers)


def _all(num_comm_channels: int, numbers: int) -> tuple[list[Tensor], list[Entry], int]:
    network = Network(Grid(x=2, data=2, placement=("x", "data", "pipe", "y", "z")), num_comm_channels=num_comm_channels)
    mine = torch.arange(4.0 * numbers).reshape(4, numbers) * (1 + network.rank)
    found = []
    with network.recording() as ledger:
        for along in (network.axis("x"), network.axis("x", "data")):
            found += [
                along.all_reduce(mine).wait(),
                along.all_reduce(mine, largest=True).wait(),
                along.all_gather(mine, dim=0).wait(),
                along.all_gather(mine, dim=1).wait(),
                along.reduce_scatter(mine, dim=0).wait(),
                along.all_reduce(mine.t()).wait(),
            ]
    return found, ledger.entries, len(network.axis("x")._groups)


@pytest.mark.parametrize("numbers", [6, 5], ids=["even", "odd"])
def test_lanes_change_nothing(ranks: RankPool, numbers: int) -> None:
    alone = ranks.run(4, _collectives, 1, 1, numbers)
    for several in (ranks.run(4, _collectives, 3, 1, numbers), ranks.run(4, _collectives, 2, 2**20, numbers)):
        for (expected, entries, _), (found, counted, num_comm_channels) in zip(alone, several, strict=True):
            assert num_comm_channels in (2, 3)
            assert counted == entries
            for one, other in zip(expected, found, strict=True):
                assert torch.equal(one, other)

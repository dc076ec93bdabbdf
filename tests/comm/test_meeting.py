"""A rank that does not come to where groups are made is not waited for in silence."""

from __future__ import annotations

import re
import time
from unittest.mock import patch

import pytest
import torch.distributed as dist

from cubeloom import Grid
from cubeloom.comm import CommunicationError, Network, meeting
from cubeloom.launch import RankPool

ENDS = 30  # seconds, long before which the rank that waits must have ended


@pytest.mark.timeout(120)
@pytest.mark.parametrize("what", ["axes", "host_group"])
def test_who_waits_too_long_ends_and_says_what_for(what: str) -> None:
    with RankPool(4) as pool, pytest.raises(CommunicationError) as caught:
        pool.run(4, _meet, what, timeout=60)
    # The group beside the grid's has the patience as its own limit.
    seconds = {"axes": "1", "host_group": "0.5"}[what]
    said = rf"rank \d: making the groups of y=2,x=2, {what}: not all ranks came within {seconds} s"
    assert re.fullmatch(said, str(caught.value))


def _meet(what: str) -> None:
    if what == "axes":
        _do_not_come()
    network = Network(Grid(y=2, x=2), timeout=0.5)
    _do_not_come()
    _ = network.host_group


def _do_not_come() -> None:
    """Rank 3; the others do not wait long for it."""
    if dist.get_rank() == 3:
        time.sleep(ENDS)
    meeting.LEAST = 1.0  # the processes end with this test


def test_who_is_in_time_goes_on() -> None:
    heard: list[str] = []
    with patch.object(meeting, "LEAST", 0.2), meeting.meeting("rank 0", "making groups", 0.1, heard.append):
        pass
    time.sleep(0.4)
    assert heard == []

"""What ranks tell each other beside training: one that does not answer is not waited for longer than patience."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from cubeloom import UserError
from cubeloom.comm import CommunicationError, HostGroup
from cubeloom.launch import RankPool

pytestmark = pytest.mark.timeout(60)


def _wait_for_one_that_does_not_come() -> None:
    host_group = HostGroup(timeout=0.5)
    host_group.gather(None)
    if dist.get_rank() == 1:
        time.sleep(30)
    host_group.gather(None)


def test_nobody_is_waited_for_longer_than_patience() -> None:
    with RankPool(2) as pool, pytest.raises(CommunicationError, match="gathering from all ranks"):
        pool.run(2, _wait_for_one_that_does_not_come, timeout=20)


def _fail(who: tuple[int, ...], refused: bool) -> None:
    def work() -> None:
        if dist.get_rank() in who:
            raise UserError("no room") if refused else OSError("no room")

    HostGroup().agree(work)


def test_what_fails_on_one_rank_fails_on_all_and_names_it(ranks: RankPool) -> None:
    with pytest.raises(UserError, match=r"^rank 1 of 2 on \S+: no room"):
        ranks.run(2, _fail, (1,), True)
    with pytest.raises(UserError, match=r"^no room"):  # all say the same
        ranks.run(2, _fail, (0, 1), True)
    with pytest.raises(OSError, match=r"^no room") as failed:  # what may pass is no refusal
        ranks.run(2, _fail, (1,), False)
    assert any("rank 0 of 2: rank 1 of 2 on" in note for note in failed.value.__notes__)


def _follow() -> int:
    return HostGroup().follow_first(dist.get_rank)


def test_all_follow_rank_0(ranks: RankPool) -> None:
    assert ranks.run(3, _follow) == [0, 0, 0]

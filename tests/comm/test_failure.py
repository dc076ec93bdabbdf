"""A partner that is gone: the error says in our words which message it was, and that it is another's fault."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from cubeloom import Grid
from cubeloom.comm import CommunicationError, Network, blames_others
from cubeloom.launch import RankFailed, RankPool


@pytest.mark.timeout(120)
@pytest.mark.parametrize("way", ["send of a word to", "receive of a word from"])
def test_a_message_to_or_from_one_that_is_gone(way: str) -> None:
    with RankPool(2) as pool, pytest.raises(RankFailed, match="rank 1 of 2 died with exit code 3") as caught:
        pool.run(2, _speak_to_the_dead, way, timeout=60)
    (note,) = caught.value.__notes__
    assert note.startswith(f"rank 0 of 2: {way} rank 1: ")
    assert "\n" not in note and "typically" not in note  # gloo gives advice besides


def _speak_to_the_dead(way: str) -> None:
    axis = Network(Grid(x=2), timeout=10).axis("x")
    if dist.get_rank():
        os._exit(3)
    speak = axis.send if way.startswith("send") else axis.receive
    with pytest.raises(CommunicationError):
        while True:  # until the system has told gloo of the death, a message is taken
            speak(torch.zeros(2**20), 1, "a word").wait()
    speak(torch.zeros(1), 1, "a word")  # of whom gloo knows, it tells before anybody waits


def test_blame_is_found_behind_other_errors() -> None:
    outer = RuntimeError("a step failed")
    outer.__cause__ = CommunicationError("nobody answered")
    assert blames_others(outer)
    assert not blames_others(RuntimeError("mine"))

"""A stream that makes no progress is seen, and the words say where it stands."""

from __future__ import annotations

import queue

import pytest

from cubeloom.comm.watch import Watch

PATIENCE = 0.2


class _Stream:
    """A stream of which we say how far it has come."""

    def __init__(self) -> None:
        self.given = self.done = 0

    def mark(self) -> _Place:
        self.given += 1
        return _Place(self, self.given)


class _Place:
    def __init__(self, stream: _Stream, number: int) -> None:
        self._stream, self._number = stream, number

    def query(self) -> bool:
        return self._stream.done >= self._number


@pytest.fixture
def heard() -> queue.Queue[str]:
    return queue.Queue()


def _two_actions(stream: _Stream, heard: queue.Queue[str]) -> Watch:
    watch = Watch("rank 2", PATIENCE, stream.mark, heard.put)
    watch.at("2F0")
    watch.waits("receive of output 1F0 from rank 1")
    watch.done("2F0")
    watch.at("2F1")
    watch.waits("receive of output 1F1 from rank 1")
    watch.done("2F1")
    return watch


def test_words_say_where_after_what_and_for_whom(heard: queue.Queue[str]) -> None:
    stream = _Stream()
    _two_actions(stream, heard)
    stream.done = 2
    assert heard.get(timeout=10) == ("rank 2, at 2F1, after 2F0: receive of output 1F1 from rank 1: nothing for 0.2 s")


def test_an_action_that_does_not_end_is_named(heard: queue.Queue[str]) -> None:
    stream = _Stream()
    _two_actions(stream, heard)
    stream.done = 3
    assert heard.get(timeout=10) == "rank 2, at 2F1, after 2F0: 2F1 is under way: nothing for 0.2 s"


def test_a_stream_that_has_passed_all_is_never_stuck(heard: queue.Queue[str]) -> None:
    stream = _Stream()
    watch = _two_actions(stream, heard)
    stream.done = 4
    with pytest.raises(queue.Empty):
        heard.get(timeout=5 * PATIENCE)
    watch.done("2B0")  # and it looks again when there is something to see
    assert heard.get(timeout=10) == "rank 2, at 2F1, after 2F1: 2B0 is under way: nothing for 0.2 s"

"""Detects that a GPU's stream waits too long for another rank, and ends this rank with an error that says where.

On a GPU the stream waits: the program keeps giving it work and does not notice. Each wait and each finished action
therefore leaves a mark in the stream. A thread checks which marks the stream has passed. If the stream does not pass
the next mark within `timeout`, that mark says where it is stuck, and the last one what it finished.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

_LOOKS = 20  # checks of the marks within one timeout


class Passed(Protocol):
    """A position in a stream."""

    def query(self) -> bool:
        """Whether the stream has passed it."""
        ...


@dataclass(frozen=True)
class _Mark:
    place: str
    wait: str  # what the stream waits for here; or
    done: str  # what it has finished here
    passed: Passed


def mark_stream() -> Passed:
    event = torch.cuda.Event()
    event.record()
    return event


def end_rank(words: str) -> None:
    """End the process at once: the program may be waiting for the stream and cannot be asked to stop."""
    for say in _last_words:
        say(words)
    os._exit(1)


def _to_stderr(words: str) -> None:
    sys.stderr.write(f"{words}\n")
    sys.stderr.flush()


_last_words: list[Callable[[str], None]] = [_to_stderr]


def tell_last_words_to(listener: Callable[[str], None]) -> None:
    """Also send last words to `listener`, besides stderr: a pool of ranks passes them to the user."""
    _last_words.append(listener)


class Watch:
    """`where`: this rank, for messages. `mark` leaves a mark in the current stream; `end` gets the message."""

    def __init__(
        self,
        where: str,
        timeout: float,
        mark: Callable[[], Passed] = mark_stream,
        end: Callable[[str], None] = end_rank,
    ) -> None:
        self._where = where
        self._timeout = timeout
        self._mark = mark
        self._end = end
        self._place = "start"
        self._finished = "nothing"
        self._marks: deque[_Mark] = deque()
        self._guard = threading.Lock()
        self._looking = False

    def at(self, place: str) -> None:
        """The program has reached this place."""
        self._place = place

    def waits(self, about: str) -> None:
        """The stream waits here for another rank."""
        self._append(wait=about)

    def done(self, action: str) -> None:
        self._append(done=action)

    def _append(self, wait: str = "", done: str = "") -> None:
        with self._guard:
            self._marks.append(_Mark(self._place, wait, done, self._mark()))
            if not self._looking:
                self._looking = True
                threading.Thread(target=self._look, name="cubeloom watch", daemon=True).start()

    def _look(self) -> None:
        """Runs until the stream has passed all marks. The next mark starts it again, so that no thread outlives its
        network.
        """
        since = time.monotonic()
        while True:
            time.sleep(self._timeout / _LOOKS)
            while self._marks and self._marks[0].passed.query():
                self._finished = self._marks.popleft().done or self._finished
                since = time.monotonic()
            with self._guard:
                if not self._marks:
                    self._looking = False
                    return
            if time.monotonic() - since > self._timeout:
                self._end(self._words(self._marks[0]))
                return

    def _words(self, stuck: _Mark) -> str:
        about = stuck.wait or f"{stuck.done} is under way"
        return f"{self._where}, at {stuck.place}, after {self._finished}: {about}: nothing for {self._timeout:g} s"

"""Sees when a GPU's stream waits for another rank for too long, and ends this rank with words that say where.

On a GPU a wait is the stream's: the program goes on giving it work, and nobody can be asked what is taking so long. So each
wait, and each action that is done, leaves a mark in the stream. A thread looks which marks the stream has passed; when it has
not passed the next one for as long as our patience lasts, that mark says where it is stuck, and the last one what it did.
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

_LOOKS = 20  # at the marks, within one patience


class Passed(Protocol):
    """A place in a stream."""

    def query(self) -> bool:
        """Whether the stream has passed it."""
        ...


@dataclass(frozen=True)
class _Mark:
    place: str
    wait: str  # what the stream waits for here; or
    done: str  # what it has done here
    passed: Passed


def mark_stream() -> Passed:
    event = torch.cuda.Event()
    event.record()
    return event


def end_rank(words: str) -> None:
    """The program may be waiting for the stream, and cannot be asked to stop."""
    for say in _last_words:
        say(words)
    os._exit(1)


def _to_stderr(words: str) -> None:
    sys.stderr.write(f"{words}\n")
    sys.stderr.flush()


_last_words: list[Callable[[str], None]] = [_to_stderr]


def tell_last_words_to(listener: Callable[[str], None]) -> None:
    """Besides stderr: a pool of ranks carries them to the user."""
    _last_words.append(listener)


class Watch:
    """`where` this is, for the words: a rank. `mark` leaves a mark in the current stream; `end` is told the words."""

    def __init__(
        self,
        where: str,
        patience: float,
        mark: Callable[[], Passed] = mark_stream,
        end: Callable[[str], None] = end_rank,
    ) -> None:
        self._where = where
        self._patience = patience
        self._mark = mark
        self._end = end
        self._place = "start"
        self._finished = "nothing"
        self._marks: deque[_Mark] = deque()
        self._guard = threading.Lock()
        self._looking = False

    def at(self, place: str) -> None:
        """The program has come to here."""
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
        """Until the stream has passed all marks: the next one begins it again, so that no thread outlives its network."""
        since = time.monotonic()
        while True:
            time.sleep(self._patience / _LOOKS)
            while self._marks and self._marks[0].passed.query():
                self._finished = self._marks.popleft().done or self._finished
                since = time.monotonic()
            with self._guard:
                if not self._marks:
                    self._looking = False
                    return
            if time.monotonic() - since > self._patience:
                self._end(self._words(self._marks[0]))
                return

    def _words(self, stuck: _Mark) -> str:
        about = stuck.wait or f"{stuck.done} is under way"
        return f"{self._where}, at {stuck.place}, after {self._finished}: {about}: nothing for {self._patience:g} s"

"""Errors of a file system: those that may pass are tried again, and only a request that cannot work is the user's."""

from __future__ import annotations

import errno
import os
import time

import pytest

from cubeloom import UserError
from cubeloom.base.file_errors import CANNOT_WORK, MAY_PASS, PAUSES, FilesFailed, retried


class _Work:
    """Fails so often, then gives 7."""

    def __init__(self, times: int, number: int) -> None:
        self.calls = 0
        self._times, self._number = times, number

    def __call__(self) -> int:
        self.calls += 1
        if self.calls <= self._times:
            raise OSError(self._number, os.strerror(self._number), "some/file")
        return 7


@pytest.fixture(autouse=True)
def paused(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    return pauses


@pytest.mark.parametrize("number", MAY_PASS)
def test_what_may_pass_is_tried_again(number: int, paused: list[float]) -> None:
    assert retried("it failed", _Work(len(PAUSES), number)) == 7
    assert paused == list(PAUSES)
    with pytest.raises(FilesFailed, match=r"^it failed: .*, some/file \(tried 4 times\)$"):
        retried("it failed", _Work(len(PAUSES) + 1, number))


@pytest.mark.parametrize("number", CANNOT_WORK)
def test_what_cannot_work_is_refused_at_once(number: int, paused: list[float]) -> None:
    work = _Work(1, number)
    with pytest.raises(UserError, match=r"^it failed: "):
        retried("it failed", work)
    assert work.calls == 1 and not paused


def test_anything_else_ends_the_attempt_and_the_next_may_do_better() -> None:
    work = _Work(1, errno.ENOENT)
    with pytest.raises(FilesFailed, match=r"^it failed: No such file or directory, some/file$"):
        retried("it failed", work)
    assert work.calls == 1
    assert retried("it failed", _Work(1, errno.ENOENT), also=(errno.ENOENT,)) == 7

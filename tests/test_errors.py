"""What an error says, in one line."""

from __future__ import annotations

import pytest

from cubeloom.base.errors import counted, first_line


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("it broke\nat line 3"), "it broke"),
        (OSError("\nlater"), "later"),
        (MemoryError(), "MemoryError"),
        (AssertionError(" "), "AssertionError"),
    ],
)
def test_an_error_without_words_is_named(error: Exception, said: str) -> None:
    assert first_line(error) == said


def test_one_is_not_many() -> None:
    assert [counted(count, "step") for count in (0, 1, 2, 1000)] == ["0 steps", "1 step", "2 steps", "1,000 steps"]

"""A bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import time

import pytest

from cubeloom.train.metrics import progress

from .runs import record


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands where its one entry says."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_lines_come_at_most_every_two_seconds_first_and_last_always(clock: list[float]) -> None:
    stream = io.StringIO()
    with progress(100, 0, stream) as shown:
        for step in range(100):
            shown.show(record(step))
            clock[0] += 0.125
    steps = [int(line.split()[1]) for line in stream.getvalue().splitlines()]
    assert steps == [0, 16, 32, 48, 64, 80, 96, 99]


def test_a_line_has_the_figures_and_what_is_left(clock: list[float]) -> None:
    stream = io.StringIO()
    with progress(40, 10, stream) as shown:
        for step in (10, 11, 12):
            clock[0] += 3
            shown.show(record(step, mfu=0.415))
    last = stream.getvalue().splitlines()[-1]
    assert last == (
        "step 12 (32%)  loss 3.9880  gradient norm 1.5  lr 0.001  5,120 tokens/s  MFU 41.5%  1 GiB  0:01:21 left"
    )  # three steps of three seconds, and 27 to go


def test_lines_hold_no_control_characters_whatever_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = io.StringIO()
    with progress(3, 0, stream) as shown:
        for step in range(3):
            shown.show(record(step))
        shown.say("a [bold]line[/bold]")
    text = stream.getvalue()
    assert "a [bold]line[/bold]\n" in text
    assert text.replace("\n", "").isprintable()


def test_a_run_that_ends_early_says_how_far_it_came(clock: list[float]) -> None:
    stream = io.StringIO()
    with pytest.raises(KeyboardInterrupt), progress(100, 0, stream) as shown:
        for step in range(7):
            shown.show(record(step))
        raise KeyboardInterrupt
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["0", "6"]


def test_remarkable_steps_are_always_said(clock: list[float]) -> None:
    stream = io.StringIO()
    with progress(100, 0, stream) as shown:
        shown.show(record(0))
        shown.show(record(1, skipped="the loss is nan", loss=float("nan")))
        shown.show(record(2, validation=3.25))
    assert "SKIPPED: the loss is nan" in stream.getvalue() and "validation 3.2500" in stream.getvalue()


def test_a_terminal_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    with progress(4, 1, stream) as shown:
        for step in (1, 2, 3):
            shown.show(record(step))
    text = stream.getvalue()
    assert "\x1b[" in text and "━" in text
    assert "4/4" in text and "loss 3.9970" in text and "5,120 tokens/s" in text


def test_a_terminal_that_can_move_no_cursor_has_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with progress(1, 0, stream) as shown:
        shown.show(record(0))
    assert stream.getvalue().replace("\n", "").isprintable()

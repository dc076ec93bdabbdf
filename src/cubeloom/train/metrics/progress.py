"""Shows the progress of a run: a bar on a terminal, an occasional plain line anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from cubeloom.base.units import bytes_, count, three
from cubeloom.train.metrics.record import Record

SECONDS_A_LINE = 2.0
_ROOM = 4


class Shown(Protocol):
    def show(self, record: Record) -> None:
        """Called after each step."""

    def say(self, text: str) -> None:
        """Print a permanent line."""


@contextmanager
def progress(steps: int, first: int = 0, stream: TextIO | None = None) -> Iterator[Shown]:
    """For a run of `steps` steps that starts with step `first`; on standard error, or on a stream."""
    stream = sys.stderr if stream is None else stream
    # With FORCE_COLOR rich would treat a log file as a terminal.
    if not stream.isatty() or Console(file=stream).is_dumb_terminal:
        lines = Lines(steps, first, stream)
        try:
            yield lines
        finally:
            lines.end()
        return
    with Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
        console=_narrow(stream),
    ) as bar:
        yield Bar(bar, bar.add_task("", total=steps, completed=first))


def _narrow(stream: TextIO) -> Console:
    """Leaves space after the bar for the `^C` that a terminal prints: on a full line it would wrap, and the bar would
    be drawn twice.
    """
    console = Console(file=stream)
    console.width = max(_ROOM, console.width - _ROOM)
    return console


class Bar:
    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar = bar
        self._task = task

    def show(self, record: Record) -> None:
        self._bar.update(self._task, completed=record.step + 1, description=described(record, short=True))
        if record.remarkable:
            self.say(f"step {record.step}  {described(record)}")

    def say(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)


class Lines:
    """Prints the first step, the last, any remarkable one, and others at most every two seconds."""

    def __init__(self, steps: int, first: int, stream: TextIO) -> None:
        self._steps = steps
        self._first = first
        self._stream = stream
        self._begun = time.monotonic()
        self._said: float | None = None
        self._unsaid: Record | None = None

    def show(self, record: Record) -> None:
        now = time.monotonic()
        due = self._said is None or now - self._said >= SECONDS_A_LINE
        if due or record.remarkable or record.step == self._steps - 1:
            self._write(record, now)
        else:
            self._unsaid = record

    def say(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def end(self) -> None:
        """A run may end before its last step: print how far it came."""
        if self._unsaid is not None:
            self._write(self._unsaid, time.monotonic())

    def _write(self, record: Record, now: float) -> None:
        self._said, self._unsaid = now, None
        done, ahead = record.step + 1, self._steps - record.step - 1
        text = f"step {record.step} ({done / self._steps:.0%})  {described(record)}"
        if ahead and done - self._first > 1:
            left = (now - self._begun) / (done - self._first) * ahead
            text += f"  {timedelta(seconds=round(left))} left"
        self.say(text)


def described(record: Record, short: bool = False) -> str:
    parts = [f"loss {record.loss:.4f}"]
    if record.validation is not None:
        parts.append(f"validation {record.validation:.4f}")
    if record.gradient_norm is not None and not short:
        parts.append(f"gradient norm {record.gradient_norm:.3g}")
    parts.append(f"lr {three(record.learning_rate)}")
    parts.append(f"{count(record.tokens_per_s)} tokens/s")
    if record.mfu is not None:
        parts.append(f"MFU {record.mfu:.1%}")
    if record.memory_bytes is not None and not short:
        parts.append(bytes_(record.memory_bytes))
    if record.skipped is not None:
        parts.append(f"SKIPPED: {record.skipped}")
    return "  ".join(parts)

"""The file metrics.jsonl of a run: one line per step and per event."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cubeloom.base.files import replace_text
from cubeloom.train.metrics.record import Record

NAME = "metrics.jsonl"


@dataclass(frozen=True)
class Event:
    """An event of the run, such as a restart, with its time (seconds since 1970) and further fields."""

    name: str
    time: float
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int | None:
        step = self.fields.get("step")
        return step if type(step) is int else None

    def as_json(self) -> dict[str, Any]:
        return {**self.fields, "event": self.name, "time": self.time}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Event:
        rest = {name: value for name, value in values.items() if name not in ("event", "time")}
        return cls(str(values["event"]), float(values["time"]), rest)


@dataclass(frozen=True)
class Log:
    records: tuple[Record, ...]
    events: tuple[Event, ...]
    unread: int  # lines that are neither, such as one cut off by a crash


def read_log(file: Path) -> Log:
    """Empty if there is no file: a run that ended before its first step has none."""
    records: list[Record] = []
    events: list[Event] = []
    unread = 0
    for _, line in _lines(file):
        match line:
            case Record():
                records.append(line)
            case Event():
                events.append(line)
            case None:
                unread += 1
    return Log(tuple(records), tuple(events), unread)


def forget_from(file: Path, step: int) -> None:
    """Remove the records of this step and later ones, which a crashed attempt wrote, and lines cut off by the crash.

    The file is replaced atomically, so a crash during this loses nothing.
    """
    if not file.exists():
        return
    kept = [text for text, _ in _lines(file) if _stays(text, step)]
    replace_text(file, "".join(f"{text}\n" for text in kept))


def _stays(text: str, step: int) -> bool:
    """Also keeps lines that only another version of this program can read: only the step is read."""
    try:
        values = json.loads(text)
    except ValueError:
        return False
    at = values.get("step") if isinstance(values, dict) else None
    return isinstance(values, dict) and ("event" in values or type(at) is not int or at < step)


def _lines(file: Path) -> Iterator[tuple[str, Record | Event | None]]:
    if not file.exists():
        return
    with file.open(encoding="utf-8", errors="replace") as lines:
        for text in lines:
            yield text.rstrip("\n"), _line(text)


def _line(text: str) -> Record | Event | None:
    try:
        values = json.loads(text)
        if not isinstance(values, dict):
            return None
        return Event.from_json(values) if "event" in values else Record.from_json(values)
    except (ValueError, KeyError, TypeError):
        return None

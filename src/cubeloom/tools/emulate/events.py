"""The events of an emulated rank's step, as values: it computes for some seconds, starts a communication, awaits one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Line:
    """A process group as seen by its ranks: all along `axes`, on these workers, otherwise at the rank's coordinates."""

    axes: tuple[str, ...]
    places: tuple[int, ...]


@dataclass(frozen=True)
class Compute:
    seconds: float


@dataclass(frozen=True)
class Start:
    """A collective that takes this long after all of its ranks have started it. Those of one `link` run one after
    another.
    """

    number: int  # within the rank's step
    line: Line
    seconds: float
    link: str = ""


@dataclass(frozen=True)
class Await:
    number: int


Event = Compute | Start | Await
Events = tuple[Event, ...]


@dataclass(frozen=True)
class Program:
    """A rank's step: events before its first action, in each action and after its last one. Actions by their text."""

    before: Events = ()
    actions: Mapping[str, Events] = field(default_factory=dict)
    after: Events = ()
    messages: Mapping[str, float] = field(default_factory=dict)  # duration of the message that an action sends, if any

    def lines(self) -> set[Line]:
        every = (self.before, *self.actions.values(), self.after)
        return {event.line for events in every for event in events if isinstance(event, Start)}


def joined(events: Iterable[Event]) -> Events:
    """The same events, with consecutive computations merged."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Compute) and isinstance(last, Compute):
            found[-1] = Compute(last.seconds + event.seconds)
        else:
            found.append(event)
    return tuple(found)

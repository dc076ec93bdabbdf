"""Checks whether the programs of all ranks match. A rank's program is its sequence of network requests.

The ranks are run against each other as far as they get. A collective completes when every member of its process group
has started it, at the same position in the order of that group; a message when its receive has started as well. A rank
stops at a wait for a communication that is not complete. Ranks that cannot continue at the end are in a deadlock. The
result does not depend on the order in which ranks are run.

Ranks of the same role run the same program with their own groups, so they always get equally far. It is therefore
enough to run one rank of each role, with groups of roles in place of groups of ranks.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cubeloom.base.grid import Grid
from cubeloom.comm.recording_backend import Call, Group, Wait
from cubeloom.tools.rehearse.roles import Line, Role, Roles, line_of

Events = Sequence[Call | Wait]
_AT_MOST = 20  # ranks named in a message


@dataclass(frozen=True)
class Meeting:
    """Where communications meet: a group, or a sender and a receiver in it. `members`: the ranks that represent all."""

    line: Line
    members: tuple[int, ...]
    message: bool = False  # from the first member to the second


@dataclass(frozen=True)
class _Place:
    """One communication of a meeting: the `number`th that each of its members starts."""

    meeting: Meeting
    number: int


class _Programs:
    """The programs of some ranks, one per role, with the meetings of their calls."""

    def __init__(self, programs: Mapping[int, Events], roles: Roles) -> None:
        self.events = programs
        self._grid = roles.grid
        self._roles = roles
        self._standing = {roles.of(rank): rank for rank in programs}
        self._lines: dict[tuple[int, Group], tuple[Line, tuple[int, ...]]] = {}

    def meeting(self, rank: int, call: Call) -> Meeting:
        line, members = self._line(rank, call.group)
        if call.peer is None:
            return Meeting(line, members)
        pair = rank, self._standing[self._roles.of(call.peer)]
        return Meeting(line, pair if call.operation == "send" else pair[::-1], message=True)

    def ranks(self, rank: int, call: Call) -> str:
        """The participating ranks, as text; `rank` represents others."""
        return _list(call.group.ranks if call.peer is None else (rank, call.peer))

    def _line(self, rank: int, group: Group) -> tuple[Line, tuple[int, ...]]:
        key = rank, group
        if key not in self._lines:
            line = line_of(self._grid, rank, group)
            seen: dict[Role, None] = dict.fromkeys(map(self._roles.of, group.ranks))
            self._lines[key] = line, tuple(sorted(self._standing[role] for role in seen))
        return self._lines[key]


def match(programs: Mapping[int, Events], roles: Roles) -> list[str]:
    """Descriptions of mismatches; empty if everything matches. `programs` has one rank of each role."""
    return list(_Run(_Programs(programs, roles)).problems())


class _Run:
    def __init__(self, programs: _Programs) -> None:
        self._programs = programs
        self._position = dict.fromkeys(programs.events, 0)
        # The calls of each member of a meeting, in order; and for each call of a rank its position in them.
        self._started: dict[Meeting, dict[int, list[Call]]] = {}
        self._place: dict[int, dict[int, _Place]] = defaultdict(dict)
        self._wrong: dict[Meeting, str] = {}  # the first mismatch of each

    def problems(self) -> Iterator[str]:
        awake = deque(self._programs.events)
        while awake:
            awake.extend(self._go_on(awake.popleft()))
        yield from self._wrong.values()
        stuck = [rank for rank, events in self._programs.events.items() if self._position[rank] < len(events)]
        for rank in stuck:
            yield self._deadlock(rank)
        if not stuck:
            yield from self._left_alone()

    def _go_on(self, rank: int) -> set[int]:
        """Run a rank until it must wait; return the other ranks that may now continue."""
        events = self._programs.events[rank]
        others: set[int] = set()
        while self._position[rank] < len(events):
            event = events[self._position[rank]]
            if isinstance(event, Call):
                others |= self._start(rank, event)
            elif not self._done(self._place[rank][event.call]):
                break
            self._position[rank] += 1
        return others - {rank}

    def _start(self, rank: int, call: Call) -> set[int]:
        meeting = self._programs.meeting(rank, call)
        started = self._started.setdefault(meeting, {member: [] for member in meeting.members})
        place = _Place(meeting, len(started[rank]))
        started[rank].append(call)
        self._place[rank][self._position[rank]] = place
        if self._done(place) and meeting not in self._wrong:
            wrong = _disagreement({member: started[member][place.number] for member in meeting.members})
            if wrong:
                self._wrong[meeting] = f"communication {place.number} {_of(meeting)}: {wrong}"
        return set(meeting.members)

    def _done(self, place: _Place) -> bool:
        return all(len(calls) > place.number for calls in self._started[place.meeting].values())

    def _deadlock(self, rank: int) -> str:
        event = self._programs.events[rank][self._position[rank]]
        assert isinstance(event, Wait)
        place = self._place[rank][event.call]
        call = self._started[place.meeting][rank][place.number]
        late = [member for member, calls in self._started[place.meeting].items() if len(calls) <= place.number]
        return (
            f"deadlock: rank {rank} waits for {_describe(call)} (communication {place.number} of ranks "
            f"{self._programs.ranks(rank, call)}), which rank {_list(late)} never starts"
        )

    def _left_alone(self) -> Iterator[str]:
        """Communications that some members started and others never did, without a rank waiting for them."""
        for started in self._started.values():
            fewest = min(map(len, started.values()))
            for rank, calls in started.items():
                if len(calls) > fewest:
                    late = [member for member, theirs in started.items() if len(theirs) == fewest]
                    yield (
                        f"rank {rank} starts {_describe(calls[fewest])} with ranks "
                        f"{self._programs.ranks(rank, calls[fewest])}, and rank {_list(late)} never does"
                    )
                    break


def _disagreement(calls: Mapping[int, Call]) -> str:
    """How the members of one communication disagree."""
    ranks = list(calls)
    first = calls[ranks[0]]
    for rank in ranks[1:]:
        if _agreed(calls[rank]) != _agreed(first):
            return f"rank {ranks[0]} has {_describe(first)}, rank {rank} has {_describe(calls[rank])}"
    if first.splits is None:
        return ""
    for mine, here in enumerate(ranks):
        for theirs, there in enumerate(ranks):
            leaving, arriving = _splits(calls[here])[0], _splits(calls[there])[1]
            if len(leaving) == len(arriving) == len(ranks) and leaving[theirs] != arriving[mine]:
                return (
                    f"in {_describe(first)} rank {here} sends {leaving[theirs]} elements to rank {there}, "
                    f"which expects {arriving[mine]}"
                )
    return ""


def _splits(call: Call) -> tuple[tuple[int, ...], tuple[int, ...]]:
    assert call.splits is not None
    return call.splits


def _agreed(call: Call) -> tuple[object, ...]:
    """What must be equal on all members; a send is the counterpart of a receive."""
    operation = "message" if call.peer is not None else call.operation
    return operation, call.size, call.dtype, call.how, call.splits is None


def _describe(call: Call) -> str:
    words = [call.operation, *([f"({call.how})"] if call.how else [])]
    if call.size:
        words.append(f"of {call.size:,} bytes {call.dtype}")
    return " ".join([*words, f"for {call.origin}"] if call.origin else words)


def _of(meeting: Meeting) -> str:
    what = "between" if meeting.message else "of"
    return f"{what} ranks {_list(meeting.members)} over {'+'.join(meeting.line.axes) or 'pipe'}"


def _list(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _AT_MOST} more" if len(ranks) > _AT_MOST else ""
    return ", ".join(map(str, ranks[:_AT_MOST])) + more


def misnamed(names: Mapping[int, Mapping[str, tuple[int, ...]]]) -> list[str]:
    """Groups that ranks created in different orders: torch names a group by the number of groups created before.

    `names`: each rank's names of its groups.
    """
    known: dict[str, tuple[int, tuple[int, ...]]] = {}
    for rank, groups in names.items():
        for name, ranks in groups.items():
            first, theirs = known.setdefault(name, (rank, ranks))
            if theirs != ranks:
                return [
                    f"rank {first} made the group of ranks {_list(theirs)} where rank {rank} made that of ranks "
                    f"{_list(ranks)}: all ranks must make all groups in one order"
                ]
    return []


def unlike(grid: Grid, first: tuple[int, Events], other: tuple[int, Events]) -> str:
    """The first difference between the programs of two ranks of one role, except coordinates; empty if there is none."""
    lines: dict[tuple[int, Group], Line] = {}

    def as_role(rank: int, event: Call | Wait) -> tuple[object, ...]:
        if isinstance(event, Wait):
            return ("wait", event.call)
        line = lines.setdefault((rank, event.group), line_of(grid, rank, event.group))
        place = None if event.peer is None else grid.coordinates(event.peer)["pipe"]
        return line, event.operation, event.size, event.dtype, event.how, event.splits, place, event.origin

    (rank, mine), (there, theirs) = first, other
    for number, (ours, yours) in enumerate(zip(mine, theirs, strict=False)):
        if as_role(rank, ours) != as_role(there, yours):
            return f"rank {rank} and rank {there} should run one program and differ at {number}: {ours}; {yours}"
    if len(mine) != len(theirs):
        return f"rank {rank} and rank {there} should run one program: of {len(mine)} and {len(theirs)} events"
    return ""

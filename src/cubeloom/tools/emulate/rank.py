"""A rank whose devices and network are emulated: it runs the true interpreter and exchanges true messages, and waits the rest.

Each rank has a clock of its own that says how far its emulated device has come. Computing moves it on; a collective ends for
all of its ranks so many seconds after the last of their clocks at the start, which they tell each other over the true
group; a message carries the sender's clock. Whoever is ahead of the wall's clock sleeps until that has caught up. So what
the processes themselves cost, in Python and in waiting for one of two cores, counts only where the sleep does not make up
for it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from cubeloom.comm import Axis, Network, Pending
from cubeloom.pipeline import Action, Schedule
from cubeloom.pipeline.runtime.channels import Channels, Shape
from cubeloom.pipeline.runtime.interpreter import Interpreter
from cubeloom.pipeline.runtime.stage import Carry
from cubeloom.tools.emulate.events import Await, Compute, Events, Line, Program, Start

_SHORT = 5e-4  # seconds that are not worth a sleep of their own
_AHEAD = 0.02  # seconds from the last rank's readiness to the first one's start


@dataclass(frozen=True)
class Stepped:
    """Seconds by the wall's clock, from the common start until the last rank was done; and how far behind its device's clock
    a process was at the end."""

    seconds: float
    late: float


class EmulatedRank:
    """`programs` are by place in the pipeline; `step` is done by all ranks together."""

    def __init__(self, network: Network, schedule: Schedule, programs: Sequence[Program]) -> None:
        self._network = network
        self._schedule = schedule
        self._program = programs[network.coordinates["pipe"]]
        lines = sorted(set().union(*(program.lines() for program in programs)), key=str)
        self._groups = {line: _group(network, line) for line in lines}  # made by all ranks in one order
        self._channels = Channels(network, schedule)
        self._boundaries = {stage: {"clock": Shape((3,), torch.float64)} for stage in range(schedule.stages)}

    def step(self) -> Stepped:
        """One step, with what all ranks saw of it."""
        (ready,) = self._most(time.perf_counter())
        begin = ready + _AHEAD
        work = _Emulation(self._program, self._groups, begin, self._network.coordinates["pipe"])
        where = f"rank {self._network.rank}"
        work.do(self._program.before)
        Interpreter(work, self._channels, self._boundaries, self._schedule.stages, where).run(self._channels.steps)
        work.do(self._program.after)
        work.sleep(to_the_end=True)
        now = time.perf_counter()
        return Stepped(*self._most(now - begin, now - work.clock))

    def _most(self, *numbers: float) -> list[float]:
        """The largest of each over all ranks."""
        mine = torch.tensor(numbers, dtype=torch.float64)
        found: list[float] = self._network.everybody.all_reduce_in_place(mine, "clock", largest=True).wait().tolist()
        return found


def _group(network: Network, line: Line) -> Axis:
    if len(line.places) > 1:
        return network.across(line.places, *line.axes)
    return network.axis(*line.axes)


class _Emulation:
    """One step of a rank. Satisfies the interpreter's `Work`."""

    def __init__(self, program: Program, groups: Mapping[Line, Axis], begin: float, place: int) -> None:
        self._program = program
        self._groups = groups
        self.clock = begin
        self._place = place
        self._started: dict[str, list[tuple[Start, Pending]]] = {}  # by link, those whose end is not known yet
        self._free: dict[str, float] = {}  # when each link is
        self._ends: dict[int, float] = {}

    def forward(self, action: Action, inputs: Carry) -> Carry:
        """Both ways a stage is handed a clock and hands on its own."""
        for message in inputs.values():
            sent, seconds, place = message.tolist()
            self.clock = max(self.clock, sent + (seconds if place != self._place else 0.0))
        name = str(action)
        self.do(self._program.actions[name])
        seconds = self._program.messages.get(name, 0.0)
        return {"clock": torch.tensor([self.clock, seconds, self._place], dtype=torch.float64)}

    backward = forward

    def other(self, action: Action) -> None:
        self.do(self._program.actions[str(action)])

    def do(self, events: Events) -> None:
        for event in events:
            match event:
                case Compute():
                    self.clock += event.seconds
                    self.sleep()
                case Start():
                    self._start(event)
                case Await():
                    self.clock = max(self.clock, self._end(event.number))
                    self.sleep()

    def sleep(self, to_the_end: bool = False) -> None:
        """Until the wall's clock is where the device's is, or nearly so."""
        ahead = self.clock - time.perf_counter()
        if ahead > (0.0 if to_the_end else _SHORT):
            time.sleep(ahead)

    def _start(self, event: Start) -> None:
        clock = torch.tensor([self.clock], dtype=torch.float64)
        pending = self._groups[event.line].all_reduce_in_place(clock, "clock", largest=True)
        self._started.setdefault(event.link, []).append((event, pending))

    def _end(self, number: int) -> float:
        """When a collective is done: those that were started before it on its link are done first."""
        if number not in self._ends:
            link = next(link for link, events in self._started.items() if any(e.number == number for e, _ in events))
            while number not in self._ends:
                event, pending = self._started[link].pop(0)
                latest = max(float(pending.wait()), self._free.get(link, 0.0))
                self._free[link] = self._ends[event.number] = latest + event.seconds
        return self._ends.pop(number)

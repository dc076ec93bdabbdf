"""A rank with an emulated device and network: it runs the real interpreter, sends real messages, and sleeps otherwise.

Each rank has a clock that says how far its emulated device has come. Computation advances it. A collective ends for all
of its ranks a given time after the latest of their clocks at its start, which the ranks exchange over the real process
group. A message carries the sender's clock. A rank that is ahead of the wall clock sleeps until the wall clock has
caught up. The overhead of the processes, in Python and in waiting for one of two cores, therefore counts only if
shorter sleeps cannot make up for it.
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

_SHORT = 5e-4  # shorter sleeps are skipped
_AHEAD = 0.02  # seconds from the moment all ranks are ready to the common start


@dataclass(frozen=True)
class EmulatedStep:
    """Seconds of the wall clock from the common start until the last rank finished, and how far behind its device's
    clock a process was at the end.
    """

    seconds: float
    late: float


class EmulatedRank:
    """`programs` are by pipeline worker; all ranks call `step` together."""

    def __init__(self, network: Network, schedule: Schedule, programs: Sequence[Program]) -> None:
        self._network = network
        self._schedule = schedule
        self._program = programs[network.coordinates["pipe"]]
        lines = sorted(set().union(*(program.lines() for program in programs)), key=str)
        self._groups = {line: _group(network, line) for line in lines}  # created by all ranks in one order
        self._channels = Channels(network, schedule)
        self._boundaries = {stage: {"clock": Shape((3,), torch.float64)} for stage in range(schedule.stages)}

    def step(self) -> EmulatedStep:
        """One step, with the measurements of all ranks."""
        (ready,) = self._most(time.perf_counter())
        begin = ready + _AHEAD
        work = _Emulation(self._program, self._groups, begin, self._network.coordinates["pipe"])
        where = f"rank {self._network.rank}"
        work.do(self._program.before)
        Interpreter(work, self._channels, self._boundaries, self._schedule.stages, where).run(self._channels.steps)
        work.do(self._program.after)
        work.sleep(to_the_end=True)
        now = time.perf_counter()
        return EmulatedStep(*self._most(now - begin, now - work.clock))

    def _most(self, *numbers: float) -> list[float]:
        """The maximum of each over all ranks."""
        mine = torch.tensor(numbers, dtype=torch.float64)
        found: list[float] = self._network.everybody.all_reduce_in_place(mine, "clock", largest=True).wait().tolist()
        return found


def _group(network: Network, line: Line) -> Axis:
    if len(line.places) > 1:
        return network.across(line.places, *line.axes)
    return network.axis(*line.axes)


class _Emulation:
    """One step of a rank. Implements the interpreter's `Work`."""

    def __init__(self, program: Program, groups: Mapping[Line, Axis], begin: float, place: int) -> None:
        self._program = program
        self._groups = groups
        self.clock = begin
        self._place = place
        self._started: dict[str, list[tuple[Start, Pending]]] = {}  # by link, those without a known end
        self._free: dict[str, float] = {}  # when each link becomes free
        self._ends: dict[int, float] = {}

    def forward(self, action: Action, inputs: Carry) -> Carry:
        """In both directions a stage receives a clock and sends its own."""
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
        """Until the wall clock has nearly reached the device's clock."""
        ahead = self.clock - time.perf_counter()
        if ahead > (0.0 if to_the_end else _SHORT):
            time.sleep(ahead)

    def _start(self, event: Start) -> None:
        clock = torch.tensor([self.clock], dtype=torch.float64)
        pending = self._groups[event.line].all_reduce_in_place(clock, "clock", largest=True)
        self._started.setdefault(event.link, []).append((event, pending))

    def _end(self, number: int) -> float:
        """When a collective ends. Those started before it on its link end first."""
        if number not in self._ends:
            link = next(link for link, events in self._started.items() if any(e.number == number for e, _ in events))
            while number not in self._ends:
                event, pending = self._started[link].pop(0)
                latest = max(float(pending.wait()), self._free.get(link, 0.0))
                self._free[link] = self._ends[event.number] = latest + event.seconds
        return self._ends.pop(number)

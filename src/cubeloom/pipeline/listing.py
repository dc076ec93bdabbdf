"""A list scheduler: an order in which no worker idles while it has permitted work, for a given placement and memory
cap.

Whenever a worker is free, it runs the most urgent action that is ready. A forward is admitted only under the cap, and
never into the memory that the worker's other stages need to continue. Each stage has its own reserve, so one pipeline
cannot starve another and the order always ends.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cubeloom.base.errors import UserError
from cubeloom.pipeline.action import Action, Kind, forward
from cubeloom.pipeline.costs import Costs
from cubeloom.pipeline.schedule import Row, Schedule

Home = tuple[int, int]  # replica, stage
Urgency = Callable[[Action], tuple[float, ...]]  # the action with the smallest is run first


@dataclass(frozen=True)
class Layout:
    """The placement of each replica's stages, and the micro-batches of each replica."""

    stages: int
    workers: int
    lines: tuple[tuple[int, ...], ...]  # the worker of each stage, per replica
    microbatches: tuple[range, ...]

    @classmethod
    def single(cls, line: Sequence[int], microbatches: int) -> Layout:
        return cls(len(line), max(line) + 1, (tuple(line),), (range(microbatches),))


def urgency(order: str = "IFW") -> Urgency:
    """By kind in the given order, then by what is nearest to its end. A whole backward ranks as an input gradient."""
    ranks = {kind: rank for rank, kind in enumerate(order)} | {"B": order.index("I")}
    return lambda action: (ranks[action.kind], *nearest_end(action))


def nearest_end(action: Action) -> tuple[float, ...]:
    """Forwards end at the last stage and backwards at the first. Of equals the oldest micro-batch is first."""
    stages_left = -action.stage if action.kind is Kind.FORWARD else action.stage
    return stages_left, action.microbatch, action.replica


def listed(
    name: str,
    layout: Layout,
    costs: Costs,
    cap: float,
    *,
    split: bool = True,
    key: Urgency | None = None,
    reserve: float = 0.0,
) -> Schedule:
    """`reserve`: the fraction of the cap that is divided evenly among a worker's stages. All stages share the rest."""
    desk = [_Desk.of(layout, costs, worker, cap, reserve) for worker in range(layout.workers)]
    run = _Run(layout, costs, desk, key or urgency(), split)
    run.start()
    run.finish()
    total = sum(map(len, layout.microbatches))
    return Schedule(name, layout.stages, total, tuple(desk.row for desk in run.desks))


@dataclass
class _Desk:
    """What is ready on one worker."""

    room: dict[Home, float]  # the memory of one micro-batch of the stage
    sure: dict[Home, float]  # the memory reserved for each stage
    left: dict[Home, int]  # remaining forwards
    cap: float
    forwards: dict[Home, deque[Action]]
    others: list[tuple[tuple[float, ...], Action]] = field(default_factory=list)
    held: dict[Home, float] = field(default_factory=dict)
    done: list[Action] = field(default_factory=list)
    busy: bool = False

    @classmethod
    def of(cls, layout: Layout, costs: Costs, worker: int, cap: float, reserve: float) -> _Desk:
        homes = [
            (replica, stage) for replica, line in enumerate(layout.lines) for stage, w in enumerate(line) if w == worker
        ]
        room = {home: costs.activation[home[1]] for home in homes}
        if sum(room.values()) > cap + 1e-9:
            raise UserError(
                f"worker {worker} holds {len(homes)} stages, whose activations for one micro-batch each are "
                f"{sum(room.values()):g}, over the cap of {cap:g}; try {sum(room.values()):g}"
            )
        # No worker waits for a forward of stage 0: only later stages need memory reserved for one micro-batch.
        least = {home: room[home] if home[1] else 0.0 for home in homes}
        sure = {home: max(least[home], reserve * cap / len(homes)) for home in homes}
        surplus = sum(sure.values()) - cap
        if surplus > 0:
            # If a large stage needs more than its even part, the others get less.
            slack = sum(sure[h] - least[h] for h in homes)
            sure = {h: sure[h] - surplus * (sure[h] - least[h]) / slack for h in homes}
        left = {home: len(layout.microbatches[home[0]]) for home in homes}
        return cls(room, sure, left, cap, {home: deque() for home in homes}, held=dict.fromkeys(homes, 0.0))

    @property
    def row(self) -> Row:
        return tuple(self.done)

    def kept_for(self, home: Home) -> float:
        """The memory that must stay free for the stage, at most that of its remaining micro-batches."""
        return min(max(0.0, self.sure[home] - self.held[home]), self.left[home] * self.room[home])

    def admits(self, home: Home) -> bool:
        others = sum(self.held[h] + self.kept_for(h) for h in self.room if h != home)
        return self.held[home] + self.room[home] + others <= self.cap + 1e-9


@dataclass
class _Run:
    layout: Layout
    costs: Costs
    desks: list[_Desk]
    key: Urgency
    split: bool
    events: list[tuple[float, int, int, Action | None, Action | None]] = field(default_factory=list)
    count: int = 0

    def start(self) -> None:
        for replica, microbatches in enumerate(self.layout.microbatches):
            for m in microbatches:
                self._offer(0.0, forward(0, m, replica))

    def finish(self) -> None:
        """Process events in the order of time; after all events of one instant, idle workers choose."""
        while self.events:
            now = self.events[0][0]
            woken = set()
            while self.events and self.events[0][0] <= now:
                _, _, worker, ended, ready = heapq.heappop(self.events)
                woken.add(worker)
                if ended is not None:
                    self._end(worker, ended, now)
                if ready is not None:
                    self._lay(self.desks[worker], ready)
            for worker in sorted(woken):
                if not self.desks[worker].busy:
                    self._choose(worker, now)

    def _lay(self, desk: _Desk, action: Action) -> None:
        if action.kind is Kind.FORWARD:
            desk.forwards[action.replica, action.stage].append(action)
        else:
            heapq.heappush(desk.others, (self.key(action), action))

    def _choose(self, worker: int, now: float) -> None:
        desk = self.desks[worker]
        best = desk.others[0] if desk.others else None
        from_home = None
        for home, waiting in desk.forwards.items():
            if waiting and desk.admits(home):
                offer = (self.key(waiting[0]), waiting[0])
                if best is None or offer < best:
                    best, from_home = offer, home
        if best is None:
            return
        action = best[1]
        if from_home is None:
            heapq.heappop(desk.others)
        else:
            desk.forwards[from_home].popleft()
            desk.held[from_home] += desk.room[from_home]
            desk.left[from_home] -= 1
        desk.busy = True
        desk.done.append(action)
        self._push(now + self.costs.time(action), worker, ended=action)

    def _end(self, worker: int, action: Action, now: float) -> None:
        desk = self.desks[worker]
        desk.busy = False
        stage, kind, m, replica, _ = action
        if action.makes_weight_grad:
            desk.held[replica, stage] -= desk.room[replica, stage]
        backwards = Kind.INPUT_GRAD if self.split else Kind.BACKWARD
        if kind is Kind.FORWARD:
            last = stage + 1 == self.layout.stages
            self._offer(now, Action(stage, backwards, m, replica) if last else forward(stage + 1, m, replica), worker)
            return
        if action.makes_input_grad and stage:
            self._offer(now, Action(stage - 1, backwards, m, replica), worker)
        if kind is Kind.INPUT_GRAD:
            self._offer(now, Action(stage, Kind.WEIGHT_GRAD, m, replica), worker)

    def _offer(self, now: float, action: Action, source: int | None = None) -> None:
        """The action becomes ready at once on the same worker, and one message later on another."""
        worker = self.layout.lines[action.replica][action.stage]
        travels = source is not None and source != worker
        if travels and self.costs.message:
            self._push(now + self.costs.message, worker, ready=action)
        else:
            self._lay(self.desks[worker], action)
            self._push(now, worker)

    def _push(self, time: float, worker: int, ended: Action | None = None, ready: Action | None = None) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, worker, ended, ready))

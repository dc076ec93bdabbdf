"""Runs the real programs of some ranks of a job, one after another in this process, and checks whether all ranks match."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from fractions import Fraction

from cubeloom.base.errors import UserError
from cubeloom.comm import Ledger, Network, devices, world
from cubeloom.comm.ledger import plain
from cubeloom.comm.recording_backend import Tape, rehearsed
from cubeloom.tools.rehearse.boundaries import boundaries
from cubeloom.tools.rehearse.match import match, misnamed, unlike
from cubeloom.tools.rehearse.memory import Memory, Tracker
from cubeloom.tools.rehearse.program import Event, compute_time, empty_values, watch
from cubeloom.tools.rehearse.roles import Roles
from cubeloom.tools.rehearse.without_values import without_values
from cubeloom.tools.verify import Experiment
from cubeloom.tools.verify.live import Known, build, fill_of


@dataclass(frozen=True)
class RankRun:
    """The result of one rank's program."""

    rank: int
    ledger: Ledger  # of one step
    events: tuple[Event, ...]  # of that step: what it starts and awaits, in order
    memory: Memory
    tape: Tape
    compute_s: float | None  # of one step, if real tensors were used

    @property
    def bytes(self) -> dict[str, Fraction]:
        """Received in one step, by axis."""
        return {axis: size for axis, size in sorted(self.ledger.by_axis().items()) if size}

    def as_json(self) -> dict[str, object]:
        found: dict[str, object] = {
            "rank": self.rank,
            "bytes": {axis: plain(size) for axis, size in self.bytes.items()},
            "memory": {
                "peak": self.memory.peak,
                **{str(kind): size for kind, size in self.memory.at_peak.items()},
                **({"host": self.memory.host} if self.memory.host else {}),
            },
        }
        return found if self.compute_s is None else found | {"compute_s": self.compute_s}


@dataclass(frozen=True)
class Rehearsal:
    experiment: Experiment
    runs: tuple[RankRun, ...]
    chosen: RankRun  # the first one requested, otherwise the one that needs most memory
    problems: tuple[str, ...]  # why the ranks do not match
    seconds: float

    @property
    def matched(self) -> bool:
        return not self.problems

    def as_json(self) -> dict[str, object]:
        return {
            "world": self.experiment.grid.world,
            "ranks_run": [run.rank for run in self.runs],
            **self.chosen.as_json(),
            "matched": self.matched,
            "problems": list(self.problems),
            "seconds": self.seconds,
            "over_time": self.chosen.memory.thinned(),
            "each": [run.as_json() for run in self.runs],
        }


def rehearse(
    experiment: Experiment,
    ranks: Sequence[int] | None = None,
    *,
    real: bool = False,
    device: devices.Kind = devices.CPU,
    tell: Callable[[int, int], None] = lambda number, of: None,
) -> Rehearsal:
    """Run these ranks of the job, and one of every other role; by default the first rank of each role.

    On tensors without values, or on `real` ones, on this device. `tell` is called before each rank with its number and
    the total. Raises UserError for invalid requests.
    """
    began = time.perf_counter()
    schedule, size = experiment.schedule, experiment.grid.world
    wanted = list(ranks or ())
    for rank in wanted:
        if not 0 <= rank < size:
            raise UserError(f"there is no rank {rank} on the grid {experiment.grid}, which has ranks 0 to {size - 1}")
    if schedule is None and experiment.grid.pipe > 1:
        raise UserError(f"the grid {experiment.grid} has a pipeline, which needs a schedule")
    roles = Roles(experiment)
    kind = device if real else None
    try:
        known = None if schedule is None else boundaries(experiment, schedule)
        runs = []
        distinct = roles.distinct(wanted)
        for number, rank in enumerate(distinct):
            tell(number, len(distinct))
            runs.append(_run(experiment, rank, known, kind))
    finally:
        world.forget()
    chosen = runs[0] if wanted else max(runs, key=lambda run: run.memory.peak)
    return Rehearsal(experiment, tuple(runs), chosen, tuple(_problems(runs, roles)), time.perf_counter() - began)


def _run(experiment: Experiment, rank: int, known: Known | None, kind: devices.Kind | None) -> RankRun:
    """`kind`: the device for real tensors, if any."""
    with rehearsed(rank, experiment.grid.world) as tape:
        network = Network(experiment.grid, devices.use(devices.CPU if kind is None else kind, 0))
        fill = (
            empty_values(experiment.dtype, network.device)
            if kind is None
            else fill_of(experiment, experiment.skeleton(), network.device)
        )
        with network.recording() as ledger, without_values() if kind is None else nullcontext():
            tape.ledger = ledger
            with Tracker() as tracker:
                live = build(experiment, network, fill, known)
                seen = watch(live, tracker, ledger)
            done = len(tape.events)
            compute_s = None if kind is None else compute_time(live)
            del tape.events[done:]  # of the steps that were only timed
    tape.ledger = None
    if kind is not None:
        world.forget()  # real tensors take memory
    return RankRun(rank, seen.ledger, seen.events, seen.memory, tape, compute_s)


def _problems(runs: Sequence[RankRun], roles: Roles) -> list[str]:
    standing: dict[object, RankRun] = {}
    found = misnamed({run.rank: run.tape.names for run in runs})
    for run in runs:
        first = standing.setdefault(roles.of(run.rank), run)
        difference = unlike(roles.grid, (first.rank, first.tape.events), (run.rank, run.tape.events))
        found += [difference] if difference else []
    return found + match({run.rank: run.tape.events for run in standing.values()}, roles)

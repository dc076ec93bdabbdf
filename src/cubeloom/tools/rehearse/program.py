"""Some observed steps of one rank: its communication and its memory. The same code for a live job and a rehearsal."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

import torch

from cubeloom.comm import Ledger, Network, devices
from cubeloom.comm.ledger import Entry
from cubeloom.parallel.parameter import local_of
from cubeloom.parallel.replace import Fill
from cubeloom.tools.rehearse.memory import HOST, Memory, Tracker
from cubeloom.tools.verify import Experiment
from cubeloom.tools.verify.live import Live, build, fill_of


class Event(NamedTuple):
    """A communication starts, or the rank waits for it. `number`: of the communication, within the step."""

    what: str  # start or wait
    number: int
    entry: Entry


@dataclass(frozen=True)
class Seen:
    """The observations of one rank: its last step's communication, in order; its memory over all steps."""

    ledger: Ledger
    events: tuple[Event, ...]
    memory: Memory


def watch(live: Live, tracker: Tracker, ledger: Ledger) -> Seen:
    """Train, with the tracker and the ledger on."""
    tracker.label("parameters", map(local_of, live.parameters.values()))
    _label_state(live, tracker)
    # With a sharded optimizer, gradients are freed by the end of the backward.
    live.summed.observer = lambda found: tracker.label("gradients", [found])
    tracker.begin()
    mark = 0
    events: tuple[Event, ...] = ()
    for number in range(live.experiment.steps):
        mark = len(ledger.entries)
        data = live.data(number)
        tracker.label("buffers", data.values())
        with live.network.timing() as trace:
            live.train(data, number, lambda: tracker.label("gradients", live.gradients()))
        events = tuple(Event(what, transfer.number, transfer.entry) for what, transfer in trace.order)
        _label_state(live, tracker)
    return Seen(Ledger(ledger.entries[mark:]), events, tracker.memory())


def _label_state(live: Live, tracker: Tracker) -> None:
    tracker.label("optimizer", live.optimizer_state())
    tracker.label(HOST, live.host_state())


def compute_time(live: Live, repeats: int = 3) -> float:
    """Seconds of a step without network time: the minimum of some."""
    found = []
    for number in range(repeats):
        data = live.data(number)
        devices.settle(live.network.device)
        start = time.perf_counter()
        live.train(data, number, lambda: None)
        devices.settle(live.network.device)
        found.append(time.perf_counter() - start)
    return min(found)


def measure(experiment: Experiment, kind: devices.Kind = devices.CPU) -> Seen:
    """The same on a rank of a live job, which this process is: what a rehearsal must predict."""
    network = Network(experiment.grid, devices.current(kind), experiment.patience)
    fill = fill_of(experiment, experiment.skeleton(), network.device)
    with Tracker() as tracker, network.recording() as ledger:
        return watch(build(experiment, network, fill), tracker, ledger)


def empty_values(dtype: torch.dtype, device: torch.device) -> Fill:
    """Fills tensors without values."""
    return lambda _, block: torch.empty(block.local, dtype=dtype, device=device)

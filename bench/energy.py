"""What steps cost in energy, by the chip's own counter.

A chip at its power limit lowers its clock: it is then only as fast as a step is frugal, and what is merely hidden behind
something else brings nothing. So where two recipes both reach the limit, the ratio of their joules is that of their times.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from threading import Event, Thread
from typing import Protocol

from rich.table import Table

SM_CLOCK = 1  # as NVML numbers them
AT_ONCE = 4  # steps before the host waits for the device


class Meter(Protocol):
    def joules(self) -> float:
        """Since some time in the past; a new value every 0.1 s or so."""
        ...

    def megahertz(self) -> int: ...


class Chip:
    """An NVIDIA GPU's counters, from the library that comes with the driver."""

    def __init__(self, index: int = 0) -> None:
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._device = ctypes.c_void_p()
        self._ask("nvmlInit_v2")
        self._ask("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(self._device))

    def joules(self) -> float:
        millijoules = ctypes.c_ulonglong()
        self._ask("nvmlDeviceGetTotalEnergyConsumption", self._device, ctypes.byref(millijoules))
        return millijoules.value / 1e3

    def megahertz(self) -> int:
        found = ctypes.c_uint()
        self._ask("nvmlDeviceGetClockInfo", self._device, SM_CLOCK, ctypes.byref(found))
        return found.value

    def limits(self) -> tuple[float, int]:
        """Watts and megahertz that it may reach."""
        milliwatts, clock = ctypes.c_uint(), ctypes.c_uint()
        self._ask("nvmlDeviceGetEnforcedPowerLimit", self._device, ctypes.byref(milliwatts))
        self._ask("nvmlDeviceGetMaxClockInfo", self._device, SM_CLOCK, ctypes.byref(clock))
        return milliwatts.value / 1e3, clock.value

    def _ask(self, function: str, *arguments: object) -> None:
        if code := getattr(self._nvml, function)(*arguments):
            raise OSError(f"{function}: NVML says {code}")


@dataclass(frozen=True)
class Cost:
    """Of one step among many that follow each other without a pause."""

    name: str
    step_ms: float
    watts: float
    megahertz: float

    @property
    def joules(self) -> float:
        return self.watts * self.step_ms / 1e3


def cost_of(
    name: str,
    step: Callable[[], object],
    meter: Meter,
    settle: Callable[[], None],
    seconds: float,
    now: Callable[[], float] = time.perf_counter,
) -> Cost:
    """Steps for about so long, after one that warms up."""
    step()
    settle()
    ticks: list[tuple[float, float]] = []  # when the counter was seen to change, and what it said then
    clocks: list[int] = []
    ended = Event()

    def watch() -> None:
        last = meter.joules()
        while not ended.wait(0.002):
            joules = meter.joules()
            if joules != last:
                ticks.append((now(), joules))
                clocks.append(meter.megahertz())
                last = joules

    watcher = Thread(target=watch)
    watcher.start()
    try:
        began, count = now(), 0
        while now() - began < seconds:
            for _ in range(AT_ONCE):
                step()
            count += AT_ONCE
            settle()
        took = now() - began
    finally:
        ended.set()
        watcher.join()
    if len(ticks) < 2:
        raise ValueError(f"the counter changed {len(ticks)} times in {took:.1f} s of {name!r}: measure for longer")
    (first, low), (last, high) = ticks[0], ticks[-1]
    return Cost(name, 1e3 * took / count, (high - low) / (last - first), median(clocks))


def cost_table(costs: list[Cost], limits: tuple[float, int]) -> Table:
    watts, clock = limits
    title = f"energy of steps without pauses; the chip may take {watts:.0f} W and run at {clock} MHz"
    shown = Table("", "step ms", "joules", "watts", "MHz", title=title)
    for each in costs:
        shown.add_row(
            each.name, f"{each.step_ms:.2f}", f"{each.joules:.1f}", f"{each.watts:.0f}", f"{each.megahertz:.0f}"
        )
    return shown


def costs_of(
    recipes: Mapping[str, Callable[[], object]], meter: Meter, settle: Callable[[], None], seconds: float = 5.0
) -> list[Cost]:
    """Of all, in two turns, so that each is as warm as the others; the mean of both."""
    turns = [[cost_of(name, step, meter, settle, seconds / 2) for name, step in recipes.items()] for _ in range(2)]
    return [
        Cost(a.name, (a.step_ms + b.step_ms) / 2, (a.watts + b.watts) / 2, (a.megahertz + b.megahertz) / 2)
        for a, b in zip(*turns, strict=True)
    ]

"""The serial run that a grid is compared with. Experiments that differ only in the grid share one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cubeloom.comm import devices
from cubeloom.launch import RankPool
from cubeloom.tools.verify.experiment import Experiment
from cubeloom.tools.verify.runs import FLOPS, serial_run
from cubeloom.tools.verify.stale import stale_run


@dataclass(frozen=True)
class SerialRun:
    """A finished serial training."""

    losses: list[float]  # of each step
    folder: Path  # with the gradients of each step and the final weights, as safetensors files

    @property
    def flops(self) -> int:
        """Of the first step."""
        return int(json.loads((self.folder / FLOPS).read_text(encoding="utf-8")))


# Returns the serial run of an experiment: computes it, or has it already.
Serially = Callable[[Experiment], SerialRun]


def serial_of(experiment: Experiment) -> Experiment:
    """The experiment that the serial run trains, with everything that it depends on.

    An asynchronous schedule is compared with equally stale weights, so there it is the experiment itself.
    """
    return experiment if experiment.asynchronous else experiment.serial


def train_serially(
    experiment: Experiment, folder: Path, pool: RankPool, device: devices.Kind, timeout: float
) -> SerialRun:
    """Train on one rank of the pool, and write gradients and weights to the folder."""
    run = stale_run if experiment.asynchronous else serial_run
    (outcome,) = pool.run(1, run, serial_of(experiment), str(folder), device, timeout=timeout)
    return SerialRun(outcome.losses, folder)

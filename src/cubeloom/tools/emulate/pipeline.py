"""The real runtime (interpreter, channels and messages) with timed waits in place of computation."""

from __future__ import annotations

import time

import torch

from cubeloom.comm import Network
from cubeloom.pipeline import Action, Costs, Schedule
from cubeloom.pipeline.action import COMPUTE
from cubeloom.pipeline.runtime.channels import Channels, Shape
from cubeloom.pipeline.runtime.interpreter import Interpreter
from cubeloom.pipeline.runtime.stage import Carry


class EmulatedPipeline:
    """One worker of a schedule under costs in seconds. Stages send `numbers` float32 elements to each other."""

    def __init__(self, schedule: Schedule, costs: Costs, network: Network, numbers: int = 1) -> None:
        self._network = network
        self._stages = schedule.stages
        self._waits = _Waits(costs, numbers)
        self._channels = Channels(network, schedule, costs)
        self._boundaries = {stage: {"x": Shape((numbers,), torch.float32)} for stage in range(schedule.stages)}

    def step(self) -> float:
        """Seconds from the moment all ranks were ready until this rank finished."""
        self._network.barrier()
        start = time.perf_counter()
        where = f"rank {self._network.rank}"
        Interpreter(self._waits, self._channels, self._boundaries, self._stages, where).run(self._channels.steps)
        return time.perf_counter() - start


class _Waits:
    """Actions that take their time and compute nothing."""

    def __init__(self, costs: Costs, numbers: int) -> None:
        self._costs = costs
        self._result = {"x": torch.zeros(numbers)}

    def forward(self, action: Action, inputs: Carry) -> Carry:
        time.sleep(self._costs.time(action))
        return self._result

    backward = forward

    def other(self, action: Action) -> None:
        if action.kind in COMPUTE:
            time.sleep(self._costs.time(action))

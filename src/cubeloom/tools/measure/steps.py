"""What a rank does to measure a job: it trains some steps, each timed from when all ranks are ready to the last one's end."""

from __future__ import annotations

import time

import torch

from cubeloom.comm import Network, devices
from cubeloom.train.job import Job
from cubeloom.train.trainer import Trainer

WARM_UP = 3  # steps that do not count: the first connects ranks, the second records


def step_times(job: Job, steps: int, num_comm_channels: int = 1) -> list[float]:
    """Seconds of each step on its slowest rank: the same on all ranks. Nothing is written."""
    network = Network(
        job.grid,
        devices.current(job.device),
        job.patience,
        num_comm_channels=job.num_comm_channels or num_comm_channels,
    )
    trainer = Trainer(job, network)
    mine = []
    for number in range(WARM_UP + steps):
        devices.settle(network.device)
        network.barrier()
        began = time.perf_counter()
        trainer.step()
        devices.settle(network.device)
        if number >= WARM_UP:
            mine.append(time.perf_counter() - began)
    trainer.close()
    taken = torch.tensor(mine, dtype=torch.float64, device=network.device)
    slowest: list[float] = network.everybody.all_reduce_in_place(taken, "measure", largest=True).wait().tolist()
    return slowest

"""NCCL's sockets, and those of the groups of gloo beside it, listen on the loopback alone."""

from __future__ import annotations

import time

from cubeloom import Grid
from cubeloom.comm import Network, devices
from launch.listening import listening, reachable
from on_a_gpu import NEEDS_GPU, GpuRanks

pytestmark = NEEDS_GPU


def _work() -> None:
    network = Network(Grid(x=2), devices.current("cuda"))
    network.host_group.gather(network.rank)
    network.barrier()
    time.sleep(1)  # to be looked at: ranks of a pool may have listened before


def test_ranks_with_gpus_listen_on_the_loopback_alone(gpu_ranks: GpuRanks) -> None:
    with listening() as found:
        gpu_ranks(2).run(2, _work)
    assert len(found) > 2 and not reachable(set().union(*found.values())), found

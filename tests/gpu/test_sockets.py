"""NCCL's sockets, and those of the groups of gloo beside it, listen on the loopback alone."""

from __future__ import annotations

from pathlib import Path

from cubeloom import Grid
from cubeloom.comm import Network, devices
from launch.listening import listening, reachable, wait_until
from on_a_gpu import NEEDS_GPU, GpuRanks

pytestmark = NEEDS_GPU


def _work(seen: Path) -> None:
    network = Network(Grid(x=2), devices.current("cuda"))
    network.aside.gather(network.rank)
    network.barrier()
    wait_until(seen)


def test_ranks_with_gpus_listen_on_the_loopback_alone(gpu_ranks: GpuRanks, tmp_path: Path) -> None:
    with listening(tmp_path / "seen", processes=2) as found:
        gpu_ranks(2).run(2, _work, tmp_path / "seen")
    assert len(found) > 2 and not reachable(set().union(*found.values())), found

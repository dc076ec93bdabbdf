"""Nobody outside of this machine can reach a job that is on it alone: every socket of it listens on the loopback."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from pathlib import Path

import pytest

from commands import exit_code
from cubeloom import Grid
from cubeloom.comm import Network, devices, world
from cubeloom.launch import RankPool, run
from cubeloom.launch.environment import Membership
from cubeloom.launch.ready import join

from .listening import listening, reachable, wait_until

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which sockets there are"),
]

JOB = """
folder = "{folder}"
steps = 2
[model]
preset = "gpt-tiny"
[grid]
x = 2
[batch]
samples = 4
sequence = 8
"""


def _work(seen: Path) -> None:
    network = Network(Grid(x=2, data=2))
    network.host_group.gather(network.rank)
    wait_until(seen)


def _train(folder: Path) -> None:
    (folder / "job.toml").write_text(JOB.format(folder=folder / "run"))
    assert exit_code("train", folder / "job.toml") == 0


def _verify(_: Path) -> None:
    assert exit_code("verify", "--model", "gpt-tiny", "--grid", "x=2", "--steps", "4") == 0


def _run(folder: Path) -> None:
    run(4, _work, folder / "seen")


def _pool(folder: Path) -> None:
    with RankPool(4) as pool:
        pool.run(4, _work, folder / "seen")


@pytest.mark.parametrize("work", [_train, _verify, _run, _pool])
def test_a_job_of_this_machine_listens_on_the_loopback_alone(
    work: object, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert callable(work)
    with listening(tmp_path / "seen", processes=4) as found:
        work(tmp_path)
    assert os.getpid() in found and len(found) > 2  # the meeting point, and the ranks
    assert not reachable(set().union(*found.values())), found


def _join_by_hand(port: int, rank: int, address: str, one_machine: bool, seen: Path) -> None:
    here = Membership(
        rank=rank, world=2, local_rank=rank, address=address, port=port, by="mpirun", one_machine=one_machine
    )
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    join(here, devices.CPU, 60)
    Network(Grid(x=2)).barrier()
    wait_until(seen)
    world.leave()


@pytest.mark.parametrize(("address", "one_machine"), [("localhost", False), (socket.gethostname(), True)])
def test_so_do_ranks_that_mpirun_torchrun_or_srun_started_here(
    address: str, one_machine: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """They meet at an address of the loopback, or their launcher says that all are on this machine."""

    with socket.create_server((world.LOCAL, 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    with listening(seen := tmp_path / "seen", processes=2) as found:
        arguments = (address, one_machine, seen)
        ranks = [context.Process(target=_join_by_hand, args=(port, rank, *arguments)) for rank in range(2)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join(60)
    assert [each.exitcode for each in ranks] == [0, 0]
    assert {each.pid for each in ranks} <= found.keys()
    assert not reachable(set().union(*found.values())), found


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1", True),
        ("localhost", True),
        ("::1", True),
        ("10.0.0.1", False),
        ("node1", False),
        ("0.0.0.0", False),
    ],
)
def test_which_addresses_are_of_this_machine(address: str, local: bool) -> None:
    assert world.is_local(address) == local

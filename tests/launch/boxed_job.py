"""A job on a cluster in a box: real torchrun agents, one a host, that run real `cubeloom train`."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cluster_in_a_box import Box, Host
from cubeloom import Grid
from cubeloom.base.settings import write
from cubeloom.parallel import Batch
from cubeloom.train.job import Job
from cubeloom.train.job.settings import CheckpointSettings, ModelSettings, RateSettings
from cubeloom.train.metrics.log import Log, read_log

PROGRAMS = Path(sys.executable).parent
JOIN = 40  # seconds that agents wait for one that is to come
_PORT = "29500"


class BoxedJob:
    """`agents` are the hosts that have one, with its process; the first is where agents meet."""

    def __init__(self, box: Box, job: Job, ranks_per_host: int) -> None:
        self.box = box
        self.job = job
        self._each = ranks_per_host
        self._nodes = len(box.hosts)
        self._file = job.folder.parent / f"{job.folder.name}.toml"
        self._file.write_text(write(job))
        self.agents: dict[Host, int] = {}

    def log_of(self, host: Host) -> Path:
        return self.job.folder.parent / f"{self.job.folder.name}-{host.name}.log"

    def start(self, host: Host) -> None:
        first = host is self.box.hosts[0]
        conf = f"is_host={int(first)},join_timeout={JOIN},keep_alive_interval=1,keep_alive_max_attempt=4"
        command = [
            *(str(PROGRAMS / "torchrun"), "--nnodes", str(self._nodes), "--nproc-per-node", str(self._each)),
            *("--max-restarts", str(self.job.restarts), "--rdzv-backend", "c10d", "--rdzv-id", "boxed"),
            *("--rdzv-endpoint", f"{self.box.hosts[0].address}:{_PORT}", "--rdzv-conf", conf),
            *("--local-addr", host.address, "--no-python", str(PROGRAMS / "cubeloom"), "train", str(self._file)),
        ]
        folder = self.job.folder.parent / "tmp"
        folder.mkdir(exist_ok=True)
        self.agents[host] = host.start(
            command,
            self.log_of(host),
            {
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "eth0",
                "TMPDIR": str(folder),
                # As docs/clusters.md says: otherwise an agent that replaces another does not find the rest.
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            },
        )

    def ranks(self, host: Host) -> list[int]:
        """The processes of a host's ranks."""
        return [each for each in host.processes() if _parent(each) == self.agents[host]]

    def log(self) -> Log:
        return read_log(self.job.folder / "metrics.jsonl")

    def steps(self) -> int:
        """How many are done, those that a restart will do again included."""
        records = self.log().records
        return records[-1].step + 1 if records else 0

    def ended(self) -> bool:
        return all(code is not None for host in self.box.hosts for code in host.reap())

    def until(self, ready: Callable[[], bool], what: str, timeout: float) -> float:
        """Wait; how long it was."""
        began = time.monotonic()
        while not ready():
            if time.monotonic() - began > timeout:
                for rank in (rank for host in self.agents for rank in self.ranks(host)):
                    send(rank, signal.SIGUSR2)  # it prints where its threads are
                time.sleep(2)
                raise TimeoutError(f"waited {timeout:g} s until {what}\n{self.words()}")
            time.sleep(0.05)
        return time.monotonic() - began

    def words(self) -> str:
        found = [*self._file.parent.glob(f"{self.job.folder.name}-*.log")]
        return "\n".join(f"== {each.name}\n{each.read_text(errors='replace')[-8000:]}" for each in sorted(found))

    def end(self) -> None:
        for host in self.box.hosts:
            host.kill()


def small_job(folder: Path, grid: str = "data=2", steps: int = 600) -> Job:
    """Of two ranks; long enough that a test can disturb it twice."""
    return Job(
        folder=folder,
        steps=steps,
        dtype="float64",
        patience=10,
        grace=5,
        restarts=2,
        model=ModelSettings(preset="gpt-tiny", vocab=64, positions=8, hidden=16, layers=2, heads=4, dropout=0.1),
        batch=Batch(4, 8),
        grid=Grid.parse(grid),
        rate=RateSettings(peak=1e-2, warmup=2),
        checkpoint=CheckpointSettings(every=20),
    )


def ranks_of(host: Host) -> list[int]:
    """The processes of a host that train, whatever started them."""
    return [each for each in host.processes() if re.match(rb"[^\0]*python[^\0]*\0.*cubeloom\0train\0", _command(each))]


def _command(process: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes()
    return b""


def send(process: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, number)


def _parent(process: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return 0

"""A Ray cluster on a cluster in a box: one host has its head, every host a node of it; and a job that is launched there."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from cluster_in_a_box import Box, Host

PROGRAMS = Path(sys.executable).parent
PORT = 6379
STARTS = 90.0  # seconds for a node of Ray to come up
VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # One process per core would be started ahead of the work, each with Ray's libraries.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    # A lost node is noticed within seconds.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "4",
}


class BoxedRay:
    """One CPU per host: so each has one rank of a job."""

    def __init__(self, box: Box, logs: Path) -> None:
        self._box = box
        self._logs = logs
        # Sockets lie there, whose paths must be short.
        self._folder = Path(tempfile.mkdtemp(prefix="ray-"))

    @property
    def address(self) -> str:
        return f"{self._box.hosts[0].address}:{PORT}"

    def __enter__(self) -> Self:
        try:
            first, *others = self._box.hosts
            self.start(first)
            self.until(lambda: self._answers(first), "the head answers")
            for host in others:
                self.start(host)
        except BaseException as error:
            error.add_note(self.words())
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in self._box.hosts:
            host.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self, host: Host) -> None:
        first = host is self._box.hosts[0]
        where = ["--head", f"--port={PORT}", "--include-dashboard=false"] if first else [f"--address={self.address}"]
        folder = [f"--temp-dir={self._folder}"] if first else []
        size = ["--num-cpus=1", "--num-gpus=0", f"--object-store-memory={80 << 20}"]
        command = [str(PROGRAMS / "ray"), "start", "--block", *where, *folder, *size]
        host.start([*command, f"--node-ip-address={host.address}"], self._logs / f"ray-{host.name}.log", VARIABLES)

    def _answers(self, host: Host) -> bool:
        return "Ray runtime started" in (self._logs / f"ray-{host.name}.log").read_text(errors="replace")

    def launch(self, host: Host, settings: Path, *options: str) -> Path:
        """`cubeloom launch ray` on a host; its log."""
        log = self._logs / "launch.log"
        command = [sys.executable, "-m", "cubeloom", "launch", "ray", str(settings), f"--address={self.address}"]
        host.start([*command, *options], log, VARIABLES)
        return log

    def until(self, ready: Callable[[], bool], what: str, timeout: float = STARTS) -> None:
        deadline = time.monotonic() + timeout
        while not ready():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout:g} s until {what}\n{self.words()}")
            time.sleep(0.1)

    def words(self) -> str:
        """The end of all logs, those of Ray included."""
        files = [*self._logs.glob("*.log"), *self._folder.glob("session_latest/logs/*.err")]
        return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')[-4000:]}" for file in files)

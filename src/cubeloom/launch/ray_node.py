"""One node of a job on a Ray cluster: an actor that runs the node's ranks as processes, as torchrun's agent does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cubeloom.base.host import interface_of, version
from cubeloom.comm import devices, world

_LOOK = 0.05
_LONGEST = 0.5  # seconds that a call waits for news
_LAST_WORDS = 1.0  # seconds: a process that a rank started may keep the pipe open


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of all ranks of a job."""

    settings: str
    """All settings of the job, as TOML."""
    command: tuple[str, ...]
    """The command of each rank; the path of the settings is appended."""
    folder: str
    """The working directory of the ranks."""
    world: int
    ranks_per_node: int
    address: str
    """Of the rendezvous, with its port."""
    port: int
    number: int
    """How often the job has been restarted."""

    def variables(self, rank: int, interface: str | None) -> dict[str, str]:
        """What `environment.membership` reads, and the network interface that reaches the other nodes. Variables of the
        node take precedence over defaults.
        """
        return {
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # torch warns of every wait and of hosts without a name
            **(devices.sockets_on(interface) if interface is not None else {}),
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(rank % self.ranks_per_node),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_node),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_RESTART_COUNT": str(self.number),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "ray",
            "OMP_NUM_THREADS": "1",  # ranks are processes: one thread each, or they fight for the cores
            "PYTHONUNBUFFERED": "1",
        }


@dataclass(frozen=True)
class About:
    """What the job has to know of a node before ranks start there."""

    address: str
    versions: dict[str, str | None]
    has_folder: bool


@dataclass(frozen=True)
class News:
    lines: list[str]
    """What ranks have printed since the last call."""
    codes: dict[int, int]
    """Exit codes of the ranks that have ended, in that order."""
    running: int
    """How many ranks have not; none if none was started."""


class Node:
    """Lives on a node of the cluster; its methods are called by the process that launched the job."""

    def __init__(self) -> None:
        self._ranks: dict[int, subprocess.Popen[bytes]] = {}
        self._readers: dict[int, threading.Thread] = {}
        self._lines: deque[str] = deque()
        self._codes: dict[int, int] = {}
        self._settings = tempfile.TemporaryDirectory(prefix="cubeloom-ray-")

    def about(self, folder: str) -> About:
        import ray  # an extra

        return About(
            ray.util.get_node_ip_address(),
            {name: version(name) for name in ("cubeloom", "torch")},
            Path(folder).is_dir(),
        )

    def host(self, address: str) -> int:
        """Host the rendezvous at a free port of this address; return the port."""
        self._store = world.host(address=address)
        return self._store.port

    def start(self, attempt: Attempt, ranks: Sequence[int], address: str) -> None:
        """Start these ranks of the job."""
        settings = Path(self._settings.name, "job.toml")
        settings.write_text(attempt.settings, encoding="utf-8")
        several = attempt.world > attempt.ranks_per_node
        interface = interface_of(address) if several else None
        for rank in ranks:
            self._ranks[rank] = subprocess.Popen(
                # Without the working directory on the module path: as the command `cubeloom` starts.
                [sys.executable, "-P", *attempt.command, str(settings)],
                cwd=attempt.folder,
                env=attempt.variables(rank, interface),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            self._readers[rank] = threading.Thread(target=self._read, args=(rank,), daemon=True)
            self._readers[rank].start()

    def _read(self, rank: int) -> None:
        pipe = self._ranks[rank].stdout
        assert pipe is not None
        with pipe:
            for line in pipe:
                self._lines.append(line.decode(errors="replace").rstrip("\n"))

    def news(self) -> News:
        """Return as soon as there are any, or after half a second."""
        deadline = time.monotonic() + _LONGEST
        while True:
            before = len(self._codes)
            self._look()
            idle = len(self._codes) == len(self._ranks)
            if self._lines or len(self._codes) > before or idle or time.monotonic() > deadline:
                said = [self._lines.popleft() for _ in range(len(self._lines))]
                return News(said, dict(self._codes), len(self._ranks) - len(self._codes))
            time.sleep(_LOOK)

    def _look(self) -> None:
        for rank, process in self._ranks.items():
            code = process.poll()
            if code is not None and rank not in self._codes:
                self._readers[rank].join(_LAST_WORDS)
                self._codes[rank] = code
        if len(self._codes) == len(self._ranks):
            self._settings.cleanup()

    def stop(self) -> None:
        """Ask the ranks to stop. A rank that cannot is killed by its minder."""
        for process in self._ranks.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

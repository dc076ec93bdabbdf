"""A cluster in a box: hosts on this machine, each with a network of its own, for tests and measurements of several machines.

    with Box(hosts=2, rate="1gbit") as box:
        agent = box.hosts[0].start(["ip", "addr"], log=tmp_path / "log")

Each host is a network namespace with one interface, `eth0`, whose other end is plugged into a bridge. `rate` shapes what a host
sends (`tc tbf`). Hosts reach each other at `host.address`, and nothing else: the bridge has no address, so that boxes do not
meet though all of them use the same ones. A process of a host sees the host's own name, and a mount namespace in which
`fill_disk` can put a full disk where a folder was; all other files are those of this machine, as on a cluster with a shared
file system.

What can be done to a host: `kill` all its processes, take its `link` down and up, `fill_disk`. `box.add` plugs in another
host, at an address that none had before. Leaving the box ends all processes, and removes all that was made.

Needs root and iproute2; `why_not()` says what is missing.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Self

TOOLS = ("ip", "tc", "unshare", "nsenter", "mount")
_NUMBERS = itertools.count()
_ENDS = 10.0  # seconds for killed processes to be gone


@cache
def why_not() -> str:
    """Why there can be no box here; nothing if there can."""
    if os.geteuid():
        return "network namespaces need root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    name = f"cubeloom-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"this machine makes no network namespaces: {made.stderr.strip()}"
    try:
        _run("ip", "-n", name, "link", "add", "try0", "type", "veth", "peer", "name", "try1")
        _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "try0", *_shaped("1gbit"))
        _run("unshare", "--mount", "--uts", "true")
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"
    finally:
        _run("ip", "netns", "del", name)
    return ""


class Host:
    """One machine of a box."""

    def __init__(self, box: Box, number: int) -> None:
        self.number = number
        self.name = f"host{number}"
        self.address = f"10.77.{number // 250}.{number % 250 + 1}"
        self.space = f"cubeloom-{box.mark}-{number}"
        self._names: Path | None = None
        self._plug = f"cv{box.mark}{number}"[:15]
        self.started: list[subprocess.Popen[bytes]] = []
        _run("ip", "netns", "add", self.space)
        _run("ip", "link", "add", self._plug, "type", "veth", "peer", "name", "eth0", "netns", self.space)
        _run("ip", "link", "set", self._plug, "master", box.bridge, "up")
        _run("ip", "-n", self.space, "addr", "add", f"{self.address}/16", "dev", "eth0")
        for interface in ("eth0", "lo"):
            _run("ip", "-n", self.space, "link", "set", interface, "up")
        if box.rate is not None:
            _run("ip", "netns", "exec", self.space, "tc", "qdisc", "add", "dev", "eth0", *_shaped(box.rate))

    def start(self, command: Sequence[str], log: Path, variables: Mapping[str, str] | None = None) -> int:
        """Start a process on the host, which writes to the log; gives its number on this machine."""
        with log.open("ab") as out:
            process = subprocess.Popen(
                self.within(command), stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **(variables or {})}
            )
        self.started.append(process)
        return process.pid

    def within(self, command: Sequence[str]) -> list[str]:
        """The command as a process of the host: each program becomes the next."""
        # Not `ip netns exec`, which hides control groups behind another /sys.
        enter = ["unshare", "--uts", "--mount", "nsenter", f"--net=/run/netns/{self.space}"]
        know = f"mount --bind {self._names} /etc/hosts; " if self._names is not None else ""
        return [*enter, "sh", "-c", f'hostname {self.name}; {know}exec "$@"', "sh", *command]

    def knows(self, names: Path) -> None:
        """What is started from now on finds hosts by the names in this file, as in /etc/hosts."""
        self._names = names

    def processes(self) -> list[int]:
        found = subprocess.run(["ip", "netns", "pids", self.space], capture_output=True, text=True)
        return [int(each) for each in found.stdout.split()]

    def kill(self) -> None:
        """All processes at once, as a loss of power does; waits until they are gone."""
        end = time.monotonic() + _ENDS
        while (left := self.processes()) and time.monotonic() < end:
            for process in left:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            self.reap()
            time.sleep(0.02)

    def reap(self) -> list[int | None]:
        """How those that were started here ended; None for one that has not."""
        return [process.poll() for process in self.started]

    def link(self, up: bool) -> None:
        _run("ip", "link", "set", self._plug, "up" if up else "down")

    def fill_disk(self, folder: Path, process: int) -> None:
        """For this process of the host and those that it starts, the folder lies on a disk that is full."""
        full = ("mount", "-t", "tmpfs", "-o", "size=4k,nr_inodes=1", "full", str(folder))
        _run("nsenter", "--target", str(process), "--mount", *full)

    def remove(self) -> None:
        self.kill()
        for process in self.started:
            process.wait(_ENDS)
        subprocess.run(["ip", "netns", "del", self.space], capture_output=True)
        # Its interface goes with it, but some time later.
        subprocess.run(["ip", "link", "del", self._plug], capture_output=True)


class Box:
    """So many hosts at first. `rate` is what each sends at most, as tc writes it; None for all that the machine can."""

    def __init__(self, hosts: int, rate: str | None = "1gbit") -> None:
        self.mark = f"{os.getpid() % 0x10000:04x}{next(_NUMBERS) % 0x100:02x}"
        self.bridge = f"cb{self.mark}"
        self.rate = rate
        self._wanted = hosts
        self.hosts: list[Host] = []

    def __enter__(self) -> Self:
        try:
            _run("ip", "link", "add", self.bridge, "type", "bridge")
            _run("ip", "link", "set", self.bridge, "up")
            for _ in range(self._wanted):
                self.add()
        except BaseException:
            self.__exit__()
            raise
        return self

    def add(self) -> Host:
        self.hosts.append(Host(self, len(self.hosts)))
        return self.hosts[-1]

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            host.remove()
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True)

    def left(self) -> list[str]:
        """What of the box is still on this machine: nothing, once it has been left."""
        spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.split()
        links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout.split()
        return [each for each in (*spaces, *links) if self.mark in each]


def _shaped(rate: str) -> tuple[str, ...]:
    return "root", "tbf", "rate", rate, "burst", "512kb", "latency", "100ms"


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)

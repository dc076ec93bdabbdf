"""What was measured of a machine, as values: checks see nothing else, so that any machine can be made up for a test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Room:
    """Of a file system, in bytes."""

    path: str
    total: int
    free: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    system: str
    cores: int
    """That this process may use, which can be fewer than there are."""
    memory: int
    """Bytes; a container's limit where it has a lower one."""
    memory_free: int
    open_files: int
    """The soft limit of a process."""
    disk: Room
    """Where the command was called."""
    shared_memory: Room | None
    """None: there is no such place."""
    interfaces: tuple[str, ...]
    """Of the network."""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    kind: str
    name: str
    memory: int
    memory_free: int


@dataclass(frozen=True, kw_only=True)
class Devices:
    driver: str | None
    """Of GPUs, as the kernel says; None: it has none."""
    runtime: str | None
    """The version of CUDA that torch was built with; None: torch is a build for the CPU."""
    accelerators: tuple[Accelerator, ...]


@dataclass(frozen=True, kw_only=True)
class Clocks:
    resolution: float
    """Seconds, of the monotonic clock."""
    now: float
    """Seconds since 1970, as this machine believes."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """What ranks of this machine measured of each other, by one backend."""

    kind: str
    backend: str
    version: str | None
    """None: the backend does not say."""
    ranks: int
    failure: str | None = None
    """Why nothing was measured."""
    latency: float = 0.0
    """Seconds for a message of eight bytes, one way: the median of the slowest pair."""
    bandwidth: float = 0.0
    """Bytes a second of a large message, of the slowest pair."""
    all_reduce: float = 0.0
    """Bytes a second that a rank receives in a large all-reduce: 2(n-1)/n of the tensor."""
    skew: float = 0.0
    """Seconds by which the wall clock of some rank is off rank 0's."""
    skew_error: float = 0.0
    """How well that is known: half of a round trip."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    ranks: int
    """That are to run on this machine."""
    machine: Machine
    devices: Devices
    versions: Mapping[str, str | None]
    """Of packages; None: not installed."""
    clocks: Clocks
    links: tuple[Links, ...]
    """One a kind of device that is here."""
    variables: Mapping[str, str]
    """Of the environment, all of them."""

"""The measured facts about a machine, as values. Checks see nothing else, so a test can invent any machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Room:
    """The size and free space of a file system, in bytes."""

    path: str
    total: int
    free: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    system: str
    cores: int
    """Those that this process may use, which can be fewer than the machine has."""
    memory: int
    """Bytes; a container's limit if that is lower."""
    memory_free: int
    open_files: int
    """The soft limit of a process."""
    disk: Room
    """The folder in which the command was called."""
    shared_memory: Room | None
    """None: it does not exist."""
    interfaces: tuple[str, ...]
    """Network interfaces."""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    kind: str
    name: str
    memory: int
    memory_free: int


@dataclass(frozen=True, kw_only=True)
class Devices:
    driver: str | None
    """The version of the GPU driver, as the kernel says; None: there is none."""
    runtime: str | None
    """The CUDA version of torch's build; None: a build for the CPU."""
    accelerators: tuple[Accelerator, ...]


@dataclass(frozen=True, kw_only=True)
class Clocks:
    resolution: float
    """Seconds, of the monotonic clock."""
    now: float
    """Seconds since 1970, on this machine's clock."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """Measurements between ranks of this machine, by one backend."""

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
    """Bytes per second of a large message, for the slowest pair."""
    all_reduce: float = 0.0
    """Bytes per second that a rank receives in a large all-reduce: 2(n-1)/n of the tensor."""
    skew: float = 0.0
    """The largest difference of a rank's wall clock from rank 0's, in seconds."""
    skew_error: float = 0.0
    """Its uncertainty: half of a round trip."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    ranks: int
    """The number of ranks to run on this machine."""
    machine: Machine
    devices: Devices
    versions: Mapping[str, str | None]
    """Versions of packages; None: not installed."""
    clocks: Clocks
    links: tuple[Links, ...]
    """One per kind of device on this machine."""
    variables: Mapping[str, str]
    """All environment variables."""

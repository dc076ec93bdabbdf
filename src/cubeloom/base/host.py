"""The cores and memory that this machine gives a process, within a container's limits; and the installed packages."""

from __future__ import annotations

import fcntl
import os
import platform
import re
import socket
import struct
from contextlib import suppress
from importlib import metadata
from pathlib import Path

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_ADDRESS_OF = 0x8915  # SIOCGIFADDR of Linux


def name_of_rank(rank: int, world: int) -> str:
    """A rank's name in messages, which come from many machines."""
    return f"rank {rank} of {world} on {platform.node()}"


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has this IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                request = fcntl.ioctl(any_socket, _ADDRESS_OF, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(request[20:24]) == address:
                    return name
    return None


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory() -> tuple[int, int]:
    """Total and free memory, in bytes."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    free = page * os.sysconf("SC_AVPHYS_PAGES")
    known = text_of(Path("/proc/meminfo"))
    if found := re.search(r"^MemAvailable:\s+(\d+) kB$", known, re.MULTILINE):
        free = int(found[1]) * 1024  # including what the kernel can reclaim
    limits = [int(text) for text in (text_of(Path(name)).strip() for name in _LIMITS) if text.isdecimal()]
    total = min([total, *limits])
    return total, min(free, total)


def text_of(file: Path) -> str:
    """Empty if the system has no such file."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def cache_folder() -> Path:
    """Where this user's programs keep what they can make again."""
    return Path.home() / ".cache" / "cubeloom"


def version(package: str) -> str | None:
    """None if it is not installed, as when it is run from its source."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

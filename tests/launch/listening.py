"""On which addresses a process and all that it started listen, as Linux knows them."""

from __future__ import annotations

import ipaddress
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LISTENS = "0A"  # the state of a socket in /proc/net/tcp


@contextmanager
def listening(seen: Path | None = None, processes: int = 0) -> Iterator[dict[int, set[str]]]:
    """Looks again and again while it is entered; the addresses by process, of this one and its descendants.

    Makes the file `seen` when it has seen so many new ones listen: what is shorter than a look can wait for that.
    """
    found: dict[int, set[str]] = {}
    known = {os.getpid(), *_listening_now()}  # such as the ranks that tests share
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.01):
            for process, addresses in _listening_now().items():
                found.setdefault(process, set()).update(addresses)
            if seen is not None and len(found.keys() - known) >= processes:
                seen.touch()

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def wait_until(seen: Path) -> None:
    while not seen.exists():
        time.sleep(0.01)


def reachable(addresses: set[str]) -> set[str]:
    """Those that other machines could reach."""
    return {each for each in addresses if not ipaddress.ip_address(each).is_loopback}


def _listening_now() -> dict[int, set[str]]:
    addresses = {
        fields[9]: _address(fields[1].partition(":")[0])
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        if (fields := line.split())[3] == _LISTENS
    }
    found = {}
    for process in _family():
        opened = set(_opened(process))
        mine = {address for inode, address in addresses.items() if f"socket:[{inode}]" in opened}
        if mine:
            found[process] = mine
    return found


def _opened(process: int) -> Iterator[str]:
    """What its files are called; they, and the process, may be gone by now."""
    with suppress(OSError):
        for file in list(Path(f"/proc/{process}/fd").iterdir()):
            with suppress(OSError):
                yield str(file.readlink())


def _address(text: str) -> str:
    """Words of 32 bits, each as this machine has it in memory."""
    words = [bytes.fromhex(text[place : place + 8])[::-1] for place in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))


def _family() -> list[int]:
    children: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(file.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(file.parent.name))
    found = [os.getpid()]
    for process in found:
        found += children.get(process, [])
    return found

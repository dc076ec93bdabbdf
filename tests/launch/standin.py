"""A rank that does not train: it finds its job, meets the others there, and writes what it found.

    python standin.py FOLDER [until-told | fail-once]

- `until-told`: then waits until it is told to stop, as at the end of a time limit, and wants to be begun again;
- `fail-once`: fails the first time.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

from cubeloom.comm.world import TCPStore
from cubeloom.launch.environment import Membership, current, membership
from cubeloom.launch.slurm import INTERRUPTED


def main(folder: Path, *behaviour: str) -> int:
    told: list[int] = []
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, _: told.append(number))
    found = membership(current())
    assert found is not None
    meet(found)
    file = folder / f"rank-{found.rank}-{len(list(folder.glob(f'rank-{found.rank}-*.json')))}.json"
    file.write_text(json.dumps(asdict(found)))
    if "until-told" in behaviour and found.restart == 0:
        while not told:
            time.sleep(0.05)
        time.sleep(0.5 * found.rank)  # ranks do not end at once: the first must not take the others with it
        return INTERRUPTED
    if "fail-once" in behaviour and file.stem.endswith("-0"):
        return 1
    return 0


def meet(found: Membership) -> None:
    """Every rank comes to the meeting point and sees every other there."""
    hosts = found.rank == 0 and not found.hosted
    store = TCPStore(found.address, found.port, is_master=hosts, wait_for_workers=False)
    names = [f"{found.restart}/{rank}" for rank in range(found.world)]
    store.set(names[found.rank], "here")
    store.wait(names)
    # The host leaves last, or others would lose the store while they wait.
    if store.add(f"{found.restart}/seen", 1) == found.world:
        store.set(f"{found.restart}/all", "seen")
    if hosts:
        store.wait([f"{found.restart}/all"])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))

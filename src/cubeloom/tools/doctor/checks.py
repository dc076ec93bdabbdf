"""The checks. Each is a function of the facts and returns at least one finding, if only that everything is fine."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from cubeloom.base.errors import counted
from cubeloom.base.units import bytes_, rate, seconds
from cubeloom.tools.doctor.environment_checks import environment
from cubeloom.tools.doctor.facts import Facts, Links
from cubeloom.tools.doctor.findings import Finding, doubtful, fine, wrong

TESTED = ((2, 11), (2, 13))
"""The oldest torch that we support and the newest that we test, as in pyproject.toml and constraints.txt."""
PYTHON = (3, 11)
NEEDED = ("torch", "numpy", "einops", "greenlet", "safetensors", "tyro", "rich")

GIB = 1 << 30
MIB = 1 << 20
_RELEASED = datetime(2026, 1, 1, tzinfo=UTC).timestamp()  # no correct clock is before this

Check = Callable[[Facts], Iterator[Finding]]


def versions(facts: Facts) -> Iterator[Finding]:
    python = facts.versions["python"] or ""
    if _numbers(python) < PYTHON:
        yield wrong("versions", f"Python {python}", f"cubeloom needs {_dotted(PYTHON)} or later")
    missing = [name for name in NEEDED if facts.versions.get(name) is None]
    if missing:
        yield wrong("versions", f"not installed: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    torch = facts.versions.get("torch")
    if torch is None:
        return
    first, last = TESTED
    tested = f"cubeloom is made for torch {_dotted(first)} to {_dotted(last)}"
    if _numbers(torch) < first:
        yield wrong("versions", f"torch {torch} is too old", f"{tested}: pip install --upgrade torch")
    elif _numbers(torch) > last:
        yield doubtful(
            "versions", f"torch {torch} is newer than any that was tried", f"{tested}; run `cubeloom verify`"
        )
    elif not missing:
        yield fine("versions", f"Python {python}, torch {torch}; {tested}")


def gpus(facts: Facts) -> Iterator[Finding]:
    found = facts.devices
    if not found.accelerators:
        if found.driver is None:
            yield fine("devices", "no GPU: ranks compute on the CPU")
        elif found.runtime is None:
            yield wrong(
                "devices",
                f"a GPU with driver {found.driver} is here, and this torch is a build for the CPU",
                'install a build of torch for CUDA, or set device = "cpu" and mean it',
            )
        else:
            yield wrong(
                "devices",
                f"a GPU with driver {found.driver} is here, and torch {facts.versions.get('torch')} sees none",
                f"check CUDA_VISIBLE_DEVICES, and that the driver knows CUDA {found.runtime}",
            )
        return
    taken = [index for index, each in enumerate(found.accelerators) if each.memory_free < each.memory * 3 // 4]
    if taken:
        yield doubtful(
            "devices",
            f"GPU {', '.join(map(str, taken))}: more than a quarter of the memory is taken already",
            "see with nvidia-smi who has it, and end what is left of an earlier job",
        )
    names = {each.name for each in found.accelerators}
    if len(names) > 1:
        yield doubtful(
            "devices",
            f"unlike GPUs: {', '.join(sorted(names))}",
            "the slowest sets the pace: choose with CUDA_VISIBLE_DEVICES",
        )
    if facts.ranks > len(found.accelerators):
        yield doubtful(
            "devices",
            f"{facts.ranks} ranks for {counted(len(found.accelerators), 'GPU')}: some share one",
            "good for a trial; train with one rank a GPU",
        )
    if not taken and len(names) == 1:
        yield fine("devices", f"{len(found.accelerators)} × {names.pop()}, driver {found.driver}")


def cores(facts: Facts) -> Iterator[Finding]:
    have = facts.machine.cores
    if facts.ranks > have:
        yield doubtful(
            "cores",
            f"{facts.ranks} ranks for {counted(have, 'core')}: they take turns",
            "right for a trial, slow for more than that",
        )
    else:
        yield fine("cores", f"{have} for {counted(facts.ranks, 'rank')}")


def memory(facts: Facts) -> Iterator[Finding]:
    free, each = facts.machine.memory_free, facts.machine.memory_free / facts.ranks
    said = f"{bytes_(free)} free of {bytes_(facts.machine.memory)}, {bytes_(each)} a rank"
    if each < 256 * MIB:
        yield wrong("memory", said, "a rank needs that for torch alone: free some, or start fewer ranks")
    elif each < GIB:
        yield doubtful("memory", said, "little beside torch itself: free some, or start fewer ranks")
    else:
        yield fine("memory", said)


def disk(facts: Facts) -> Iterator[Finding]:
    room = facts.machine.disk
    said = f"{bytes_(room.free)} free of {bytes_(room.total)} at {room.path}"
    if room.free < GIB:
        yield wrong("disk", said, "no room for a checkpoint: free some, or set `folder` elsewhere")
    elif room.free < 10 * GIB:
        yield doubtful("disk", said, "a checkpoint has weights and optimizer, 12 bytes a parameter or more, twice")
    else:
        yield fine("disk", said)


def shared_memory(facts: Facts) -> Iterator[Finding]:
    room = facts.machine.shared_memory
    if room is None:
        yield doubtful("shared memory", "there is no /dev/shm", "mount one: GPUs of one machine talk through it")
        return
    said = f"{bytes_(room.free)} free of {bytes_(room.total)} at {room.path}"
    more = "more with `docker run --shm-size=8g`, or an emptyDir with `medium: Memory` at /dev/shm in a pod"
    # NCCL takes about 10 MB per rank. Docker's default of 64 MiB is soon used up.
    if room.free < 10 * MIB * facts.ranks:
        yield wrong("shared memory", said, more)
    elif room.free < 128 * MIB:
        yield doubtful("shared memory", said, more)
    else:
        yield fine("shared memory", said)


def open_files(facts: Facts) -> Iterator[Finding]:
    # A rank has a connection to every other rank of each of its process groups, and the files of torch and the data.
    limit, needed = facts.machine.open_files, 128 + 16 * facts.ranks
    if limit < needed:
        yield wrong("open files", f"at most {limit}, and {facts.ranks} ranks need about {needed}", "ulimit -n 65536")
    elif limit < 1024:
        yield doubtful("open files", f"at most {limit}", "ulimit -n 65536")
    else:
        yield fine("open files", f"at most {limit}")


def clocks(facts: Facts) -> Iterator[Finding]:
    now = datetime.fromtimestamp(facts.clocks.now, UTC)
    if facts.clocks.now < _RELEASED:
        yield wrong(
            "clocks", f"this machine believes that it is {now:%Y-%m-%d}", "set its clock: chronyc makestep, or ntpd"
        )
    else:
        yield fine("clocks", f"{now:%Y-%m-%d %H:%M:%S} UTC")
    if facts.clocks.resolution > 1e-3:
        yield doubtful(
            "clocks",
            f"the monotonic clock ticks every {seconds(facts.clocks.resolution)}",
            "measured times of short steps will be coarse",
        )


def links(facts: Facts) -> Iterator[Finding]:
    for each in facts.links:
        yield from _link(each)


def _link(link: Links) -> Iterator[Finding]:
    subject = f"ranks by {link.backend}"
    if link.failure is not None:
        yield wrong(
            subject,
            f"{link.ranks} ranks on this machine could not talk to each other: {link.failure}",
            "check the loopback interface, a firewall, and GLOO_ or NCCL_ variables",
        )
        return
    slow = False
    if link.latency > 5e-3:
        slow = True
        yield doubtful(
            subject, f"a message takes {seconds(link.latency)}", "the machine is busy, or has fewer cores than ranks"
        )
    if link.bandwidth < 50e6:
        slow = True
        yield doubtful(subject, f"{rate(link.bandwidth)} between two ranks", "see what else this machine is doing")
    off = abs(link.skew) - link.skew_error
    if off > 0.05:
        slow = True
        say = wrong if off > 10 else doubtful
        yield say(
            subject,
            f"clocks of ranks are {seconds(abs(link.skew))} apart",
            "let every machine follow the same NTP server: timelines of ranks cannot be compared",
        )
    if not slow:
        yield fine(
            subject,
            f"{link.ranks} ranks: {seconds(link.latency)} a message, {rate(link.bandwidth)} between two, "
            f"{rate(link.all_reduce)} in an all-reduce",
        )


CHECKS: tuple[Check, ...] = (
    versions,
    gpus,
    cores,
    memory,
    disk,
    shared_memory,
    open_files,
    clocks,
    links,
    environment,
)


def examine(facts: Facts) -> list[Finding]:
    """All findings of the checks, the worst first."""
    order = ("wrong", "doubtful", "fine")
    found = [finding for check in CHECKS for finding in check(facts)]
    return sorted(found, key=lambda finding: order.index(finding.severity))


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor version."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))

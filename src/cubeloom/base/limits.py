"""How large a request may be. Beyond these a command would overflow, or say nothing for minutes: it is refused at once.

Each lies above what is trained today. Times were seen on two shared cores, 2026-11-16.
"""

from __future__ import annotations

from math import inf

from cubeloom.base.errors import UserError

RANKS = 1 << 18
"""Of a grid. What looks at every rank, as a rehearsal does, takes half a minute for 100,000 of them."""
PROCESSES = 1024
"""Ranks that are started on one machine. Each has a socket for each other one, and a process often no more than so many."""
PROCESSES_A_CORE = 128
"""They connect each with each, one after the other on a core: for 64 on a core that takes twenty seconds."""
FORWARDS = 250_000
"""Of a schedule: its stages times its micro-batches. Under 1f1b 400,000 took a minute, under zb-h1 40,000 a quarter of one."""
LAYERS = 2000
"""Laying them out takes time by their square: seven seconds for 1,000, and a minute for 3,000."""
SIZE = 1 << 24
"""Of a model's widths, heads, positions and vocabulary: the bytes of a weight of two such sizes stay below 2^63."""
SAMPLES = 1 << 24
"""Of a step. A plan weighs every divisor of this number."""
LANES = 64
"""Communicators beside one another: each is a group of its own to make, with threads and sockets."""
SECONDS = 1_000_000
"""That anybody waits, eleven days: the system takes no more than 2^31 milliseconds."""


def of_model(field: str) -> int:
    """The most that a size of a model's configuration can be."""
    return LAYERS if field == "layers" else SIZE


def within(name: str, value: float, least: int = 1, most: float = inf) -> None:
    """Raises UserError that names the setting or option, unless the value lies there; also for what is no number."""
    if not least <= value <= most:
        legal = f"at least {least:,}" if most == inf else f"from {least:,} to {most:,}"
        raise UserError(f"{name} must be {legal}, got {value}")


def share(name: str, value: float) -> None:
    """So much can be left out, and something stays."""
    if not 0 <= value < 1:
        raise UserError(f"{name} must be at least 0 and below 1, got {value}")


def patience(name: str, value: float) -> None:
    """Of those that wait for others: some time, that ends."""
    if not 0 < value <= SECONDS:
        raise UserError(f"{name} must be above 0 and at most {SECONDS:,} seconds, got {value:g}")

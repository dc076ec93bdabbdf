"""Upper limits of a request. Larger requests would overflow, or run for minutes without output, and are refused at
once.

Each limit is above what is trained today. Times were seen on two shared cores, 2026-11-16.
"""

from __future__ import annotations

from math import inf

from cubeloom.base.errors import UserError

RANKS = 1 << 18
"""Ranks of a grid. Code that looks at every rank, such as a rehearsal, takes half a minute for 100,000 of them."""
PROCESSES = 1024
"""Ranks started on one machine. Each has a socket for every other one, and a process is often limited to about so many.
"""
PROCESSES_A_CORE = 128
"""Ranks per core. They connect pairwise, one after another on a core: 64 ranks on a core take twenty seconds."""
FORWARDS = 250_000
"""Actions of a schedule: its stages times its micro-batches. Under 1f1b 400,000 took a minute, under zb-h1 40,000 a
quarter of one.
"""
LAYERS = 2000
"""Layers of a model. Working out their layouts takes quadratic time: seven seconds for 1,000, and a minute for 3,000.
"""
SIZE = 1 << 24
"""A model's widths, heads, positions and vocabulary: the bytes of a weight of two such sizes stay below 2^63."""
SAMPLES = 1 << 24
"""Samples of a step. The planner considers every divisor of this number."""
COMM_CHANNELS = 64
"""Parallel communicators: each is a separate process group, with threads and sockets."""
SECONDS = 1_000_000
"""The longest wait, eleven days: the system accepts at most 2^31 milliseconds."""


def of_model(field: str) -> int:
    """The largest value of a size in a model's configuration."""
    return LAYERS if field == "layers" else SIZE


def within(name: str, value: float, least: int = 1, most: float = inf) -> None:
    """Raises UserError with the name of the setting or option unless the value is in this range; also for NaN."""
    if not least <= value <= most:
        legal = f"at least {least:,}" if most == inf else f"from {least:,} to {most:,}"
        raise UserError(f"{name} must be {legal}, got {value}")


def share(name: str, value: float) -> None:
    """A share that may be left out, so that something remains."""
    if not 0 <= value < 1:
        raise UserError(f"{name} must be at least 0 and below 1, got {value}")


def duration(name: str, value: float) -> None:
    """A timeout: positive and finite."""
    if not 0 < value <= SECONDS:
        raise UserError(f"{name} must be above 0 and at most {SECONDS:,} seconds, got {value:g}")

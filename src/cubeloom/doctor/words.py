"""Numbers as people read them."""

from __future__ import annotations


def size(count: float) -> str:
    """Of bytes, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"


def duration(seconds: float) -> str:
    for limit, factor, unit in ((1e-6, 1e9, "ns"), (1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def rate(count: float) -> str:
    """Of bytes a second, in powers of a thousand, as networks are sold."""
    return f"{count / 1e9:.2f} GB/s" if count >= 1e9 else f"{count / 1e6:.0f} MB/s"

"""Formats numbers for people: three or four digits and a unit."""

from __future__ import annotations

from collections.abc import Sequence


def count(value: float) -> str:
    """`950`, `12.3k`, `4.57M`, `152B`."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{_digits(value / (1e3 if letter == 'k' else size))}{letter}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def three(value: float) -> str:
    """Three significant digits: `6.12`, `0.000312`, `1,230`."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def bytes_(value: float) -> str:
    """Bytes, in powers of 1024."""
    return _in_units(value, ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")))


def rate(value: float) -> str:
    """Bytes per second, in powers of 1000, as for networks."""
    return _in_units(value, ((1e9, "GB/s"), (1e6, "MB/s")))


def seconds(value: float) -> str:
    return "0 s" if value == 0 else _in_units(value, ((1, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")))


def _in_units(value: float, units: Sequence[tuple[float, str]]) -> str:
    """In the largest unit of which there is at least one, or the smallest."""
    size, unit = next((each for each in units if abs(value) >= each[0]), units[-1])
    return f"{_digits(value / size)} {unit}"


def _digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"

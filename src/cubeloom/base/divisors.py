"""Into how many equal parts something can be cut."""

from __future__ import annotations

from math import isqrt


def divisors(number: int) -> list[int]:
    """In ascending order; none of a number below one."""
    small = [each for each in range(1, isqrt(max(number, 0)) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})

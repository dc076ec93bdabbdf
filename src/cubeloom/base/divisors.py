"""Into how many equal parts something can be cut."""

from __future__ import annotations

from math import isqrt


def divisors(number: int) -> list[int]:
    """In ascending order; none of a number below one."""
    small = [each for each in range(1, isqrt(max(number, 0)) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def nearest_multiples(number: int, of: int) -> str:
    """In words: those next to a number that is none, from `of` itself up."""
    below = number - number % of
    return f"the nearest are {below} and {below + of}" if below else f"the nearest is {of}"

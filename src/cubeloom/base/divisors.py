"""The numbers of equal parts into which something can be divided."""

from __future__ import annotations

from math import isqrt


def divisors(number: int) -> list[int]:
    """In ascending order; none for a number below one."""
    small = [each for each in range(1, isqrt(max(number, 0)) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def nearest_multiples(number: int, of: int) -> str:
    """As text: the multiples next to a number that is not one, from `of` itself up."""
    below = number - number % of
    return f"the nearest are {below} and {below + of}" if below else f"the nearest is {of}"

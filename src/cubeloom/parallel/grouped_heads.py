"""How many ranks need the same key and value, where heads are fewer than the ranks of the axis that cuts them."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd


def copies_of(heads: int | None, queries: int | None, ranks: int) -> int:
    """How many ranks of the axis need the same key and value; 1 also where that cannot be."""
    if heads is None or queries is None:
        return 1
    copies = ranks // gcd(heads, ranks)
    return copies if ranks == heads * copies and queries % copies == 0 else 1


def groups_of_heads(heads: int, queries: int | None, ranks: int) -> int:
    """Groups of features that must stay whole, once heads have been divided over the axis."""
    return heads * copies_of(heads, queries, ranks)


def key_value_problems(heads: int, queries: int, axis: str, ranks: int) -> Iterator[str]:
    """What is wrong with so many key-value heads on an axis of so many ranks, and the nearest sizes of the axis that work."""
    if heads % ranks == 0 or copies_of(heads, queries, ranks) > 1:
        return
    works = [size for size in range(1, heads * queries + 1) if not heads % size or copies_of(heads, queries, size) > 1]
    near = [max((size for size in works if size < ranks), default=0), min((s for s in works if s > ranks), default=0)]
    nearest = f"the nearest that work: {' and '.join(f'{axis}={size}' for size in near if size)}"
    if ranks % heads:
        yield f"key-value heads {heads} cannot be cut over {axis}={ranks}, of which neither divides the other; {nearest}"
    else:
        yield (
            f"the {queries} queries of each of {heads} key-value heads cannot be cut into {ranks // heads} parts, as "
            f"{axis}={ranks} has ranks for a head; {nearest}"
        )

"""The grids on which every model must train as it does serially."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

from cubeloom import Grid

ALONE = [f"{axis}={size}" for axis in "xyz" for size in (2, 4, 8)]
PAIRS = [f"{first}={a},{second}={b}" for first, second in ("xy", "xz", "yz") for a, b in ((2, 2), (4, 2), (2, 4))]
OTHERS = ["x=2,y=2,z=2", "x=3,y=1,z=2", "x=3,y=2", "y=3,z=2", "x=6", "z=3"]
CUBES = [*ALONE, *PAIRS, *OTHERS]
WITH_DATA = [f"data=2,{cube}" for cube in CUBES if 2 * Grid.parse(cube).world <= 16]

MODELS = ["gpt-tiny", "llama-tiny", "bert-tiny"]
RESTS = ["sharded", "replicated"]

# Of all those, the fewest in which each axis and each two axes occur. Parts in a wrong order show from three ranks on, and
# axes that are taken for each other where they differ in size.
SAMPLE = ["x=4", "y=4", "z=4", "x=3,y=2", "x=3,y=1,z=2", "y=3,z=2", "x=2,y=2,z=2"]
SAMPLE_WITH_DATA = ["data=2,x=2", "data=2,y=2", "data=2,z=3", "data=2,x=2,y=2"]
assert set(SAMPLE) <= set(CUBES) and set(SAMPLE_WITH_DATA) <= set(WITH_DATA)


def rest_is_long(every: Iterable[Any], short: Collection[Any]) -> list[Any]:
    """Parameters of a test: those named are in the short suite, and all others in the long one."""
    cases = list(every)
    assert all(case in cases for case in short)
    return [case if case in short else _in_the_long_suite(case) for case in cases]


def _in_the_long_suite(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)

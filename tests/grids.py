"""The grids on which every model must train as it does serially."""

from __future__ import annotations

from cubeloom import Grid

ALONE = [f"{axis}={size}" for axis in "xyz" for size in (2, 4, 8)]
PAIRS = [f"{first}={a},{second}={b}" for first, second in ("xy", "xz", "yz") for a, b in ((2, 2), (4, 2), (2, 4))]
OTHERS = ["x=2,y=2,z=2", "x=3,y=1,z=2", "x=3,y=2", "y=3,z=2", "x=6", "z=3"]
CUBES = [*ALONE, *PAIRS, *OTHERS]
WITH_DATA = [f"data=2,{cube}" for cube in CUBES if 2 * Grid.parse(cube).world <= 16]

MODELS = ["gpt-tiny", "llama-tiny", "bert-tiny"]
RESTS = ["sharded", "replicated"]

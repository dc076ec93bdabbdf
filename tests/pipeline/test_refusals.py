"""What cannot work is refused before anything runs, with the nearest that can."""

from __future__ import annotations

from typing import Any

import pytest

from cubeloom import UserError
from cubeloom.pipeline import generate, names


@pytest.mark.parametrize(
    ("name", "stages", "n", "options", "message"),
    [
        ("chimera", 5, 4, {}, "needs an even number of stages, got stages = 5; try 4 or 6"),
        ("chimera", 0, 4, {}, "got stages = 0; try 2"),
        ("chimera", -3, 4, {}, "got stages = -3; try 2"),
        ("chimera-zb", 7, 4, {}, "got stages = 7; try 6 or 8"),
        ("gems", 1, 4, {}, "got stages = 1; try 2"),
        ("chimera", 8, 0, {}, "at least one micro-batch, got 0; try 1"),
        ("chimera", 12, 12, {"pairs": 4}, r"can have 1, 2, 3, 6 pairs .*, got pairs = 4; try 3"),
        ("chimera", 8, 8, {"pairs": 0}, "got pairs = 0; try 1"),
        ("chimera", 8, 8, {"mode": "halved"}, "unknown mode 'halved'; did you mean 'halving'"),
        ("1f1b", 8, 8, {"pairs": 2}, "1f1b has no option pairs; it is one of chimera, chimera-zb"),
        ("gpipe", 8, 8, {"mode": "direct"}, "gpipe has no option mode"),
        ("1f1b", 0, 8, {}, "at least one stage, got 0"),
        ("interleaved", 4, 9, {}, "got microbatches = 9; try 8 or 10"),
        ("interleaved", 4, 8, {"chunks": 0}, "got chunks = 0; try 1"),
        ("hanayo", 4, 8, {"chunks": 3}, "two chunks for each wave, got chunks = 3; try 2 or 4"),
        ("dualpipe", 4, 6, {}, "got microbatches = 6; try 8"),
        ("dualpipe", 4, 9, {}, "got microbatches = 9; try 8 or 10"),
        ("dualpipe", 3, 8, {}, "got stages = 3; try 2 or 4"),
        ("dualpipev", 4, 7, {}, "got microbatches = 7; try 8"),
        ("pipedream-2bw", 4, 6, {}, "whole groups of 4 micro-batches, one a stage, got microbatches = 6; try 4 or 8"),
        ("pipedream-2bw", 1, 6, {}, "at least two stages, got stages = 1; try 2"),
        ("chimera-bz", 4, 4, {}, "did you mean 'chimera-zb'"),
        ("1f1b", 4, 10**9, {}, "1f1b with 4 stages and 1,000,000,000 micro-batches has .* forwards: at most 250,000"),
        ("hanayo", 4, 8, {"chunks": 10**9}, "4 stages of 1,000,000,000 chunks"),
        ("auto", 4, 4, {"placement": "zigzag"}, "There are linear, looped, v, bidirectional, any"),
        ("auto", 5, 4, {"placement": "bidirectional"}, "got stages = 5; try 4 or 6"),
    ],
)
def test_refusals(name: str, stages: int, n: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        generate(name, stages, n, **options)


def test_the_names_are_those_of_the_issue() -> None:
    assert names() == [
        *("gpipe", "1f1b", "interleaved", "gems", "zb-h1", "zb-h2", "zbv", "dualpipe", "dualpipev", "hanayo"),
        *("pipedream", "pipedream-2bw", "chimera", "chimera-zb", "auto"),
    ]

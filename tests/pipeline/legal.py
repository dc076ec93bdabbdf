"""What the property tests draw: every named schedule with any legal stages, micro-batches and options."""

from __future__ import annotations

from hypothesis import strategies as st

from cubeloom.base.divisors import divisors
from cubeloom.pipeline import Costs, Schedule, generate
from cubeloom.pipeline.schedules import FAMILIES
from cubeloom.pipeline.schedules.chimera import Mode

BIDIRECTIONAL = ("gems", "dualpipe", "chimera", "chimera-zb")
NAMED = [name for name in FAMILIES if name != "auto"]
SYNCHRONOUS = [name for name in NAMED if FAMILIES[name].synchronous]


def microbatches_for(name: str, stages: int, wish: int) -> int:
    """The wish, or the nearest number above it that the schedule takes."""
    if name == "dualpipe":
        return max(2 * stages, wish + wish % 2)
    if name == "dualpipev":
        return max(2 * stages, wish)
    if name == "pipedream-2bw":
        return stages * max(1, -(-wish // stages))
    if name == "interleaved":
        return next(n for n in range(wish, 10 * wish) if n % max(1, n // stages) == 0)
    return wish


@st.composite
def schedules(draw: st.DrawFn, among: list[str] | None = None, most_stages: int = 8) -> Schedule:
    name = draw(st.sampled_from(among or NAMED))
    stages = draw(st.integers(1, most_stages))
    if name in BIDIRECTIONAL:
        stages += stages % 2
    if name == "pipedream-2bw":
        stages = max(2, stages)
    microbatches = microbatches_for(name, stages, draw(st.integers(1, 3 * stages + 1)))
    options = FAMILIES[name].options
    pairs = draw(st.sampled_from(divisors(stages // 2))) if "pairs" in options else None
    mode = draw(st.sampled_from(list(Mode))) if "mode" in options else None
    chunks = draw(st.sampled_from([2, 4])) if name in ("interleaved", "hanayo") else None
    costs = draw(stage_costs(stages)) if "costs" in options and draw(st.booleans()) else None
    tries = 12 if "tries" in options else None
    return generate(name, stages, microbatches, pairs=pairs, mode=mode, chunks=chunks, costs=costs, tries=tries)


@st.composite
def stage_costs(draw: st.DrawFn, stages: int) -> Costs:
    """Uneven stages, and messages that may cost nothing. Quarters keep sums exact."""

    def some(least: int) -> tuple[float, ...]:
        return tuple(draw(st.integers(least, 8)) / 4 for _ in range(stages))

    return Costs(some(1), some(1), some(0), message=draw(st.integers(0, 4)) / 4)
